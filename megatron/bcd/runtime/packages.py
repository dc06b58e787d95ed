"""Optional packages: Transformer Engine and Apex, used where they are importable and there is a GPU; a C compiler."""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
import sysconfig
from pathlib import Path

from megatron.bcd.runtime import device


def is_importable(module: str) -> bool:
    """Whether ``import module`` works here; a package that is installed but broken counts as absent."""
    try:
        importlib.import_module(module)
    except Exception:  # a broken binary package may raise anything at import
        return False
    return True


def has_transformer_engine() -> bool:
    """Transformer Engine is importable and there is a GPU to run it on."""
    return device.has_cuda() and is_importable("transformer_engine.pytorch")


def has_precision_aware_adam() -> bool:
    """Transformer Engine is there, and its Adam can hold what bf16 weights lack of main parameters: from 2.1 on."""
    if not has_transformer_engine():
        return False
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam
    except ImportError:
        return False
    return "store_param_remainders" in inspect.signature(FusedAdam).parameters


def transformer_engine_version() -> str:
    """The version in use; empty without Transformer Engine."""
    if not has_transformer_engine():
        return ""
    import transformer_engine

    return str(getattr(transformer_engine, "__version__", "unknown"))


def has_apex() -> bool:
    """NVIDIA's Apex (not the unrelated PyPI package of that name) with its fused kernels, and a GPU."""
    return (
        device.has_cuda()
        and is_importable("apex.optimizers")
        and is_importable("apex.normalization")
        and is_importable("amp_C")
    )


def missing_for_compilation() -> str:
    """What torch.compile lacks here to compile for a GPU; empty if nothing, or if it is switched off.

    Triton compiles the launchers of its kernels with a C compiler: CC, else gcc or clang.
    """
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return ""
    compiler = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([compiler] if compiler else ["gcc", "clang"])):
        return f"the C compiler of CC={compiler}" if compiler else "a C compiler"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return "" if header.is_file() else str(header)


PYTORCH_OPTIMIZER = "PyTorch AdamW"


def optimizer_implementation() -> str:
    """The origin of Megatron Core's Adam, which it chooses by importability when it is imported."""
    from megatron.core.optimizer import Adam

    module = Adam.__module__
    if module.startswith("transformer_engine"):
        return "Transformer Engine fused Adam"
    return "Apex fused Adam" if module.startswith("apex") else PYTORCH_OPTIMIZER
