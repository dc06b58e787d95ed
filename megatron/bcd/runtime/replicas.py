"""The ranks that hold the same weights: data-parallel times context-parallel ones of one stage and tensor slice.

Gradients are averaged over them, and they share the optimizer state. Only context-parallel ranks read the same
samples.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state


def group() -> torch.distributed.ProcessGroup:
    """This rank's replicas."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def size() -> int:
    """Number of replicas."""
    return int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))


def rank() -> int:
    """This rank among its replicas."""
    return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))


def part_of(num_elements: int) -> slice:
    """This rank's part of a flat tensor that the replicas share."""
    return slice(num_elements * rank() // size(), num_elements * (rank() + 1) // size())


def first() -> int:
    """Global rank of the first replica."""
    return int(parallel_state.get_data_parallel_src_rank(with_context_parallel=True))
