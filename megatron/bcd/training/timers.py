"""Times of a training step: by part (--timing-log-level), and by rank, to find a slow one (--log-straggler)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from megatron.core.timers import DummyTimer, TimerBase, Timers
from megatron.core.utils import get_model_config

from megatron.bcd import data
from megatron.bcd.config.sections import ReportConfig
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.runtime import collectives, device


class StepTimers(Timers):
    """Timers of this rank; level 0 has none and adds no synchronisation.

    From level 1 on each timer synchronises the device where it starts and stops. Without
    --no-barrier-with-level-1-timing, the timers that every rank passes also wait for all ranks before they start.
    """

    def __init__(self, report: ReportConfig) -> None:
        super().__init__(report.timing_log_level, report.timing_log_option)
        self._is_on = report.timing_log_level > 0
        self._has_barrier = self._is_on and report.barrier_with_level_1_timing
        self._seen: dict[str, TimerBase] = {}
        self._num_steps = 0

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        """As Megatron Core's."""
        timer = super().__call__(name, log_level)
        if not isinstance(timer, DummyTimer):
            self._seen[name] = timer
        return timer

    @contextlib.contextmanager
    def connected(self, active: ActiveBlock) -> Iterator[None]:
        """Inside, the passes of `active`'s model and its optimizer are timed. Evaluations and measurements are not."""
        if not self._is_on:
            yield
            return
        model = get_model_config(active.model)
        # no barriers inside the optimizer: a rank without parameters of the block passes fewer of its timers
        model.barrier_with_L1_time = self._has_barrier
        configs = [model, *(each.config for each in active.optimizers())]
        for config in configs:
            config.timers = self
        try:
            yield
        finally:
            for config in configs:
                config.timers = None

    @contextlib.contextmanager
    def timing_optimizer(self) -> Iterator[None]:
        """Time what is inside, which every rank passes once in every step, on level 1."""
        self._num_steps += 1
        self("optimizer", log_level=1).start(barrier=self._has_barrier)
        yield
        self("optimizer").stop()

    def take(self) -> dict[str, tuple[float, ...]]:
        """Milliseconds of a step since the last call, by timer and rank, 0 where a rank has no such timer. A collective
        from level 1 on."""
        if not self._is_on:
            return {}
        num_steps, self._num_steps = max(1, self._num_steps), 0
        mine = {name: timer.elapsed() * 1e3 / num_steps for name, timer in self._seen.items()}
        ranks = collectives.gather_objects(mine)
        names = dict.fromkeys(name for rank in ranks for name in rank)
        return {name: tuple(rank.get(name, 0.0) for rank in ranks) for name in names}


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

    def next_batch(self, batches: Iterator[data.Batch]) -> data.Batch:
        """The batch of a forward pass, which begins when it is there."""
        start = time.perf_counter()
        batch = next(batches)
        if self._counts:
            self._batch_ms = max(self._batch_ms, (time.perf_counter() - start) * 1e3)
            self._passes.append(device.Stopwatch())
        return batch

    def after_forward(self) -> None:
        if self._counts:
            self._passes[-1].stop()

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
