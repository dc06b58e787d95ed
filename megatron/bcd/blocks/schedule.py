"""When the active block changes, and to which one (arXiv 2506.12037, Algorithm 1). Pure.

The order of the blocks is decided in ``BlockSchedule.block`` alone, the end of a phase in ``BlockSchedule._is_over``
alone. Losses and scores passed in must be reduced first: the same number on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Any

from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import ORDERS, SWITCHES, BcdConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class CycleEnd:
    """The validation loss at the end of a cycle."""

    cycle: int
    validation_loss: float
    """Mean loss per token; infinite where the evaluation's was not finite."""


@dataclass(frozen=True, kw_only=True)
class PhaseState:
    """Position of a run in its phases: all that a checkpoint must keep for the same later decisions."""

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

    def to_dict(self) -> dict[str, Any]:
        """The state in JSON types, equal to what is read back: lists, and infinity as ``"inf"``."""
        values = asdict(self) | {"visited": list(self.visited), "recent_losses": list(self.recent_losses)}
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
        """The state that ``to_dict`` wrote. Raises ValueError where an entry is missing or unknown."""
        if values.keys() != cls.__dataclass_fields__.keys():
            raise ValueError(f"the phase state has the entries {sorted(values)}, and not {sorted(vars(cls()))}")
        ends = (
            CycleEnd(cycle=end["cycle"], validation_loss=float(end["validation_loss"])) for end in values["cycle_ends"]
        )
        sequences = {name: tuple(values[name]) for name in ("visited", "recent_losses")}
        return cls(**{**values, **sequences, "cycle_ends": tuple(ends)})


def block_schedule_from_config(
    config: RunConfig, partition: Partition, *, num_steps: int | None = None
) -> BlockSchedule:
    """The block schedule of a run of `num_steps` steps; None: --train-iters, if it is known. Raises ValueError that
    names the flag of a bad value."""
    settings, num_blocks = config.bcd, partition.num_blocks
    num_steps = num_steps or config.training.train_iters
    if settings.bcd_steps_per_block is None and num_steps is not None:
        steps = even_phases(num_steps, num_blocks=num_blocks, longest=settings.mean_steps)
        settings = replace(settings, bcd_steps_per_block=steps)
    return BlockSchedule(settings=settings, num_blocks=num_blocks, seed=config.training.seed)


def even_phases(num_steps: int, *, num_blocks: int, longest: float) -> float:
    """Steps of a phase, on average, with which `num_steps` steps visit every block equally often: twice or more, once
    where two visits would lack steps. From 1 to `longest`; `longest` for a single block.
    """
    if num_blocks == 1:
        return longest
    visits = 1 if num_steps < 2 * num_blocks else max(2, math.ceil(num_steps / (num_blocks * longest)))
    return max(1, num_steps / (num_blocks * visits))


