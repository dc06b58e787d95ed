"""Stop a run before its end: signals, --exit-interval, --exit-duration-in-mins. All ranks stop together."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from megatron.bcd.config import CheckpointConfig
from megatron.bcd.runtime import collectives
from megatron.bcd.runtime.exit import SIGNALS

_DURATION_OVER = 1


class StopRequests:
    """This rank's requests to stop, and the decision of all ranks."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._interval = config.exit_interval
        self._duration = None if config.exit_duration_in_mins is None else 60.0 * config.exit_duration_in_mins
        self._started = time.monotonic()
        self.signal = 0
        """The last signal that asked this rank to stop; 0 if there was none."""
        self.reason: str | None = None
        """Why the run stops, the same on all ranks. It saves and stops as soon as no stage is ahead of the others."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside the context, treat signals as requests to stop. Works in the main thread only."""
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # not `print`: the signal may have interrupted one
        if number == signal.SIGINT and not self.signal and os.environ.get("RANK", "0") == "0":
            os.write(2, b"SIGINT: stopping after this iteration; Ctrl-\\ ends the run at once, without saving\n")
        self.signal = number

    def is_signalled(self) -> bool:
        """Return whether a signal has asked any rank to stop. Collective."""
        return any(signal for [signal] in collectives.gather_integers(self.signal))

    def is_interval_over(self, iteration: int) -> bool:
        """Return whether --exit-interval stops the run after `iteration`. Every rank knows it in advance."""
        return self._interval is not None and iteration % self._interval == 0

    def on_this_rank(self, *, is_writing: bool) -> tuple[int, int]:
        """Return this rank's request to stop, and whether it is writing a checkpoint.

        `decide` takes the maxima over the ranks.
        """
        own_request = self.signal
        if not own_request and self._duration is not None and time.monotonic() - self._started >= self._duration:
            own_request = _DURATION_OVER
        return own_request, int(is_writing)

    def agree(self, iteration: int, *, is_writing: bool) -> bool:
        """Exchange the requests to stop. Return whether any rank is still writing a checkpoint. Collective."""
        ranks = collectives.gather_integers(*self.on_this_rank(is_writing=is_writing))
        return self.decide(iteration, [max(values) for values in zip(*ranks, strict=True)])

    def decide(self, iteration: int, maxima: Sequence[int]) -> bool:
        """Decide like `agree`, but from maxima that a step has already reduced with its loss."""
        request, is_any_rank_writing = maxima
        if request == _DURATION_OVER:
            self.reason = "--exit-duration-in-mins is over"
        elif request:
            self.reason = f"signal {signal.Signals(request).name}"
        elif self.is_interval_over(iteration):
            self.reason = "--exit-interval"
        return bool(is_any_rank_writing)
