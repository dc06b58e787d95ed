"""Peak memory, the allocator's cache, and page-locked host memory."""

from __future__ import annotations

import resource
from collections.abc import Callable

import torch

from megatron.bcd.runtime import cpu, device


def empty_in_host_memory(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor; pinned where there is a GPU, so that copies need not wait for each other."""
    return torch.empty(num_elements, dtype=dtype, pin_memory=device.has_cuda())


def release_cached_memory() -> None:
    """Give freed memory back to the driver or the system, so that a phase's peak is this phase's own."""
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
            file.write("5")  # Linux: the peak resident set starts again from the present one
    except OSError:
        pass  # elsewhere the peak stays the whole process's


def allocator() -> Callable[[], int] | None:
    """What asks the GPU's allocator for the bytes that are allocated now; None on a CPU, which keeps no count."""
    return torch.cuda.memory_allocated if device.has_cuda() else None


def peak_memory_bytes() -> int:
    """Peak since `reset_peak_memory`: bytes allocated on the GPU, or the process's resident set on a CPU."""
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
