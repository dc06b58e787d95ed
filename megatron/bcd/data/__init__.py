"""Indexed datasets, their checks, and the microbatches of a run."""

from megatron.bcd.data.batches import (
    INDICES,
    Batch,
    Dealt,
    GroupShare,
    batch_of,
    batches,
    no_batches,
    of_subset,
    one_pass,
    part_of_sequences,
    subset_batches,
)
from megatron.bcd.data.lengths import global_batch_size, num_iterations, num_samples, samples_after
from megatron.bcd.data.sft.dataset import plan_fine_tuning, with_epochs
from megatron.bcd.data.splits import Splits, plan_splits

__all__ = [
    "INDICES",
    "Batch",
    "Dealt",
    "GroupShare",
    "Splits",
    "batch_of",
    "batches",
    "global_batch_size",
    "no_batches",
    "num_iterations",
    "num_samples",
    "of_subset",
    "one_pass",
    "part_of_sequences",
    "plan_fine_tuning",
    "plan_splits",
    "samples_after",
    "subset_batches",
    "with_epochs",
]
