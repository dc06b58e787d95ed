"""Megatron Core on a CPU: shims for its CUDA calls, and --cpu-kernels."""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import types
from typing import Any

import torch

from megatron.bcd.runtime.compat import cpu_kernels, fused_adam

_FACTORIES = ("empty", "full", "ones", "rand", "randn", "tensor", "zeros")
_MODULES_FOR_CUDA = (
    "megatron.core.models.common.embeddings.rope_utils",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.cross_entropy",
    "megatron.core.transformer.utils",
    "megatron.core.utils",
)


class _TorchOnCpu(types.ModuleType):
    """`torch` for Megatron Core's modules without a GPU: factory calls with device="cuda" return CPU tensors."""

    distributed: Any

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)  # only a GPU has page-locked memory
        return factory(*args, **kwargs)

    return make


def _type_name_as_cuda(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Tensor.type() with the names that Megatron Core's optimizers compare with."""
    result = _tensor_type(tensor, dtype, *args, **kwargs)
    if dtype is None and isinstance(result, str):
        return result.replace("torch.", "torch.cuda.", 1)
    return result


_tensor_type = torch.Tensor.type


def patch_megatron_core(kernels: str) -> None:
    """Let Megatron Core run on this CPU, with `kernels` as --cpu-kernels has them. Only where there is no GPU.

    Patches are never taken back: later calls change nothing.
    """
    if kernels_in_use() is None:
        torch_on_cpu = _emulate_cuda()
        if kernels == "fast":
            _use_fast_kernels(torch_on_cpu)
    assert kernels_in_use() == kernels, f"this process computes with --cpu-kernels {kernels_in_use()}"


def kernels_in_use() -> str | None:
    """--cpu-kernels of this process, seen in what is patched; None before `patch_megatron_core`."""
    from megatron.core import utils

    if not isinstance(utils.torch, _TorchOnCpu):
        return None
    return "fast" if isinstance(utils.torch.distributed, cpu_kernels.DistributedForOneRank) else "megatron"


def _emulate_cuda() -> _TorchOnCpu:
    """Megatron Core's CUDA random generator is the CPU's, its current device is the CPU, streams and synchronisation
    vanish. Returns `torch` as its modules see it from now on."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.set_device = nothing
    torch.cuda.synchronize = nothing
    torch.cuda.empty_cache = nothing
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
    torch.Tensor.type = _type_name_as_cuda  # type: ignore[method-assign,assignment]
    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # its tracker warns when the CPU's generator moves while the GPU's is in use: here they are one
    logging.getLogger(megatron_random.__name__).addFilter(lambda record: "CPU RNG state" not in record.getMessage())
    torch_on_cpu = _TorchOnCpu()
    for name in _MODULES_FOR_CUDA:
        importlib.import_module(name).torch = torch_on_cpu  # type: ignore[attr-defined]
    return torch_on_cpu


def _use_fast_kernels(torch_on_cpu: _TorchOnCpu) -> None:
    fused_adam.patch_megatron_core()
    torch_on_cpu.distributed = cpu_kernels.DistributedForOneRank("torch.distributed")
    cpu_kernels.patch_megatron_core()
    keep_freed_memory()


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of glibc's mallopt."""


@functools.cache
def _glibc() -> Any:
    """The C library of this process; None where it is another one, or another system."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def keep_freed_memory() -> None:
    """Let what is freed be there for what is allocated next, as PyTorch's allocator does on a GPU.

    Else glibc hands it back to the system, and every step finds fresh pages, each of which costs time. Tensors above
    32 MiB, glibc's limit, are handed back all the same.
    """
    if _glibc() is not None:
        _glibc().mallopt(_MMAP_THRESHOLD, 32 * 2**20)
        _glibc().mallopt(_TRIM_THRESHOLD, -1)  # never


def return_freed_memory() -> None:
    """Hand what is free back to the system, so that a peak that is measured from now on does not count it."""
    if _glibc() is not None:
        _glibc().malloc_trim(0)
