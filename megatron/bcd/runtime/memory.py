"""Peak memory, the allocator's cache, and buffers in host memory."""

from __future__ import annotations

import resource
from collections.abc import Iterable

import torch

from megatron.bcd.runtime import device
from megatron.bcd.runtime.compat import cpu


def empty_host_tensor(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor in host memory, page-locked if there is a GPU, so that copies can be asynchronous."""
    return torch.empty(num_elements, dtype=dtype, pin_memory=device.has_cuda())


def release_cached_memory() -> None:
    """Return freed memory to the driver or the system, so that the peak of the next phase does not include it."""
    if device.has_cuda():
        torch.cuda.empty_cache()
    else:
        cpu.return_freed_memory()


def reset_peak_memory() -> None:
    if device.has_cuda():
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # Linux: reset the peak resident set size to the current one
    except OSError:
        pass  # other systems: the peak is that of the whole process


def reserved_memory_bytes() -> int:
    """Return the peak since `reset_peak_memory` of memory that PyTorch's allocator reserves on the GPU; 0 on a CPU."""
    return torch.cuda.max_memory_reserved() if device.has_cuda() else 0


def total_bytes() -> int:
    """Return the memory of this rank's GPU; 0 on a CPU."""
    return torch.cuda.get_device_properties(device.current()).total_memory if device.has_cuda() else 0


def peak_memory_bytes() -> int:
    """Return the peak since `reset_peak_memory`: bytes allocated on the GPU, or the resident set size on a CPU."""
    if device.has_cuda():
        return torch.cuda.max_memory_allocated()
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def storage_bytes(tensors: Iterable[torch.Tensor], *, without: Iterable[torch.Tensor] = ()) -> int:
    """Return the bytes of the tensors' storages, each counted once, without the storages of other tensors."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    for tensor in without:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())
