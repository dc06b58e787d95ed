"""Greedy order: which block's gradient is the largest (Gauss-Southwell rule)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.bcd.train.trainer import Trainer


def gradient_scores(trainer: Trainer) -> Mapping[int, float]:
    """The root mean square of each candidate's gradient, so that large and small blocks compare: its norm over the
    square root of its parameters. The same on every rank.

    Candidates are made active one after another, so the memory of one block is enough. All are measured on the same
    --bcd-greedy-microbatches microbatches per data-parallel rank, the first ones of the coming phase, without dropout;
    nothing is taken from the data or from the random generators of the training.
    """
    num_microbatches = trainer.config.bcd.bcd_greedy_microbatches
    batches = list(
        itertools.islice(
            trainer.samples.look_ahead(phase=trainer.state.phase, consumed_samples=trainer.consumed_samples),
            num_microbatches,
        )
    )
    scores = {}
    for block in trainer.phases.candidates(trainer.state):
        trainer.build(block)
        trainer.set_train_mode(False)
        trainer.active.zero_grad()
        trainer.run_schedule(iter(batches), num_microbatches, forward_only=False)
        norm = trainer.active.block_gradient_norm()
        scores[block] = norm / math.sqrt(max(1, trainer.active.num_block_parameters()))
        trainer.set_train_mode(True)
        trainer.active.dispose()
    return scores
