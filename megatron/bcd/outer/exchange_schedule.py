"""Decide after which steps replica groups exchange their changes. Every rank computes the same schedule in advance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.bcd.blocks.schedule import BlockSchedule, PhaseState
from megatron.bcd.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class ExchangeSchedule:
    """The steps after which replica groups exchange."""

    config: RunConfig
    block_schedule: BlockSchedule
    train_iters: int
    stops_after: Callable[[int], bool]
    """Returns whether --exit-interval stops the run after an iteration."""

    def is_due(self, iteration: int, phase_state: PhaseState, *, pending: int | None) -> bool:
        """Return whether an exchange starts or ends after `iteration`.

        Args:
            phase_state: the phase before that step.
            pending: the iteration after which a delayed exchange ends; None if there is none.
        """
        interval = self.config.groups.outer_interval
        is_interval_over = interval is not None and (phase_state.step_in_phase + 1) % interval == 0
        return self.must_wait(iteration, phase_state) or is_interval_over or pending == iteration

    def must_wait(self, iteration: int, phase_state: PhaseState) -> bool:
        """Return whether all groups must hold the same weights after `iteration`."""
        checkpoint = self.config.checkpoint
        intervals = (checkpoint.save_interval, checkpoint.save_hf_interval)
        return (
            iteration == self.train_iters
            or self.block_schedule.may_end_with_next_step(phase_state)
            or any(interval and iteration % interval == 0 for interval in intervals)
            or self.stops_after(iteration)
        )
