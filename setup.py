"""Install ``megatron.bcd`` next to the ``megatron.core`` of the megatron-core wheel.

``megatron`` is a namespace that both share, so this package must not contain ``megatron/__init__.py``.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    """Return the ``__version__`` of ``megatron/bcd/__init__.py`` without importing it."""
    text = (ROOT / "megatron" / "bcd" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert match, "megatron/bcd/__init__.py has no __version__ line"
    return match[1]


def long_description() -> str:
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


setup(
    name="megatron-bcd",
    version=version(),
    description="Block coordinate descent for large language models on Megatron Core",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_namespace_packages(include=["megatron.bcd", "megatron.bcd.*"]),
    package_data={"megatron.bcd.arguments": ["megatron_flag_names.txt"]},
    python_requires=">=3.11",
    # requirements.txt pins the tested versions. The bounds exist because the patches in megatron/bcd/runtime are for
    # these minor releases of Megatron Core. Megatron Core 0.19 imports triton.
    install_requires=[
        "filelock>=4.2",
        "jinja2>=3.1",
        "megatron-core>=0.16,<0.20,!=0.17.*,!=0.18.*",
        "numpy",
        "psutil",
        "pyyaml",
        "rich>=13",
        "safetensors",
        "sentencepiece",
        "tensorboard",
        "tokenizers",
        "torch>=2.6,<2.15",
        "transformers>=5",
        'triton; python_version >= "3.12"',
    ],
    extras_require={
        "board": ["flask>=3"],
        "datasets": ["datasets>=4"],
        "elastic": ["torchft==0.2.*"],
        "figures": ["matplotlib"],
        "wandb": ["wandb"],
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
