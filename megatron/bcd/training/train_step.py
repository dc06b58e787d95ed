"""What a training step gives, and how training fails."""

from __future__ import annotations

from dataclasses import dataclass


class TrainingFailed(RuntimeError):
    """Training can't go on, and every rank knows: one line that says why and where to go on from."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one training step gave, equal on every rank."""

    loss: float
    grad_norm: float | None  # None if the step was skipped
    learning_rate: float  # the one that the step used
    milliseconds: float

    @property
    def skipped(self) -> bool:
        return self.grad_norm is None
