"""When the active block changes, and to which one (DESIGN, section 1; arXiv 2506.12037, Algorithm 1). Pure.

``BlockSchedule.block`` is the one place that knows the order of the blocks and ``BlockSchedule._is_over`` the one place
that ends a phase; callers know neither. Values that decide (losses, scores) have been reduced to the same number on
every rank when they come here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256

from megatron.bcd.blocks.phase_state import CycleEnd, PhaseState
from megatron.bcd.blocks.settings import BlockScheduleSettings
from megatron.bcd.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class BlockSchedule(BlockScheduleSettings):
    """The settings for a number of blocks, and what follows from them."""

    num_blocks: int
    """Blocks of one cycle: ``Partition.num_blocks``."""

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ValueError(f"--bcd-num-blocks {self.num_blocks}: must be at least 1")
        super().__post_init__()
        if self.block_lr_multipliers and len(self.block_lr_multipliers) != self.num_blocks:
            raise ValueError(
                f"--bcd-block-lr-multipliers: {len(self.block_lr_multipliers)} given, must be one for each of the "
                f"{self.num_blocks} blocks"
            )

    @classmethod
    def of(cls, config: RunConfig, *, num_blocks: int) -> BlockSchedule:
        """What the flags ask for. Raises ValueError that names the flag of a bad value."""
        bcd = config.bcd
        return cls(
            num_blocks=num_blocks,
            order=bcd.bcd_order,
            switch=bcd.bcd_switch,
            steps_per_block=bcd.bcd_steps_per_block,
            plateau_window=bcd.bcd_plateau_window,
            plateau_min_improvement=bcd.bcd_plateau_min_improvement,
            min_steps_per_block=bcd.bcd_min_steps_per_block,
            max_steps_per_block=bcd.bcd_max_steps_per_block,
            stop_cycle_improvement=bcd.bcd_stop_cycle_improvement,
            phase_warmup_steps=bcd.bcd_phase_warmup_steps,
            block_lr_multipliers=tuple(bcd.bcd_block_lr_multipliers or ()),
            seed=config.training.seed,
        )

    def block(self, state: PhaseState) -> int:
        """Number of the block that is active in ``state``; in greedy order it must have been chosen."""
        place = state.phase % self.num_blocks
        if self.order == "ascending":
            return place
        if self.order == "descending":
            return self.num_blocks - 1 - place
        if self.order == "random":
            return _random_order(self.seed, self.cycle(state), self.num_blocks)[place]
        assert not self.needs_scores(state), f"phase {state.phase}: no block was chosen"
        return self.candidates(state)[0] if state.block is None else state.block

    def cycle(self, state: PhaseState) -> int:
        """Number of the cycle that ``state`` is in; a cycle visits every block once, whatever the order."""
        return state.phase // self.num_blocks

    def needs_scores(self, state: PhaseState) -> bool:
        """Whether ``choose_block`` comes before this phase: greedy order, and more than one block to choose from."""
        return self.order == "greedy" and state.block is None and len(self.candidates(state)) > 1

    def candidates(self, state: PhaseState) -> tuple[int, ...]:
        """In greedy order the blocks that this cycle has not visited before the present phase, ascending.

        The Gauss-Southwell rule alone may pass over a block for ever: one whose gradient per parameter is always the
        smaller would keep its initial weights. With one visit per cycle no block waits for as long as two cycles (the
        essentially cyclic order that convergence proofs of block coordinate descent ask for), and the improvement of a
        whole cycle is one of all blocks. A cycle may begin with the block that ended the one before.
        """
        return tuple(block for block in range(self.num_blocks) if block not in state.visited)

    def choose_block(self, state: PhaseState, scores: Mapping[int, float]) -> PhaseState:
        """``state`` with the candidate of the largest score, the first of equal ones.

        ``scores`` holds at least every candidate's: the norm of its gradient per parameter, the same on every rank. One
        that is not finite (a probe that overflowed) says nothing and comes last.
        """
        assert self.needs_scores(state), f"phase {state.phase}: there is nothing to choose"
        ranked = {
            block: scores[block] if math.isfinite(scores[block]) else -math.inf for block in self.candidates(state)
        }
        return replace(state, block=max(ranked, key=lambda block: ranked[block]))

    def after_step(self, state: PhaseState, *, loss: float | None = None) -> PhaseState:
        """The state once one more step is done: the next phase, at step 0, if it was the phase's last.

        ``loss`` is that step's mean training loss per token, reduced to the same value on every rank. Switch plateau
        needs it, and leaves one that is not finite (a skipped step) out of its mean, though it counts as a step; a
        fixed number of steps needs none.
        """
        block = self.block(state)
        optimizer_params = replace(state, step_in_phase=state.step_in_phase + 1)
        if self.switch == "plateau":
            assert loss is not None, "--bcd-switch plateau decides on the loss"
            optimizer_params = self._with_loss(optimizer_params, float(loss))
        if not self._is_over(optimizer_params):
            return optimizer_params
        visited = (*state.visited, block) if self.order == "greedy" else ()
        return PhaseState(
            phase=state.phase + 1,
            visited=visited if len(visited) < self.num_blocks else (),
            cycle_ends=state.cycle_ends,
        )

    def is_switch(self, before: PhaseState, after: PhaseState) -> bool:
        """Whether the active block is built anew; if not, the same block goes on and its optimizer's moments, too.

        Before a block is chosen in greedy order, others have been measured: then it is built anew in any case.
        """
        if before.phase == after.phase:
            return False
        return self.needs_scores(after) or self.block(before) != self.block(after)

    def may_end_with_next_step(self, state: PhaseState) -> bool:
        """Whether the coming step may be the phase's last; where not, it is not, whatever its loss.

        With switch steps it is if it may. With switch plateau it is unless its loss is a new best: so it may once a
        window of steps, not all the time. What belongs to the next phase must not be begun where a phase may end.
        """
        # no loss ends a phase sooner than one that improves nothing
        return self._is_over(replace(state, step_in_phase=state.step_in_phase + 1))

    def ends_with_next_step(self, state: PhaseState) -> bool:
        """Whether another block may follow on the coming step: with one block none does."""
        return self.num_blocks > 1 and self.may_end_with_next_step(state)

    def is_cycle_end(self, state: PhaseState) -> bool:
        """Whether a cycle has just ended: an evaluation now is one of its outcome."""
        return state.phase > 0 and state.step_in_phase == 0 and state.phase % self.num_blocks == 0

    def after_evaluation(self, state: PhaseState, validation_loss: float) -> PhaseState:
        """The state that knows the outcome of the cycle that has just ended; an evaluation amid one changes nothing.

        ``validation_loss``: mean per token, the same on every rank. Told again at the same cycle's end, it replaces.
        """
        if not self.is_cycle_end(state):
            return state
        cycle = self.cycle(state) - 1
        loss = float(validation_loss) if math.isfinite(validation_loss) else math.inf
        earlier = [end for end in state.cycle_ends if end.cycle < cycle]
        return replace(state, cycle_ends=(*earlier[-1:], CycleEnd(cycle=cycle, validation_loss=loss)))

    def is_converged(self, state: PhaseState) -> bool:
        """Algorithm 1, line 10: whether the last evaluated cycle improved too little on the one before it.

        An infinite loss is no improvement on any other; without two cycles in a row nothing is known.
        """
        if self.stop_cycle_improvement is None or len(state.cycle_ends) < 2:
            return False
        before, last = state.cycle_ends
        if last.cycle != before.cycle + 1:
            return False
        if math.isinf(last.validation_loss) or math.isinf(before.validation_loss):
            return math.isinf(last.validation_loss)
        improvement = before.validation_loss - last.validation_loss
        return improvement < self.stop_cycle_improvement * abs(before.validation_loss)

    @property
    def scales_learning_rate(self) -> bool:
        """Whether ``learning_rate_factor`` is ever other than 1."""
        return bool(self.block_lr_multipliers or self.phase_warmup_steps)

    def learning_rate_factor(self, state: PhaseState) -> float:
        """What the coming step's learning rate is multiplied by: the block's multiplier and the phase's warm-up.

        Of W warm-up steps step s (from 0) takes (s + 1) / (W + 1). One block has no switch after which to warm up.
        """
        multiplier = self.block_lr_multipliers[self.block(state)] if self.block_lr_multipliers else 1.0
        if self.num_blocks == 1 or state.step_in_phase >= self.phase_warmup_steps:
            return multiplier
        return multiplier * (state.step_in_phase + 1) / (self.phase_warmup_steps + 1)

    def at_iteration(self, iteration: int) -> PhaseState:
        """The state after ``iteration`` steps from the start, without stepping there.

        Raises ValueError where that depends on losses or scores: switch plateau, greedy order.
        """
        if self.switch != "steps" or self.order == "greedy":
            raise ValueError(f"--bcd-switch {self.switch}, --bcd-order {self.order}: phases are not known beforehand")
        phase, step_in_phase = divmod(iteration, self.steps_per_block)
        return PhaseState(phase=phase, step_in_phase=step_in_phase)

    def fits(self, state: PhaseState) -> bool:
        """Whether ``state`` can go on in this order: not where greedy order begins or ends amid a cycle.

        Between the other orders, and between seeds, a state does not show the difference: it names no block.
        """
        if self.order != "greedy":
            return state.block is None and not state.visited
        blocks = (*state.visited, *(() if state.block is None else (state.block,)))
        return len(state.visited) == state.phase % self.num_blocks and all(block < self.num_blocks for block in blocks)

    def _with_loss(self, state: PhaseState, loss: float) -> PhaseState:
        """``state``, whose step is counted already, with that step's loss in the mean."""
        if not math.isfinite(loss):
            return state
        losses = (*state.recent_losses, loss)[-self.plateau_window :]
        state = replace(state, recent_losses=losses)
        if len(losses) < self.plateau_window:
            return state
        mean, best = math.fsum(losses) / len(losses), state.best_loss
        # strictly lower as well: else a constant loss would improve for ever with a least improvement of 0
        if best is None or (mean < best and best - mean >= self.plateau_min_improvement * abs(best)):
            return replace(state, best_loss=mean, best_loss_step=state.step_in_phase)
        return state

    def _is_over(self, state: PhaseState) -> bool:
        """Algorithm 1, line 8: "trained until converged"."""
        if self.switch == "steps":
            return state.step_in_phase >= self.steps_per_block
        if self.max_steps_per_block is not None and state.step_in_phase >= self.max_steps_per_block:
            return True
        steps_without_improvement = state.step_in_phase - state.best_loss_step
        is_plateau = state.best_loss is not None and steps_without_improvement >= self.plateau_window
        return is_plateau and state.step_in_phase >= self.min_steps_per_block


def _random_order(seed: int, cycle: int, num_blocks: int) -> tuple[int, ...]:
    """The blocks in the order of that cycle, from these three numbers only; no block comes twice in a row.

    Sorted by a hash, because a library's shuffle may change from version to version.
    """
    if num_blocks == 2:  # the second of one cycle must not be the first of the next: all cycles are alike
        cycle = 0
    order = _shuffled(seed, cycle, num_blocks)
    # the last place is never changed: so what the cycle before ends with is known without the cycles before that
    if cycle > 0 and num_blocks > 1 and order[0] == _shuffled(seed, cycle - 1, num_blocks)[-1]:
        place = 1 + _hash(seed, cycle) % (num_blocks - 2)
        order[0], order[place] = order[place], order[0]
    return tuple(order)


def _shuffled(seed: int, cycle: int, num_blocks: int) -> list[int]:
    return sorted(range(num_blocks), key=lambda block: _hash(seed, cycle, block))


def _hash(*values: int) -> int:
    return int.from_bytes(sha256(repr(values).encode()).digest(), "big")
