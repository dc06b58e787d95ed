"""Times of every rank's batches and forward passes, to find a slow rank (--log-straggler)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from megatron.bcd import data
from megatron.bcd.config.sections import ReportConfig
from megatron.bcd.runtime import collectives, device


class Stragglers:
    """What Megatron Core's StragglerDetector compares, also without a GPU, and without its server.

    Device time by events: nothing is waited for before `take`.
    """

    def __init__(self, report: ReportConfig) -> None:
        self._is_on = report.log_straggler
        self._counts = False
        self._num_steps = 0
        self._passes: list[device.Stopwatch] = []
        self._batch_ms = 0.0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Inside are the passes of one training step. Evaluations and measurements are not timed."""
        self._counts = self._is_on
        self._num_steps += 1
        try:
            yield
        finally:
            self._counts = False

    @contextlib.contextmanager
    def timing(self, batches: Iterator[data.Batch]) -> Iterator[Iterator[data.Batch]]:
        """Inside is a forward pass that takes one batch of what this yields."""
        if not self._counts:
            yield batches
            return
        yield self._timed(batches)
        self._passes[-1].stop()

    def _timed(self, batches: Iterator[data.Batch]) -> Iterator[data.Batch]:
        """One batch; the pass begins when it is there."""
        start = time.perf_counter()
        batch = next(batches)
        self._batch_ms = max(self._batch_ms, (time.perf_counter() - start) * 1e3)
        self._passes.append(device.Stopwatch())
        yield batch

    def take(self) -> dict[str, tuple[float, ...]]:
        """Milliseconds since the last call, by rank: `forward`, the forward passes of a step; `batch`, the longest wait
        for a batch. Empty without --log-straggler, else a collective that waits for the device."""
        if not self._is_on:
            return {}
        forward_ms = sum(one.milliseconds for one in self._passes) / max(1, self._num_steps)
        ranks = collectives.gather_objects((forward_ms, self._batch_ms))
        self._passes, self._batch_ms, self._num_steps = [], 0.0, 0
        forward, batch = zip(*ranks, strict=True)
        return {"forward": forward, "batch": batch}
