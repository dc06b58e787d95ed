"""Replicas: the ranks with the same weights, which are the data-parallel and context-parallel ranks of a model shard.

They average gradients and share the optimizer state. Only context-parallel ranks read the same samples.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state


def group() -> torch.distributed.ProcessGroup:
    """Return the process group of the ranks with the same weights."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def size() -> int:
    """Return the number of replicas."""
    return int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))


def rank() -> int:
    """Return this rank's index among its replicas."""
    return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))


def shard_slice(num_elements: int) -> slice:
    """Return this rank's part of a flat tensor that the replicas share."""
    return slice(num_elements * rank() // size(), num_elements * (rank() + 1) // size())


def first() -> int:
    """Return the global rank of the first replica."""
    return int(parallel_state.get_data_parallel_src_rank(with_context_parallel=True))
