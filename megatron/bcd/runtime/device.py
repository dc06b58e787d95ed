"""The device of this process (its GPU, or the CPU), timers and asynchronous copies on it."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

import torch

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
"""Dtypes by their names in flags."""


def has_cuda() -> bool:
    return torch.cuda.is_available()


def current() -> torch.device:
    """Return the device of this process: its GPU, or the CPU."""
    if has_cuda():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def name() -> str:
    """Return the GPU's model name, or "cpu"."""
    return torch.cuda.get_device_name() if has_cuda() else "cpu"


def can_multiply_fp8() -> bool:
    """Return whether this process's device multiplies matrices in FP8: a CPU, or a GPU from Ada and Hopper on."""
    return not has_cuda() or torch.cuda.get_device_capability() >= (8, 9)


def has_variable_length_attention() -> bool:
    """Return whether this process's device has `torch.nn.attention.varlen`: a GPU from Ampere on."""
    has_kernels = has_cuda() and torch.backends.cuda.is_flash_attention_available()
    return has_kernels and torch.cuda.get_device_capability() >= (8, 0)


def set_allocator() -> None:
    """Let PyTorch's allocator extend its segments, unless an environment variable configures it. Comes before CUDA.

    Segments of fixed size left a tenth of the memory unused in steps of 14 billion parameters.
    """
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def set_fp16_accumulation(is_on: bool) -> None:
    """Let products of fp16 matrices add up in fp16, or in fp32 as is usual. Without effect on a CPU."""
    torch.backends.cuda.matmul.allow_fp16_accumulation = is_on


class Throttle:
    """Keeps the CPU at most `ahead` marks ahead of the GPU. Does nothing without a GPU.

    PyTorch's allocator reserves memory when the CPU launches work, and waiting for an NCCL message blocks only the GPU.
    Without a limit, a CPU that runs far ahead would allocate the buffers of all later messages.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._marks: deque[torch.cuda.Event] = deque()

    def mark(self) -> None:
        """Place a mark, and wait until the GPU has reached the one `ahead` marks earlier."""
        if not has_cuda():
            return
        event = torch.cuda.Event()
        event.record()
        self._marks.append(event)
        if len(self._marks) > self._ahead:
            self._marks.popleft().synchronize()


class Stopwatch:
    """The time from its creation to `stop`. On a GPU it times the work launched in between.

    Starting and stopping does not block; reading the time does.
    """

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
    """An asynchronous copy of a small tensor to host memory.

    Reading it waits for the copy. After the CPU has waited for later work on the device, reading is free.
    """

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
"""The event at the end of a copy; None on a CPU, where copies are synchronous."""


class CopyStream:
    """Copies from or to page-locked host memory, overlapped with computation on a separate CUDA stream."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if has_cuda() else None

    def copy(
        self, source: torch.Tensor, *, to: torch.Tensor, after: Iterable[Copied] = (), is_kept: bool = False
    ) -> Copied:
        """Start to copy as soon as all work launched so far, which may still use `to`, and copies `after` are done.

        Pass the returned event to `wait`. With `is_kept` the caller keeps the source until then.
        """
        if self._stream is None:
            to.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        for copied in after:
            if copied is not None:
                self._stream.wait_event(copied)
        if source.is_cuda and not is_kept:  # the caller may free it before the copy is done
            source.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, copied: Copied) -> None:
        """Make later kernels wait for the copy without blocking the CPU."""
        if copied is not None:
            torch.cuda.current_stream().wait_event(copied)


def synchronize() -> None:
    if has_cuda():
        torch.cuda.synchronize()


def cuda_profiler_range() -> contextlib.AbstractContextManager[object]:
    """Return a context in which NVIDIA's profilers record (``--capture-range=cudaProfilerApi``)."""
    return torch.cuda.profiler.profile() if has_cuda() else contextlib.nullcontext()
