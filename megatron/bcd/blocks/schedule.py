"""Decide when the active block changes, and which block comes next (arXiv 2506.12037, Algorithm 1). Pure.

Only ``BlockSchedule.block`` decides the order of the blocks, and only ``BlockSchedule._is_over`` the end of a phase.
Losses must be reduced before they are passed in, so that every rank makes the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Any

from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import BcdConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class PhaseState:
    """Position of a run in its phases. It is stored in checkpoints, so that a resumed run makes the same decisions."""

    phase: int = 0
    """Number of the current phase, which is the number of phases that are over."""
    step_in_phase: int = 0
    """Completed steps of the current phase."""
    recent_losses: tuple[float, ...] = ()
    """With switch plateau the last finite training losses of this phase, at most one window."""
    best_loss: float | None = None
    """With switch plateau the best mean over a full window in this phase. A new best mean is lower by at least the
    minimum improvement."""
    best_loss_step: int = 0
    """``step_in_phase`` when ``best_loss`` was reached; 0 if there is no best loss."""

    def to_dict(self) -> dict[str, Any]:
        """Return the state in JSON types: tuples as lists."""
        return asdict(self) | {"recent_losses": list(self.recent_losses)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PhaseState:
        """Return the state that ``to_dict`` wrote. Raises ValueError if an entry is missing or unknown."""
        values = {name: value for name, value in values.items() if name != "cycle_ends"}  # an earlier version's
        if values.keys() != cls.__dataclass_fields__.keys():
            raise ValueError(f"the phase state has the entries {sorted(values)}, and not {sorted(vars(cls()))}")
        return cls(**values | {"recent_losses": tuple(values["recent_losses"])})


def block_schedule_from_config(
    config: RunConfig, partition: Partition, *, num_steps: int | None = None
) -> BlockSchedule:
    """Return the block schedule of a run of `num_steps` steps; None for --train-iters, if it is given."""
    settings, num_blocks = config.bcd, partition.num_blocks
    num_steps = num_steps or config.training.train_iters
    if settings.bcd_steps_per_block is None and num_steps is not None:
        steps = even_phase_length(num_steps, num_blocks=num_blocks, longest=settings.mean_steps)
        settings = replace(settings, bcd_steps_per_block=steps)
    return BlockSchedule(settings=settings, num_blocks=num_blocks, seed=config.training.seed)


def even_phase_length(num_steps: int, *, num_blocks: int, longest: float) -> float:
    """Return the mean number of steps in a phase if `num_steps` steps visit every block equally often.

    Each block is visited at least twice, or once if there are too few steps for two visits. The result is from 1 to
    `longest`; for a single block it is `longest`.
    """
    if num_blocks == 1:
        return longest
    visits = 1 if num_steps < 2 * num_blocks else max(2, math.ceil(num_steps / (num_blocks * longest)))
    return max(1, num_steps / (num_blocks * visits))


@dataclass(frozen=True, kw_only=True)
class BlockSchedule:
    """Order, length and end of the phases."""

    settings: BcdConfig
    num_blocks: int
    """Number of blocks in a cycle: ``Partition.num_blocks``."""
    seed: int
    """Seed of the random order."""

    def least_steps(self, phase: int) -> int:
        """Return the minimum number of steps in a phase.

        With switch steps every phase has exactly this many. The last phase of a run may be shorter.
        """
        if self.settings.bcd_switch == "steps":
            # the product may exceed a whole number by a rounding error
            end, start = (math.ceil(number * self.settings.mean_steps - 1e-6) for number in (phase + 1, phase))
            return end - start
        # a window until the first mean, and another one without a better mean
        return 2 * self.settings.bcd_plateau_window

    def describe(self) -> str:
        """Return the order and length of the phases in words."""
        settings = self.settings
        if settings.bcd_switch == "steps":
            least, longest = math.floor(settings.mean_steps), math.ceil(settings.mean_steps)
            steps = f"{least:,}{'' if least == longest else f' or {longest:,}'} step{'' if longest == 1 else 's'}"
            return f"{steps} per block, {settings.bcd_order} order"
        length = f"a block until its loss stops falling ({self.least_steps(0):,} or more steps)"
        return f"{length}, {settings.bcd_order} order"

    def block(self, state: PhaseState) -> int:
        place = state.phase % self.num_blocks
        if self.settings.bcd_order == "ascending":
            return place
        if self.settings.bcd_order == "descending":
            return self.num_blocks - 1 - place
        return _random_order(self.seed, self.cycle(state), self.num_blocks)[place]

    def cycle(self, state: PhaseState) -> int:
        """Return the number of the cycle. A cycle visits every block once, in any order."""
        return state.phase // self.num_blocks

    def after_step(self, state: PhaseState, *, loss: float | None = None) -> PhaseState:
        """Return the state after one more step. After the last step of a phase it is step 0 of the next phase.

        ``loss`` is the mean training loss per token of that step. Only switch plateau needs it. A loss that is not
        finite (a skipped step) does not enter the mean, but the step counts.
        """
        stepped = replace(state, step_in_phase=state.step_in_phase + 1)
        if self.settings.bcd_switch == "plateau":
            assert loss is not None, "--bcd-switch plateau decides on the loss"
            stepped = self._with_loss(stepped, float(loss))
        if not self._is_over(stepped):
            return stepped
        return PhaseState(phase=state.phase + 1)

    def phases_within(self, state: PhaseState, num_steps: int) -> int:
        """Return the maximum number of phases that a run has begun `num_steps` steps after `state`."""
        phase, left = state.phase, num_steps + state.step_in_phase
        while left > 0 and phase < self.num_blocks:
            left -= self.least_steps(phase)
            phase += 1
        return phase

    def is_switch(self, before: PhaseState, after: PhaseState) -> bool:
        """Return whether the active block is rebuilt. If not, the same block continues with its optimizer state."""
        return self.block(before) != self.block(after)

    def may_end_with_next_step(self, state: PhaseState) -> bool:
        """Return whether the next step may be the last one of the phase. If False, it is not, whatever its loss.

        The answer is exact with --bcd-switch steps. With plateau, the step is the last one unless it reaches a new best
        mean. If the phase may end, work for the step after it must not start early.
        """
        # no loss ends a phase earlier than a loss that improves nothing
        return self._is_over(replace(state, step_in_phase=state.step_in_phase + 1))

    def _with_loss(self, state: PhaseState, loss: float) -> PhaseState:
        """Return ``state`` after its last step, with that step's loss included in the mean."""
        if not math.isfinite(loss):
            return state
        settings = self.settings
        losses = (*state.recent_losses, loss)[-settings.bcd_plateau_window :]
        state = replace(state, recent_losses=losses)
        if len(losses) < settings.bcd_plateau_window:
            return state
        mean, best = math.fsum(losses) / len(losses), state.best_loss
        # strictly lower: with a minimum improvement of 0 a constant loss would improve for ever
        if best is None or (mean < best and best - mean >= settings.bcd_plateau_min_improvement * abs(best)):
            return replace(state, best_loss=mean, best_loss_step=state.step_in_phase)
        return state

    def _is_over(self, state: PhaseState) -> bool:
        """Return whether the phase is over: "trained until converged" (Algorithm 1, line 8)."""
        if self.settings.bcd_switch == "steps":
            return state.step_in_phase >= self.least_steps(state.phase)
        steps_without_improvement = state.step_in_phase - state.best_loss_step
        return state.best_loss is not None and steps_without_improvement >= self.settings.bcd_plateau_window


def _random_order(seed: int, cycle: int, num_blocks: int) -> tuple[int, ...]:
    """Return the order of the blocks in a cycle. No block comes twice in a row, even across two cycles.

    Blocks are sorted by a hash, because a library's shuffle may change with its version.
    """
    if num_blocks == 2:  # the last block of a cycle must not be the first of the next, so all cycles are the same
        cycle = 0
    order = _shuffled(seed, cycle, num_blocks)
    # the last place is never swapped, so the last block of the cycle before is the last of its shuffle
    if cycle > 0 and num_blocks > 1 and order[0] == _shuffled(seed, cycle - 1, num_blocks)[-1]:
        place = 1 + _hash(seed, cycle) % (num_blocks - 2)
        order[0], order[place] = order[place], order[0]
    return tuple(order)


def _shuffled(seed: int, cycle: int, num_blocks: int) -> list[int]:
    return sorted(range(num_blocks), key=lambda block: _hash(seed, cycle, block))


def _hash(*values: int) -> int:
    return int.from_bytes(sha256(repr(values).encode()).digest(), "big")
