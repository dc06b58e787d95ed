"""When the active block changes, and to which one (DESIGN, section 1).

A schedule is a pure state machine over ``PhaseState``: every rank that feeds it the same values takes the
same decision. ``PhaseSchedule.block`` is the one place that knows the order of the blocks and
``PhaseSchedule._is_over`` the one place that ends a phase; callers know neither. This room is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class PhaseState:
    """Where a run stands: all that a checkpoint must keep to go on with the same block."""

    phase: int = 0
    """Phases that are over, so the number of the present phase."""
    step_in_phase: int = 0
    """Steps done in the present phase."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            # bool is an int to Python, but `true` in a state file is damage.
            if type(value) is not int or value < 0:
                raise ValueError(f"phase state: {name} is {value!r}, must be a whole number, at least 0")

    def to_dict(self) -> dict[str, int]:
        """The state as JSON-able names and numbers."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, int]) -> PhaseState:
        """The state that ``to_dict`` wrote. Raises ValueError on a missing, unknown or bad entry."""
        expected = set(cls.__dataclass_fields__)
        if set(values) != expected:
            raise ValueError(f"phase state has the entries {sorted(values)}, must have {sorted(expected)}")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class PhaseSchedule:
    """Blocks in ascending order, cycle after cycle, each for ``steps_per_block`` steps."""

    num_blocks: int
    """Blocks of one cycle: ``Partition.num_blocks``."""
    steps_per_block: int
    """Length of a phase in steps (iterations)."""

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ValueError(f"--bcd-num-blocks {self.num_blocks}: must be at least 1")
        if self.steps_per_block < 1:
            raise ValueError(f"--bcd-steps-per-block {self.steps_per_block}: must be at least 1")

    def block(self, state: PhaseState) -> int:
        """Number of the block that is active in ``state``."""
        return state.phase % self.num_blocks

    def cycle(self, state: PhaseState) -> int:
        """Number of the cycle that ``state`` is in; a cycle visits every block once."""
        return state.phase // self.num_blocks

    def after_step(self, state: PhaseState, *, loss: float | None = None) -> PhaseState:
        """The state once one more step is done: the next phase, at step 0, if it was the phase's last.

        ``loss`` is that step's training loss, already reduced to the same value on every rank, for criteria
        that judge progress; a fixed number of steps needs none.
        """
        stepped = PhaseState(phase=state.phase, step_in_phase=state.step_in_phase + 1)
        return PhaseState(phase=state.phase + 1) if self._is_over(stepped) else stepped

    def is_switch(self, before: PhaseState, after: PhaseState) -> bool:
        """Whether the active block differs; if not, nothing is rebuilt and the optimizer's moments go on."""
        return self.block(before) != self.block(after)

    def ends_with_next_step(self, state: PhaseState) -> bool:
        """Whether the coming step is followed by another block, as far as is known before it."""
        return self.is_switch(state, self.after_step(state))

    def at_iteration(self, iteration: int) -> PhaseState:
        """The state after ``iteration`` steps from the start, without stepping there."""
        phase, step_in_phase = divmod(iteration, self.steps_per_block)
        return PhaseState(phase=phase, step_in_phase=step_in_phase)

    def _is_over(self, state: PhaseState) -> bool:
        return state.step_in_phase >= self.steps_per_block
