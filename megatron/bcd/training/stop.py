"""Stopping before the end: a signal, --exit-interval, --exit-duration-in-mins. All ranks stop together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

import torch

from megatron.bcd.config import CheckpointConfig
from megatron.bcd.runtime import device
from megatron.bcd.runtime.exit import SIGNALS

_DURATION_OVER = 1
_FORWARD_SECONDS = 2.0
"""torchrun forwards a Ctrl-C that its ranks have received too: a SIGINT within this time is the same one."""


class StopRequests:
    """Requests to stop on this rank, and the decision of all ranks."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._interval = config.exit_interval
        self._duration = None if config.exit_duration_in_mins is None else 60.0 * config.exit_duration_in_mins
        self._started = time.monotonic()
        self.signal = 0
        """The last one that asks this rank to stop."""
        self._second: threading.Timer | None = None
        self.reason: str | None = None
        """Set on all ranks together: the run saves and stops as soon as no stage is ahead of the others."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, signals are requests to stop. Only in the main thread."""
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            if self._second is not None:
                self._second.cancel()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        if number != signal.SIGINT or self._second is not None:
            return
        if os.environ.get("RANK", "0") == "0":  # not `print`: the signal may have interrupted one
            os.write(2, b"SIGINT: stopping after this iteration; Ctrl-C again ends the run at once, without saving\n")
        self._second = threading.Timer(_FORWARD_SECONDS, _end_on_sigint)
        self._second.daemon = True
        self._second.start()

    def is_signalled(self) -> bool:
        """Whether a signal asks any rank to stop. A collective."""
        mine = torch.tensor([self.signal], dtype=torch.int32, device=device.current())
        torch.distributed.all_reduce(mine, op=torch.distributed.ReduceOp.MAX)
        return bool(mine.item())

    def is_interval_over(self, iteration: int) -> bool:
        """Whether --exit-interval stops the run after `iteration`; known to every rank in advance."""
        return self._interval is not None and iteration % self._interval == 0

    def on_this_rank(self, *, is_writing: bool) -> tuple[int, int]:
        """This rank's request to stop, and whether it writes a checkpoint; `decide` takes the maxima over the ranks."""
        mine = self.signal
        if not mine and self._duration is not None and time.monotonic() - self._started >= self._duration:
            mine = _DURATION_OVER
        return mine, int(is_writing)

    def agree(self, iteration: int, *, is_writing: bool) -> bool:
        """Exchange requests to stop; whether any rank still writes a checkpoint. A collective."""
        mine = self.on_this_rank(is_writing=is_writing)
        maxima = torch.tensor(mine, dtype=torch.int32, device=device.current())
        torch.distributed.all_reduce(maxima, op=torch.distributed.ReduceOp.MAX)
        return self.decide(iteration, maxima.tolist())

    def decide(self, iteration: int, maxima: Sequence[int]) -> bool:
        """What `agree` does, where a step has exchanged the requests along with its loss."""
        request, is_any_rank_writing = maxima
        if request == _DURATION_OVER:
            self.reason = "--exit-duration-in-mins is over"
        elif request:
            self.reason = f"signal {signal.Signals(request).name}"
        elif self.is_interval_over(iteration):
            self.reason = "--exit-interval"
        return bool(is_any_rank_writing)


def _end_on_sigint() -> None:
    """Let the kernel end the process at the next SIGINT, also while the main thread waits in a collective."""
    ctypes.CDLL(None).signal(int(signal.SIGINT), ctypes.c_void_p(0))  # SIG_DFL; Python's own is for the main thread
