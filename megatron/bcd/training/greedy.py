"""Measure the gradients of blocks for --bcd-order greedy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from megatron.bcd import data
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.runtime import collectives, rng


def score_blocks(
    candidates: Sequence[int],
    batches: Sequence[data.Batch],
    *,
    active: ActiveBlock,
    begin_phase: Callable[[int], None],
    run_passes: Callable[[Sequence[data.Batch]], object],
) -> dict[int, float]:
    """Return the score of each candidate: the root mean square of its gradient (Gauss-Southwell rule).

    The norm is divided by the square root of the number of parameters, so that large and small blocks compare.
    Candidates are built one after another, so the memory of one block is enough. All of them see the same microbatches
    and the same dropout. Collective; must be called while no block is active.

    Args:
        begin_phase: prepares recomputation and pipeline schedule for a block that has been built.
        run_passes: runs the forward and backward passes of the microbatches in train mode.
    """
    scores = {}
    for block in candidates:
        active.build(block)
        begin_phase(block)
        with rng.preserve_random_generators():
            norm = _gradient_norm(active, lambda: run_passes(batches))
        scores[block] = norm / math.sqrt(max(1, active.core.num_block_parameters()))
        active.dispose()
    # ranks that reduce separately may differ in the last bit, and must choose the same block
    return collectives.on_rank_0(lambda: scores)


def take_microbatches(coming: Iterator[data.Batch], number: int) -> list[data.Batch]:
    """Return the next `number` microbatches, repeating them if the data end earlier."""
    first = list(itertools.islice(coming, number))
    return [first[index % len(first)] for index in range(number)]


def _gradient_norm(active: ActiveBlock, run_passes: Callable[[], object]) -> float:
    """Return the gradient norm of the active block. With fp16, lower the loss scale until nothing overflows, and
    restore it afterwards."""
    before = active.core.loss_scaler_state()
    scaler = dict(before or {})
    while True:
        active.zero_grad()
        run_passes()
        norm = active.core.block_gradient_norm()
        if math.isfinite(norm) or scaler.get("scale", 1.0) <= 1.0:
            break
        scaler["scale"] /= 16.0
        active.core.set_loss_scaler_state(scaler)
    if before is not None:
        active.core.set_loss_scaler_state(before)
    return norm
