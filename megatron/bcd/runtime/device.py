"""The device of this process: its own GPU, or the CPU."""

from __future__ import annotations

import contextlib
from collections import deque

import torch


def has_cuda() -> bool:
    return torch.cuda.is_available()


def num_gpus() -> int:
    """GPUs visible to this process; creates no CUDA context."""
    return torch.cuda.device_count() if has_cuda() else 0


def current() -> torch.device:
    """The device of this process: its own GPU, or the CPU."""
    if has_cuda():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def name() -> str:
    """The GPU's model, or "cpu"."""
    return torch.cuda.get_device_name() if has_cuda() else "cpu"


def check_can_offload() -> None:
    """Raises ValueError without a GPU: --optimizer-cpu-offload has nothing to offload."""
    if not has_cuda():
        raise ValueError(
            "--optimizer-cpu-offload needs a CUDA GPU, and none is visible here: leave it out (without a GPU all is in "
            "host memory anyway)"
        )


class Pace:
    """Keeps the CPU from running further ahead of the GPU than so many marks. Without a GPU there is nothing to do.

    PyTorch's allocator gives out memory when the CPU asks for it, and under NCCL waiting for a message blocks the GPU
    only: a CPU that is far ahead holds the buffers of all messages to come.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._marks: deque[torch.cuda.Event] = deque()

    def mark(self) -> None:
        """Wait until the GPU has come to the mark `ahead` before this one."""
        if not has_cuda():
            return
        event = torch.cuda.Event()
        event.record()
        self._marks.append(event)
        if len(self._marks) > self._ahead:
            self._marks.popleft().synchronize()


def synchronize() -> None:
    if has_cuda():
        torch.cuda.synchronize()


def marked_for_profiler() -> contextlib.AbstractContextManager[object]:
    """Inside, NVIDIA's profilers record (``--capture-range=cudaProfilerApi``); nothing without a GPU."""
    return torch.cuda.profiler.profile() if has_cuda() else contextlib.nullcontext()
