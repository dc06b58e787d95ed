"""The device of this process: its own GPU, or the CPU."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from typing import TypeAlias

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


class Stopwatch:
    """Time between its creation and `stop`, on a GPU that of the work in between: nothing is waited for until it is
    read."""

    def __init__(self) -> None:
        self._start = _now()
        self._end: torch.cuda.Event | float | None = None

    def stop(self) -> None:
        self._end = _now()

    @functools.cached_property
    def milliseconds(self) -> float:
        assert self._end is not None, "the stopwatch runs"
        if isinstance(self._start, float):
            assert isinstance(self._end, float)
            return (self._end - self._start) * 1e3
        self._end.synchronize()  # type: ignore[union-attr]
        return float(self._start.elapsed_time(self._end))


def _now() -> torch.cuda.Event | float:
    if not has_cuda():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class HostCopy:
    """A copy of a small tensor to host memory, under way. Once the CPU has waited for later work on the device, reading
    it waits for nothing."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values, self._done = tensor, None
        if has_cuda():
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def tolist(self) -> list[float]:
        if self._done is not None:
            self._done.synchronize()
        return list(self._values.tolist())


Copied: TypeAlias = torch.cuda.Event | None
"""The end of a copy under way; None on a CPU, where it has ended."""


class CopyStream:
    """Copies from page-locked host memory beside computation: on a GPU on a stream of its own."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if has_cuda() else None

    def copy(self, source: torch.Tensor, *, to: torch.Tensor) -> Copied:
        """Start to copy after all work that has been launched so far, which may still read `to`. The event is for
        `wait`."""
        if self._stream is None:
            to.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, copied: Copied) -> None:
        """Let what is launched from here on see the copy; the CPU goes on."""
        if copied is not None:
            torch.cuda.current_stream().wait_event(copied)


def synchronize() -> None:
    if has_cuda():
        torch.cuda.synchronize()


def marked_for_profiler() -> contextlib.AbstractContextManager[object]:
    """Inside, NVIDIA's profilers record (``--capture-range=cudaProfilerApi``); nothing without a GPU."""
    return torch.cuda.profiler.profile() if has_cuda() else contextlib.nullcontext()
