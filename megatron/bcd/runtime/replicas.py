"""Replicas: the ranks with the same weights, which are the data-parallel and context-parallel ranks of a model shard.

They average gradients and share the optimizer state. Only context-parallel ranks read the same samples. With expert
parallelism fewer ranks hold the same experts; the functions with a parameter return its replicas.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state


def is_expert(parameter: torch.Tensor | None) -> bool:
    """Return whether expert-parallel ranks hold different ones of this parameter (Megatron Core's attribute)."""
    return not getattr(parameter, "allreduce", True)


def group(parameter: torch.Tensor | None = None) -> torch.distributed.ProcessGroup:
    """Return the process group of the ranks with the same weights."""
    if is_expert(parameter):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def size(parameter: torch.Tensor | None = None) -> int:
    return int(group(parameter).size())


def rank(parameter: torch.Tensor | None = None) -> int:
    """Return this rank's index among its replicas."""
    return int(group(parameter).rank())


def tensor_group(parameter: torch.Tensor | None = None) -> torch.distributed.ProcessGroup:
    """Return the tensor-parallel group, which may be another one for experts."""
    if is_expert(parameter):
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def shard_slice(num_elements: int, parameter: torch.Tensor | None = None) -> slice:
    """Return this rank's part of a flat tensor that the replicas share."""
    number, parts = rank(parameter), size(parameter)
    return slice(num_elements * number // parts, num_elements * (number + 1) // parts)