@dataclass(frozen=True, kw_only=True)
class BlockSchedule:
    """Order, length and end of the phases, and their learning rate. Raises ValueError that names the flag of a bad
    value."""

    settings: BcdConfig
    num_blocks: int
    """Blocks of one cycle: ``Partition.num_blocks``."""
    seed: int
    """Seed of the random order."""

    def __post_init__(self) -> None:
        assert self.num_blocks >= 1
        _check(self.settings, self.num_blocks)

    def least_steps(self, phase: int) -> int:
        """Steps that a phase has at least, unless the run ends; with switch steps it has as many."""
        own = self.settings
        if own.bcd_switch == "steps":
            # the product may exceed a whole number by a rounding error
            end, start = (math.ceil(number * own.mean_steps - 1e-6) for number in (phase + 1, phase))
            return end - start
        # a window until the first mean, and another one without a better mean
        least = max(own.bcd_min_steps_per_block, 2 * own.bcd_plateau_window)
        return least if own.bcd_max_steps_per_block is None else min(least, own.bcd_max_steps_per_block)

    @property
    def least_steps_per_cycle(self) -> int:
        """Steps that every cycle has at least, unless the run ends."""
        own = self.settings
        least = own.mean_steps if own.bcd_switch == "steps" else self.least_steps(0)
        return math.floor(self.num_blocks * least + 1e-6)

    def describe(self) -> str:
        """Order and length of the phases, for people."""
        own = self.settings
        if own.bcd_switch == "steps":
            least, longest = math.floor(own.mean_steps), math.ceil(own.mean_steps)
            steps = f"{least:,}{'' if least == longest else f' or {longest:,}'} step{'' if longest == 1 else 's'}"
            return f"{steps} per block, {own.bcd_order} order"
        most = "" if own.bcd_max_steps_per_block is None else f" to {own.bcd_max_steps_per_block:,}"
        length = f"a block until its loss stops falling ({self.least_steps(0):,}{most or ' or more'} steps)"
        return f"{length}, {own.bcd_order} order"

    def block(self, state: PhaseState) -> int:
        """Number of the block that is active in ``state``. In greedy order it must have been chosen before."""
        place = state.phase % self.num_blocks
        if self.settings.bcd_order == "ascending":
            return place
        if self.settings.bcd_order == "descending":
            return self.num_blocks - 1 - place
        if self.settings.bcd_order == "random":
            return _random_order(self.seed, self.cycle(state), self.num_blocks)[place]
        assert not self.needs_scores(state), f"phase {state.phase}: no block was chosen"
        return self.candidates(state)[0] if state.block is None else state.block

    def cycle(self, state: PhaseState) -> int:
        """Number of the cycle that ``state`` is in; a cycle visits every block once, whatever the order."""
        return state.phase // self.num_blocks

    def needs_scores(self, state: PhaseState) -> bool:
        """Whether ``choose_block`` comes before this phase: greedy order, and more than one block to choose from."""
        return self.settings.bcd_order == "greedy" and state.block is None and len(self.candidates(state)) > 1

    def candidates(self, state: PhaseState) -> tuple[int, ...]:
        """In greedy order the blocks that this cycle has not visited before the present phase, ascending.

        The Gauss-Southwell rule alone may pass over a block for ever: one whose gradient per parameter is always
        smaller would keep its initial weights. With one visit per cycle no block waits for two cycles (the essentially
        cyclic order that convergence proofs of block coordinate descent require), and the improvement of a whole cycle
        is one of all blocks. A cycle may start with the block that ended the one before.
        """
        return tuple(block for block in range(self.num_blocks) if block not in state.visited)

    def choose_block(self, state: PhaseState, scores: Mapping[int, float]) -> PhaseState:
        """``state`` with the candidate of the largest score, the first of equal ones.

        ``scores`` maps at least every candidate to the norm of its gradient per parameter. A score that is not finite
        (the probe overflowed) comes last.
        """
        assert self.needs_scores(state), f"phase {state.phase}: there is nothing to choose"
        ranked = {
            block: scores[block] if math.isfinite(scores[block]) else -math.inf for block in self.candidates(state)
        }
        return replace(state, block=max(ranked, key=lambda block: ranked[block]))

    def after_step(self, state: PhaseState, *, loss: float | None = None) -> PhaseState:
        """The state after one more step: the next phase, at step 0, if it was the phase's last.

        ``loss`` is that step's mean training loss per token. Only switch plateau needs it. A loss that is not finite
        (a skipped step) stays out of the mean, but the step counts.
        """
        block = self.block(state)
        stepped = replace(state, step_in_phase=state.step_in_phase + 1)
        if self.settings.bcd_switch == "plateau":
            assert loss is not None, "--bcd-switch plateau decides on the loss"
            stepped = self._with_loss(stepped, float(loss))
        if not self._is_over(stepped):
            return stepped
        visited = (*state.visited, block) if self.settings.bcd_order == "greedy" else ()
        return PhaseState(
            phase=state.phase + 1,
            visited=visited if len(visited) < self.num_blocks else (),
            cycle_ends=state.cycle_ends,
        )

    def phases_within(self, state: PhaseState, num_steps: int) -> int:
        """Phases that a run has begun, at most, when `num_steps` more steps are done after `state`."""
        phase, left = state.phase, num_steps + state.step_in_phase
        while left > 0 and phase < self.num_blocks:
            left -= self.least_steps(phase)
            phase += 1
        return phase

    def visited(self, state: PhaseState) -> frozenset[int]:
        """Blocks that have had a step; all of them after one cycle."""
        if state.phase >= self.num_blocks:
            return frozenset(range(self.num_blocks))
        is_greedy = self.settings.bcd_order == "greedy"
        before = () if is_greedy else (self.block(PhaseState(phase=phase)) for phase in range(state.phase))
        return frozenset((*state.visited, *before, *([self.block(state)] if state.step_in_phase else [])))

    def is_switch(self, before: PhaseState, after: PhaseState) -> bool:
        """Whether the active block is rebuilt; if not, the same block continues with its optimizer state.

        Choosing a block in greedy order builds each candidate for its score, so it always needs a rebuild.
        """
        if before.phase == after.phase:
            return False
        return self.needs_scores(after) or self.block(before) != self.block(after)

    def may_end_with_next_step(self, state: PhaseState) -> bool:
        """Whether the coming step may be the phase's last; if False, it is not, whatever its loss.

        Exact with switch steps. With switch plateau the step is the last unless it brings a new best mean. Work for
        the step after must not start early where a phase may end.
        """
        # no loss ends a phase sooner than one that improves nothing
        return self._is_over(replace(state, step_in_phase=state.step_in_phase + 1))

    def is_cycle_end(self, state: PhaseState) -> bool:
        """Whether a cycle has just ended, so that an evaluation now measures its outcome."""
        return state.phase > 0 and state.step_in_phase == 0 and state.phase % self.num_blocks == 0

    def after_evaluation(self, state: PhaseState, validation_loss: float) -> PhaseState:
        """The state with the outcome of the cycle that has just ended; unchanged amid a cycle.

        ``validation_loss`` is the mean per token. A second evaluation at the same cycle's end replaces the first.
        """
        if not self.is_cycle_end(state):
            return state
        cycle = self.cycle(state) - 1
        loss = float(validation_loss) if math.isfinite(validation_loss) else math.inf
        earlier = [end for end in state.cycle_ends if end.cycle < cycle]
        return replace(state, cycle_ends=(*earlier[-1:], CycleEnd(cycle=cycle, validation_loss=loss)))

    def is_converged(self, state: PhaseState) -> bool:
        """Algorithm 1, line 10: whether the last evaluated cycle improved too little on the one before it.

        An infinite loss is no improvement on any other. False without two evaluated cycles in a row.
        """
        if self.settings.bcd_stop_cycle_improvement is None or len(state.cycle_ends) < 2:
            return False
        before, last = state.cycle_ends
        if last.cycle != before.cycle + 1:
            return False
        if math.isinf(last.validation_loss) or math.isinf(before.validation_loss):
            return math.isinf(last.validation_loss)
        improvement = before.validation_loss - last.validation_loss
        return improvement < self.settings.bcd_stop_cycle_improvement * abs(before.validation_loss)

    @property
    def scales_learning_rate(self) -> bool:
        """Whether ``learning_rate_factor`` is ever other than 1."""
        return bool(self.settings.bcd_block_lr_multipliers or self.settings.bcd_phase_warmup_steps)

    def learning_rate_factor(self, state: PhaseState) -> float:
        """Factor of the coming step's learning rate: the block's multiplier times the phase's warm-up.

        Step s (from 0) of W warm-up steps takes (s + 1) / (W + 1). A single block is never switched to, so it has no
        warm-up.
        """
        multipliers, warmup = self.settings.bcd_block_lr_multipliers, self.settings.bcd_phase_warmup_steps
        multiplier = multipliers[self.block(state)] if multipliers else 1.0
        if self.num_blocks == 1 or state.step_in_phase >= warmup:
            return multiplier
        return multiplier * (state.step_in_phase + 1) / (warmup + 1)

    def fits(self, state: PhaseState) -> bool:
        """Whether a run can resume from ``state`` in this order: not where greedy order starts or ends amid a cycle.

        The other orders and seeds are interchangeable: their states name no block.
        """
        if self.settings.bcd_order != "greedy":
            return state.block is None and not state.visited
        blocks = (*state.visited, *(() if state.block is None else (state.block,)))
        return len(state.visited) == state.phase % self.num_blocks and all(block < self.num_blocks for block in blocks)

    def _with_loss(self, state: PhaseState, loss: float) -> PhaseState:
        """``state`` after its last step was counted, with that step's loss in the mean."""
        if not math.isfinite(loss):
            return state
        own = self.settings
        losses = (*state.recent_losses, loss)[-own.bcd_plateau_window :]
        state = replace(state, recent_losses=losses)
        if len(losses) < own.bcd_plateau_window:
            return state
        mean, best = math.fsum(losses) / len(losses), state.best_loss
        # strictly lower: with a least improvement of 0 a constant loss would improve for ever
        if best is None or (mean < best and best - mean >= own.bcd_plateau_min_improvement * abs(best)):
            return replace(state, best_loss=mean, best_loss_step=state.step_in_phase)
        return state

    def _is_over(self, state: PhaseState) -> bool:
        """Algorithm 1, line 8: "trained until converged"."""
        own = self.settings
        if own.bcd_switch == "steps":
            return state.step_in_phase >= self.least_steps(state.phase)
        if own.bcd_max_steps_per_block is not None and state.step_in_phase >= own.bcd_max_steps_per_block:
            return True
        steps_without_improvement = state.step_in_phase - state.best_loss_step
        is_plateau = state.best_loss is not None and steps_without_improvement >= own.bcd_plateau_window
        return is_plateau and state.step_in_phase >= own.bcd_min_steps_per_block


