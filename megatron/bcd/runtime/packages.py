"""Optional packages (Transformer Engine and Apex, used if importable and there is a GPU), and the C compiler."""

from __future__ import annotations

import importlib
import os
import shutil
import sysconfig
from pathlib import Path

from megatron.bcd.runtime import device


def is_importable(module: str) -> bool:
    """Return whether ``import module`` works here. An installed but broken package counts as absent."""
    try:
        importlib.import_module(module)
    except Exception:  # a broken binary package may raise anything at import
        return False
    return True


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is importable and there is a GPU."""
    return device.has_cuda() and is_importable("transformer_engine.pytorch")


def transformer_engine_version() -> str:
    """Return the version in use, or an empty string without Transformer Engine."""
    if not has_transformer_engine():
        return ""
    import transformer_engine

    return str(getattr(transformer_engine, "__version__", "unknown"))


def has_apex() -> bool:
    """Return whether NVIDIA's Apex with its fused kernels (not PyPI's unrelated `apex`) and a GPU are available."""
    return device.has_cuda() and all(map(is_importable, ("apex.optimizers", "apex.normalization", "amp_C")))


def missing_for_compilation() -> str:
    """Return what torch.compile lacks to compile for a GPU here; "" if nothing, or if compilation is off.

    Triton compiles the launchers of its kernels with a C compiler: CC, else gcc or clang.
    """
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return ""
    compiler = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([compiler] if compiler else ["gcc", "clang"])):
        return f"the C compiler of CC={compiler}" if compiler else "a C compiler"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return "" if header.is_file() else str(header)


def compiles(choice: str) -> bool:
    """Return whether functions of ours are compiled, given --bcd-compile.

    Raises:
        ValueError: `choice` is `on`, but there is no compiler.
    """
    if choice == "auto":
        return device.has_cuda() and os.environ.get("TORCHDYNAMO_DISABLE") != "1" and not missing_for_compilation()
    if choice == "on" and (missing := missing_for_compilation()):
        raise ValueError(f"--bcd-compile on: {missing} is missing. Install gcc and python3-dev, or omit the flag.")
    return choice == "on"


PYTORCH_OPTIMIZER = "PyTorch AdamW"


def optimizer_implementation() -> str:
    """Return the name of the package whose Adam Megatron Core uses. It selects the first one that can be imported."""
    from megatron.core.optimizer import Adam

    module = Adam.__module__
    if module.startswith("transformer_engine"):
        return "Transformer Engine fused Adam"
    return "Apex fused Adam" if module.startswith("apex") else PYTORCH_OPTIMIZER
