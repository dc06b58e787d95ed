"""Greedy order: the block whose gradient is largest becomes active (Gauss-Southwell rule)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from megatron.bcd import data
from megatron.bcd.runtime import collectives, rng
from megatron.bcd.training.forward_backward import ForwardBackward

_SCALE_DIVISOR = 16.0


def gradient_scores(
    forward_backward: ForwardBackward,
    candidates: Sequence[int],
    batches: Iterator[data.Batch],
    *,
    num_microbatches: int,
    on_built: Callable[[int], None],
) -> Mapping[int, float]:
    """The root mean square of each candidate's gradient: its norm over the square root of its number of parameters, so
    that large and small blocks compare. The same on every rank. A collective.

    One candidate after another is made active, so the memory of one block is enough. All are measured on the same
    `num_microbatches` microbatches per data-parallel rank with the same dropout; the random generators of the training
    keep their state. `on_built` is called with each candidate once it is the active block.
    """
    active = forward_backward.active
    found = list(itertools.islice(batches, num_microbatches))
    repeated = [found[number % len(found)] for number in range(num_microbatches)]  # the data may end before
    scores = {}
    for block in candidates:
        active.build(block)
        on_built(block)
        forward_backward.pipeline.begin_phase(block)
        with rng.random_generators_kept():
            norm = _gradient_norm(forward_backward, repeated)
        scores[block] = norm / math.sqrt(max(1, active.num_block_parameters()))
        active.dispose()
    # replicas that reduce separately may differ in the last bit, and must make the same choice
    return collectives.on_rank_0(lambda: scores)


def _gradient_norm(forward_backward: ForwardBackward, batches: list[data.Batch]) -> float:
    """Of the active block, in train mode because recomputation depends on it. With fp16 the loss scale is lowered until
    nothing overflows, and reset afterwards."""
    active = forward_backward.active
    forward_backward.module.train()
    before = active.loss_scaler_state()
    scaler = dict(before or {})
    while True:
        active.zero_grad()
        forward_backward(iter(batches), len(batches), forward_only=False)
        norm = active.block_gradient_norm()
        if math.isfinite(norm) or scaler.get("scale", 1.0) <= 1.0:
            break
        scaler["scale"] /= _SCALE_DIVISOR
        active.set_loss_scaler_state(scaler)
    if before is not None:
        active.set_loss_scaler_state(before)
    return norm
