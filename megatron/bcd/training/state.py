"""The counters of a run. A checkpoint stores them with weights, optimizer state and random generators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from megatron.bcd.blocks.schedule import PhaseState
from megatron.bcd.checkpoint.run_state import Counters
from megatron.bcd.runtime import device


class TrainingFailed(RuntimeError):
    """Training can't continue. Every rank raises it; the message names the reason and the checkpoint to resume from."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one training step, equal on every rank."""

    loss: float
    grad_norm: float | None
    """None if the step was skipped."""
    learning_rate: float
    """The rate that the step used."""
    duration: device.Stopwatch | float
    """Milliseconds, or a stopwatch that measures them."""
    skipped_layers: int = 0
    """Number of layers that were left as they were, because their gradients were not finite."""
    requests: tuple[int, ...] = ()
    """Requests of any rank to stop, see `StopRequests.on_this_rank`."""

    @property
    def milliseconds(self) -> float:
        """Duration of the step. Waits for the device if the step still runs there."""
        return self.duration if isinstance(self.duration, float) else self.duration.milliseconds

    @property
    def skipped(self) -> bool:
        return self.grad_norm is None

    def to_dict(self) -> dict[str, float | None]:
        """Return plain values under the names of the checkpoint format."""
        names = ("loss", "grad_norm", "learning_rate", "milliseconds", "skipped_layers")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepResult:
        """Build the result from the output of `to_dict`."""
        others = dict(values)
        return cls(duration=float(others.pop("milliseconds")), **others)


@dataclass(kw_only=True)
class TrainState(Counters):
    """All counters of a run. The same on every rank."""

    phase_state: PhaseState = field(default_factory=PhaseState)
    run: str = ""
    """See `checkpoint.run_state.run_name`."""
    interval: list[StepResult] = field(default_factory=list)
    """Steps since the last log line."""

    def after_step(self, result: StepResult, *, num_samples: int) -> None:
        """Count a step of `num_samples` samples over all ranks."""
        self.interval.append(result)
        self.iteration += 1
        self.consumed_samples += num_samples
        self.samples_in_phase += num_samples

    def after_phase(self, *, num_distinct_samples: int) -> None:
        """Count the phase that has ended. It trained on `num_distinct_samples` different samples."""
        self.samples_seen_before += num_distinct_samples
        self.samples_in_phase = 0

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for JSON under the names of the checkpoint format."""
        return self.counters() | {
            "phase": self.phase_state.to_dict(),
            "run": self.run,
            "interval": [step.to_dict() for step in self.interval],
        }

    def counters(self) -> dict[str, Any]:
        return {counter.name: getattr(self, counter.name) for counter in fields(Counters)}

    def load(
        self, counters: Mapping[str, Any], phase_state: PhaseState, interval: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """Continue where a checkpoint or another replica group is."""
        for counter in fields(Counters):
            setattr(self, counter.name, counters[counter.name])
        self.phase_state, self.interval = phase_state, [StepResult.from_dict(step) for step in interval]
