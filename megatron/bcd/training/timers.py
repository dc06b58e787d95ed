"""Time the parts of a training step (--timing-log-level)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron.core.timers import DummyTimer, TimerBase, Timers
from megatron.core.utils import get_model_config

from megatron.bcd.config.sections import ReportConfig
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.runtime import collectives


class StepTimers(Timers):
    """The timers of this rank. Level 0 has none and adds no synchronization.

    From level 1 on each timer synchronizes the device where it starts and stops. Timers that every rank passes also
    wait for all ranks before they start, unless --no-barrier-with-level-1-timing is given.
    """

    def __init__(self, report: ReportConfig) -> None:
        super().__init__(report.timing_log_level, report.timing_log_option)
        self._is_on = report.timing_log_level > 0
        self._has_barrier = self._is_on and report.barrier_with_level_1_timing
        self._seen: dict[str, TimerBase] = {}
        self._num_steps = 0

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        """Return the timer of that name, like Megatron Core's method."""
        timer = super().__call__(name, log_level)
        if not isinstance(timer, DummyTimer):
            self._seen[name] = timer
        return timer

    @contextlib.contextmanager
    def connected(self, active: ActiveBlock) -> Iterator[None]:
        """Inside the context, time the passes and the optimizer of `active`, but no evaluations and measurements."""
        if not self._is_on:
            yield
            return
        model = get_model_config(active.model)
        # no barriers inside the optimizer: a rank without parameters of the block passes fewer of its timers
        model.barrier_with_L1_time = self._has_barrier
        configs = [model, *(each.config for each in active.core.optimizers())]
        for config in configs:
            config.timers = self
        try:
            yield
        finally:
            for config in configs:
                config.timers = None

    @contextlib.contextmanager
    def timing_optimizer(self) -> Iterator[None]:
        """Inside the context, time the optimizer step (level 1). Every rank must enter it once in every step."""
        self._num_steps += 1
        self("optimizer", log_level=1).start(barrier=self._has_barrier)
        yield
        self("optimizer").stop()

    def take(self) -> dict[str, tuple[float, ...]]:
        """Return the milliseconds of a step since the last call, by timer and rank; 0 if a rank has no such timer.
        Collective from level 1 on."""
        if not self._is_on:
            return {}
        num_steps, self._num_steps = max(1, self._num_steps), 0
        milliseconds = {name: timer.elapsed() * 1e3 / num_steps for name, timer in self._seen.items()}
        ranks = collectives.gather_objects(milliseconds)
        names = dict.fromkeys(name for rank in ranks for name in rank)
        return {name: tuple(rank.get(name, 0.0) for rank in ranks) for name in names}
