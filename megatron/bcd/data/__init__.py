"""Datasets, their checks, and the microbatches of a run."""

from megatron.bcd.data.batches import (
    Batch,
    BatchSharding,
    GroupShare,
    attention_inputs,
    batches,
    context_shard,
    load_batch,
    one_pass,
    subset_indices,
)
from megatron.bcd.data.lengths import global_batch_size, num_iterations, samples_after
from megatron.bcd.data.sft.dataset import plan_fine_tuning, resolve_epochs
from megatron.bcd.data.splits import Splits, plan_splits