def _random_order(seed: int, cycle: int, num_blocks: int) -> tuple[int, ...]:
    """The blocks in the order of that cycle; no block comes twice in a row, also from cycle to cycle.

    Sorted by a hash, because a library's shuffle may change from version to version.
    """
    if num_blocks == 2:  # the last block of a cycle must not be the first of the next, so all cycles are alike
        cycle = 0
    order = _shuffled(seed, cycle, num_blocks)
    # the last place is never swapped, so the end of the cycle before follows from its own shuffle alone
    if cycle > 0 and num_blocks > 1 and order[0] == _shuffled(seed, cycle - 1, num_blocks)[-1]:
        place = 1 + _hash(seed, cycle) % (num_blocks - 2)
        order[0], order[place] = order[place], order[0]
    return tuple(order)


def _shuffled(seed: int, cycle: int, num_blocks: int) -> list[int]:
    return sorted(range(num_blocks), key=lambda block: _hash(seed, cycle, block))


def _hash(*values: int) -> int:
    return int.from_bytes(sha256(repr(values).encode()).digest(), "big")


def _check(settings: BcdConfig, num_blocks: int) -> None:
    """Raise ValueError that names the flag of the first bad value."""
    own, multipliers = settings, settings.bcd_block_lr_multipliers or ()
    longest: float | None = own.mean_steps if own.bcd_switch == "steps" else own.bcd_max_steps_per_block
    least, most = own.bcd_min_steps_per_block, own.bcd_max_steps_per_block
    rules = {
        f"--bcd-order {own.bcd_order}: must be one of {', '.join(ORDERS)}": own.bcd_order in ORDERS,
        f"--bcd-switch {own.bcd_switch}: must be one of {', '.join(SWITCHES)}": own.bcd_switch in SWITCHES,
        f"--bcd-steps-per-block {own.mean_steps:g}: must be at least 1": own.mean_steps >= 1,
        f"--bcd-plateau-window {own.bcd_plateau_window}: must be at least 1": own.bcd_plateau_window >= 1,
        f"--bcd-plateau-min-improvement {own.bcd_plateau_min_improvement}: must be at least 0 and less than 1": (
            0 <= own.bcd_plateau_min_improvement < 1
        ),
        f"--bcd-min-steps-per-block {least}: must be at least 1": least >= 1,
        f"--bcd-max-steps-per-block {most}: must be at least --bcd-min-steps-per-block {least}": (
            most is None or most >= least
        ),
        f"--bcd-stop-cycle-improvement {own.bcd_stop_cycle_improvement}: must be at least 0 and less than 1": (
            own.bcd_stop_cycle_improvement is None or 0 <= own.bcd_stop_cycle_improvement < 1
        ),
        f"--bcd-phase-warmup-steps {own.bcd_phase_warmup_steps}: must be at least 0, and less than the longest phase, "
        f"{longest} steps": (
            own.bcd_phase_warmup_steps >= 0 and (longest is None or own.bcd_phase_warmup_steps < longest)
        ),
        f"--bcd-block-lr-multipliers: must be {num_blocks} finite numbers above 0, one for each block": (
            len(multipliers) in (0, num_blocks) and all(math.isfinite(one) and one > 0 for one in multipliers)
        ),
    }
    for problem, is_met in rules.items():
        if not is_met:
            raise ValueError(problem)
