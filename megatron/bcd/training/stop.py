"""Why a run stops before its end: a signal, --exit-interval, --exit-duration-in-mins. All ranks stop together."""

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
"""What Slurm and spot instances send some time before they end a job."""
_TIME_IS_UP = 1


class StopRequests:
    """What asks this rank to stop, and what all ranks have agreed on."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._interval = config.exit_interval
        self._duration = None if config.exit_duration_in_mins is None else 60.0 * config.exit_duration_in_mins
        self._started = time.monotonic()
        self._signal = 0
        self.reason: str | None = None
        """Agreed: the run saves and stops as soon as no stage is ahead of the others."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals as requests to stop while inside; only the main thread can."""
        before = {number: signal.signal(number, self._take) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def is_interval_over(self, iteration: int) -> bool:
        """Whether the run stops after `iteration` in any case; known to every rank long before."""
        return self._interval is not None and iteration % self._interval == 0

    def agree(self, iteration: int, *, is_writing: bool) -> bool:
        """Let every rank know of the others' requests; whether any rank still writes a checkpoint. A collective."""
        mine = self._signal
        if not mine and self._duration is not None and time.monotonic() - self._started >= self._duration:
            mine = _TIME_IS_UP
        both = torch.tensor([mine, int(is_writing)], dtype=torch.int32, device=device.current())
        torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX)
        request, anyone_writes = both.tolist()
        if request == _TIME_IS_UP:
            self.reason = "--exit-duration-in-mins is over"
        elif request:
            self.reason = f"signal {signal.Signals(request).name}"
        elif self.is_interval_over(iteration):
            self.reason = "--exit-interval"
        return bool(anyone_writes)
