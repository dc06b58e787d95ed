"""Position of a run in its phases: all that a checkpoint must keep for the same later decisions. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CycleEnd:
    """The validation loss at the end of a cycle."""

    cycle: int
    validation_loss: float
    """Mean loss per token; infinite where the evaluation's was not finite."""

    def __post_init__(self) -> None:
        _check_whole("cycle", self.cycle)
        if type(self.validation_loss) is not float or math.isnan(self.validation_loss):
            raise ValueError(f"phase state: validation_loss is {self.validation_loss!r}, must be a number")


@dataclass(frozen=True, kw_only=True)
class PhaseState:
    """Position of a run in its phases. Raises ValueError on values that no run reaches."""

    phase: int = 0
    """Phases that are over, which is the number of the current phase."""
    step_in_phase: int = 0
    """Steps done in the current phase."""
    block: int | None = None
    """In greedy order the block that was chosen for this phase, None before that; otherwise None."""
    visited: tuple[int, ...] = ()
    """In greedy order the blocks of this cycle's earlier phases; otherwise empty."""
    recent_losses: tuple[float, ...] = ()
    """With switch plateau the last finite training losses of this phase, at most the window."""
    best_loss: float | None = None
    """With switch plateau the best mean over a full window in this phase; a new best is lower by at least the least
    improvement."""
    best_loss_step: int = 0
    """``step_in_phase`` when ``best_loss`` was reached; 0 where there is none."""
    cycle_ends: tuple[CycleEnd, ...] = ()
    """Of the last two cycles that ended with an evaluation, the earlier one first."""

    def __post_init__(self) -> None:
        for name in ("phase", "step_in_phase", "best_loss_step"):
            _check_whole(name, getattr(self, name))
        for block in (*self.visited, *(() if self.block is None else (self.block,))):
            _check_whole("block", block)
        if len({*self.visited, self.block}) != len(self.visited) + 1:
            raise ValueError(f"phase state: block {self.block} after {self.visited}, no block comes twice in a cycle")
        for loss in (*self.recent_losses, *(() if self.best_loss is None else (self.best_loss,))):
            if type(loss) is not float or not math.isfinite(loss):
                raise ValueError(f"phase state: a training loss is {loss!r}, must be a finite number")
        if len(self.recent_losses) > self.step_in_phase or self.best_loss_step > self.step_in_phase:
            raise ValueError(f"phase state: losses of more steps than {self.step_in_phase}, the steps done")
        if (self.best_loss is None) != (self.best_loss_step == 0):
            raise ValueError(f"phase state: best_loss is {self.best_loss} at best_loss_step {self.best_loss_step}")
        cycles = [end.cycle for end in self.cycle_ends]
        if len(cycles) > 2 or cycles != sorted(set(cycles)):
            raise ValueError(f"phase state: cycle_ends are of the cycles {cycles}, must be two, the earlier one first")

    def to_dict(self) -> dict[str, Any]:
        """The state in JSON types, equal to what is read back: lists, and infinity as ``"inf"``."""
        values = asdict(self) | {name: list(getattr(self, name)) for name in ("visited", "recent_losses")}
        values["cycle_ends"] = [
            {
                "cycle": end.cycle,
                "validation_loss": end.validation_loss if math.isfinite(end.validation_loss) else "inf",
            }
            for end in self.cycle_ends
        ]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PhaseState:
        """The state that ``to_dict`` wrote. Raises ValueError on a missing, unknown or bad entry."""
        _check_entries(values, cls, "phase state")
        ends = []
        for entry in _list(values, "cycle_ends"):
            _check_entries(entry, CycleEnd, "phase state: cycle_ends")
            loss = math.inf if entry["validation_loss"] == "inf" else entry["validation_loss"]
            ends.append(CycleEnd(cycle=entry["cycle"], validation_loss=loss))
        sequences = {name: tuple(_list(values, name)) for name in ("visited", "recent_losses")}
        return cls(**{**values, **sequences, "cycle_ends": tuple(ends)})


def _check_entries(values: Any, of: type[CycleEnd] | type[PhaseState], what: str) -> None:
    expected = set(of.__dataclass_fields__)
    if not isinstance(values, Mapping) or set(values) != expected:
        has = sorted(values) if isinstance(values, Mapping) else values
        raise ValueError(f"{what} has the entries {has}, must have {sorted(expected)}")


def _check_whole(name: str, value: object) -> None:
    # bool is an int to Python, but `true` in a state file is damage.
    if type(value) is not int or value < 0:
        raise ValueError(f"phase state: {name} is {value!r}, must be a whole number, at least 0")


def _list(values: Mapping[str, Any], name: str) -> list[Any]:
    found = values[name]
    if not isinstance(found, list):
        raise ValueError(f"phase state: {name} is {found!r}, must be a list")
    return found
