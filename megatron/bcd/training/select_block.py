"""Greedy order: which block's gradient is the largest (Gauss-Southwell rule)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron.bcd import data
from megatron.bcd.runtime import collectives, rng

if TYPE_CHECKING:
    from megatron.bcd.training.loop import Trainer

_LOWER_SCALE = 16.0


def gradient_scores(trainer: Trainer) -> Mapping[int, float]:
    """The root mean square of each candidate's gradient, so that large and small blocks compare: its norm over the
    square root of its parameters. The same on every rank; a collective.

    Candidates are made active one after another, so the memory of one block is enough. All are measured on the same
    --bcd-greedy-microbatches microbatches per data-parallel rank, the first ones of the coming phase, with the same
    dropout; nothing is taken from the data or from the random generators of the training.
    """
    num_microbatches = trainer.config.bcd.bcd_greedy_microbatches
    coming = trainer.samples.look_ahead(phase=trainer.state.phase, consumed_samples=trainer.consumed_samples)
    found = list(itertools.islice(coming, num_microbatches))
    batches = [found[number % len(found)] for number in range(num_microbatches)]  # the end of the data may be near
    scores = {}
    for block in trainer.phases.candidates(trainer.state):
        trainer.build(block)
        with rng.random_generators_kept():
            norm = _gradient_norm(trainer, batches)
        scores[block] = norm / math.sqrt(max(1, trainer.active.num_block_parameters()))
        trainer.active.dispose()
    # replicas that reduce on their own may differ in a last bit, and must not in what they choose
    return collectives.on_rank_0(lambda: scores)


def _gradient_norm(trainer: Trainer, batches: list[data.Batch]) -> float:
    """Of the active block, in train mode: recomputation is part of it. fp16's loss scale is lowered for as long as it
    overflows, and put back."""
    trainer.set_train_mode(True)
    before = trainer.active.loss_scaler_state()
    scaler = dict(before or {})
    while True:
        trainer.active.zero_grad()
        trainer.run_schedule(iter(batches), len(batches), forward_only=False)
        norm = trainer.active.block_gradient_norm()
        if math.isfinite(norm) or scaler.get("scale", 1.0) <= 1.0:
            break
        scaler["scale"] /= _LOWER_SCALE
        trainer.active.set_loss_scaler_state(scaler)
    if before is not None:
        trainer.active.set_loss_scaler_state(before)
    return norm
