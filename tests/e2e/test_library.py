"""megatron.bcd as a library: its public names, the example of its page, and the wheel of ``pip install .``."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.bad_input_cases import good_documents, write_dataset

import megatron.bcd

PUBLIC = {
    "BlockCoordinate": None,
    "FAMILY_DEFAULTS": None,
    "RunConfig": None,
    "build_model": ["config", "padded_vocab_size", "implementation"],
    "parse_run_config": ["argv", "prog", "defaults", "world_size"],
    "pretrain": ["config", "build_model", "prog", "notes"],
}
"""Parameters of public names. Removing or renaming one breaks other programs."""


def test_public_names() -> None:
    """The public names are there, with their parameters."""
    assert sorted(megatron.bcd.__all__) == sorted(PUBLIC)
    for name, parameters in PUBLIC.items():
        result = getattr(megatron.bcd, name)
        assert parameters is None or list(inspect.signature(result).parameters) == parameters
        assert name in dir(megatron.bcd)


def test_imports_are_light() -> None:
    """The package imports without torch, and BlockCoordinate without Megatron Core, which users of plain PyTorch don't
    have."""
    for program, package in (
        ("megatron.bcd", "torch"),
        ("megatron.bcd; megatron.bcd.BlockCoordinate", "megatron.core"),
    ):
        command = f"import sys, {program}; sys.exit({package!r} in sys.modules)"
        assert subprocess.run([sys.executable, "-c", command]).returncode == 0


def test_the_example(repo_root: Path, tmp_path: Path) -> None:
    """The page's example runs; a second run in its process resumes, and leaves no model and the collector as it was."""
    page = (repo_root / "docs" / "library.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    write_dataset(tmp_path / "my_text_document", good_documents())
    again = """
import gc, weakref
models = []
def watched(*args, **kwargs):
    models.append(weakref.ref(model := my_model(*args, **kwargs)))
    return model
again = [*flags.split(), "--load", "my_run", "--train-iters", "8", "--manual-gc"]
pretrain(parse_run_config(again, prog="my_program"), watched)
print("left behind:", models[0](), gc.get_freeze_count(), "collects:", gc.isenabled())
"""
    (tmp_path / "my_program.py").write_text(example + again)
    done = subprocess.run(
        [sys.executable, "my_program.py"],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": str(repo_root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert "last loss" in done.stdout and "after iteration 6" in done.stdout
    assert "left behind: None 0 collects: True" in done.stdout
    assert [path.name for path in sorted((tmp_path / "my_run").glob("iter_*"))] == ["iter_0000006", "iter_0000008"]


def test_the_wheel(tmp_path: Path, repo_root: Path) -> None:
    """The wheel has all files of the package, and no megatron/__init__.py, which would hide megatron.core. From another
    folder the two halves of the namespace are in two different places."""
    pytest.importorskip("setuptools", reason="needs setuptools to build the wheel without the network")
    source, site = tmp_path / "source", tmp_path / "site"
    package = shutil.copytree(
        repo_root / "megatron", source / "megatron", ignore=shutil.ignore_patterns("__pycache__")
    )  # so that no build folder is left, or found, in the repository
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(repo_root / name, source)
    here = {path.relative_to(source).as_posix() for path in package.rglob("*") if path.is_file()}
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", str(source)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        (license_name,) = [name for name in archive.namelist() if name.endswith("/LICENSE")]
        assert b"Apache License" in archive.read(license_name)
        archive.extractall(site)  # as pip installs it
    assert packed == here and all(name.startswith("megatron/bcd/") for name in packed)

    program = (
        "import importlib.metadata as m, megatron.bcd, megatron.core\n"
        "print(megatron.bcd.__file__, megatron.core.__file__, sep='\\n')\n"
        "print(megatron.bcd.__version__, m.version('megatron-bcd'))"
    )
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=source.parent, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    bcd, core, versions = done.stdout.splitlines()
    assert Path(bcd).is_relative_to(site) and not Path(core).is_relative_to(site)
    assert not Path(core).is_relative_to(repo_root / "megatron") and len(set(versions.split())) == 1
