"""One training step: forward and backward passes, learning rate, optimizer step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.num_microbatches_calculator import get_current_global_batch_size, get_num_microbatches
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.bcd import data
from megatron.bcd.blocks.phase_state import PhaseState
from megatron.bcd.blocks.schedule import BlockSchedule
from megatron.bcd.config import RunConfig
from megatron.bcd.model.loss import reduce_with_maxima
from megatron.bcd.runtime import device, memory
from megatron.bcd.training.forward_backward import ForwardBackward
from megatron.bcd.training.timers import StepTimers


class TrainingFailed(RuntimeError):
    """Training can't continue, detected on every rank: one line with the reason and the checkpoint to resume from."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one training step gave, equal on every rank."""

    loss: float
    grad_norm: float | None
    """None if the step was skipped."""
    learning_rate: float
    """The rate that the step used."""
    duration: device.Stopwatch | float
    """Milliseconds, or what will have measured them."""
    requests: tuple[int, ...] = ()
    """Of the integers that the step exchanged, the maxima over all ranks."""

    @property
    def milliseconds(self) -> float:
        """Waits for the device if the step is not over there."""
        return self.duration if isinstance(self.duration, float) else self.duration.milliseconds

    @property
    def skipped(self) -> bool:
        return self.grad_norm is None

    def to_dict(self) -> dict[str, float | None]:
        """Plain values, under the names of the checkpoint format."""
        names = ("loss", "grad_norm", "learning_rate", "milliseconds")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepResult:
        """What `to_dict` returned."""
        others = {name: value for name, value in values.items() if name != "milliseconds"}
        return cls(duration=float(values["milliseconds"]), **others)


class TrainStep:
    """Called once per iteration."""

    def __init__(
        self,
        config: RunConfig,
        *,
        forward_backward: ForwardBackward,
        block_schedule: BlockSchedule,
        lr_scheduler: OptimizerParamScheduler,
        timers: StepTimers,
    ) -> None:
        self.forward_backward = forward_backward
        self.block_schedule = block_schedule
        self.lr_scheduler = lr_scheduler
        self.timers = timers
        self._skips_non_finite = config.training.check_for_nan_in_loss_and_grad
        self._has_loss_scale = config.precision == "fp16"
        self._memory_level = config.training.empty_unused_memory_level
        self._metered: tuple[int, int] | None = None

    def __call__(
        self,
        batches: Iterator[data.Batch],
        phase_state: PhaseState,
        *,
        num_microbatches_next: int = 0,
        requests: Callable[[], Sequence[int]] = tuple,
    ) -> StepResult:
        """Train on the next global batch. If another step of the same phase follows directly, `num_microbatches_next`
        is its number of microbatches, and forward-only stages run ahead with them. `requests` returns integers, not
        negative, whose maxima over the ranks the step finds out along with its loss."""
        active = self.forward_backward.active
        stopwatch = device.Stopwatch()
        active.zero_grad()
        self.forward_backward.pipeline.prepare_next(num_microbatches_next)
        with (
            self._metering_once_per_phase(phase_state),
            self.timers.connected(active),
            self.forward_backward.stragglers.counting(),
        ):
            losses = self.forward_backward(batches, get_num_microbatches(), forward_only=False)
        if self._memory_level >= 1:
            memory.release_cached_memory()
        loss_sum, num_tokens, maxima = reduce_with_maxima(losses, requests())
        loss = loss_sum / max(num_tokens, 1.0)
        learning_rate = self.learning_rate(phase_state)
        if self.block_schedule.scales_learning_rate:
            self.lr_scheduler.step(0)  # undoes the scaling of a step that was skipped
            active.scale_learning_rate(self.block_schedule.learning_rate_factor(phase_state))
        # with fp16 the optimizer must see the overflow, to lower the loss scale
        is_stepped = math.isfinite(loss) or self._has_loss_scale or not self._skips_non_finite
        with self.timers.connected(active), self.timers.timing_optimizer():
            grad_norm = active.step(skip_non_finite=self._skips_non_finite) if is_stepped else None
        if grad_norm is not None:
            self.lr_scheduler.step(get_current_global_batch_size())
        if self._memory_level >= 2:
            memory.release_cached_memory()
        stopwatch.stop()
        return StepResult(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            duration=stopwatch,
            requests=tuple(maxima),
        )

    def learning_rate(self, phase_state: PhaseState) -> float:
        """The rate of the active block's parameters in the coming step."""
        return float(self.lr_scheduler.get_lr({})) * self.block_schedule.learning_rate_factor(phase_state)

    def _metering_once_per_phase(self, phase_state: PhaseState) -> contextlib.AbstractContextManager[None]:
        """Count saved activations in a phase's first iteration, and after a change of the batch size."""
        now = (phase_state.phase, get_num_microbatches())
        if now == self._metered:
            return contextlib.nullcontext()
        self._metered = now
        return self.forward_backward.meter.measuring(self.forward_backward.active.model.parameters())
