"""What torch finds on this machine, as JSON on stdout: a process of its own, which may die at an import.

Started by tools/check_machine.py; without Megatron Core.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

OPTIONAL = {
    "transformer_engine": ("transformer_engine.pytorch",),
    "apex": ("apex.optimizers", "apex.normalization", "amp_C"),
}
"""Modules that training needs of a package to use it (megatron.bcd.runtime.packages)."""


def optional(name: str) -> dict[str, Any]:
    """Whether a package that training can do without is usable."""
    try:
        for module in OPTIONAL[name]:
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        is_absent = (error.name or "").split(".")[0] == name
        return {"is_absent": is_absent, "error": str(error)}
    except Exception as error:  # a broken binary package may raise anything
        return {"is_absent": False, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {"version": str(getattr(importlib.import_module(name), "__version__", "unknown"))}


def gpus(torch: Any) -> list[dict[str, Any]]:
    """Every visible GPU, and which others it reaches without a detour through host memory."""
    count = torch.cuda.device_count()
    found = []
    for index in range(count):
        about = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": about.name,
                "memory_gib": about.total_memory / 2**30,
                "capability": f"{about.major}.{about.minor}",
                "peers": [
                    other
                    for other in range(count)
                    if other != index and torch.cuda.can_device_access_peer(index, other)
                ],
            }
        )
    return found


def probe() -> dict[str, Any]:
    import torch

    from megatron.bcd.runtime import packages

    has_cuda = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "has_cuda": has_cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_cuda else None,
        "gpus": gpus(torch) if has_cuda else [],
        "transformer_engine": optional("transformer_engine"),
        "apex": optional("apex"),
        "missing_for_compilation": packages.missing_for_compilation(),
        "cores": len(os.sched_getaffinity(0)),
    }


if __name__ == "__main__":
    print(json.dumps(probe()))
