"""Stopping before the end: a signal, --exit-interval, --exit-duration-in-mins. All ranks stop together."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

import torch

from megatron.bcd.config import CheckpointConfig
from megatron.bcd.runtime import device

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Sent by Slurm and spot instances some time before they end a job."""
_DURATION_OVER = 1


class StopRequests:
    """Requests to stop on this rank, and the decision of all ranks."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._interval = config.exit_interval
        self._duration = None if config.exit_duration_in_mins is None else 60.0 * config.exit_duration_in_mins
        self._started = time.monotonic()
        self._signal = 0
        self.reason: str | None = None
        """Set on all ranks together: the run saves and stops as soon as no stage is ahead of the others."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, signals are requests to stop. Only in the main thread."""
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def is_interval_over(self, iteration: int) -> bool:
        """Whether --exit-interval stops the run after `iteration`; known to every rank in advance."""
        return self._interval is not None and iteration % self._interval == 0

    def agree(self, iteration: int, *, is_writing: bool) -> bool:
        """Exchange requests to stop; whether any rank still writes a checkpoint. A collective."""
        mine = self._signal
        if not mine and self._duration is not None and time.monotonic() - self._started >= self._duration:
            mine = _DURATION_OVER
        mine_and_writing = torch.tensor([mine, int(is_writing)], dtype=torch.int32, device=device.current())
        torch.distributed.all_reduce(mine_and_writing, op=torch.distributed.ReduceOp.MAX)
        request, is_any_rank_writing = mine_and_writing.tolist()
        if request == _DURATION_OVER:
            self.reason = "--exit-duration-in-mins is over"
        elif request:
            self.reason = f"signal {signal.Signals(request).name}"
        elif self.is_interval_over(iteration):
            self.reason = "--exit-interval"
        return bool(is_any_rank_writing)
