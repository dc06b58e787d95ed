"""Causal attention of sequences that are split over context-parallel ranks, where Transformer Engine's is absent.

Megatron Core cuts each sequence into 2 R chunks, R context-parallel ranks, and gives rank r chunks r and 2 R - 1 - r:
together their causal attention costs every rank the same. Queries stay where they are, keys and values are gathered.

Tensor shapes: S sequence length, C length of a chunk, L = 2 C of them on this rank, B micro-batch size, N attention
heads and G query groups on this tensor-parallel rank, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

Attend = Callable[..., Tensor]
"""Attention of queries [L, B, N, D] to keys and values [S, B, G, D]; mask as PyTorch's. Returns [L, B, N * D]."""


def whole_sequence(part_LB: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """This rank's part [L, B, ...] and those of the other ranks in the order of the sequence, [S, B, ...].

    A collective over the context-parallel group, also in backward, which sums the gradients of each part.
    """
    if group.size() == 1:
        return part_LB
    gathered = gather_from_sequence_parallel_region(part_LB, group=group)
    by_rank = gathered.unflatten(0, (group.size(), 2, -1))
    return torch.cat((by_rank[:, 0].flatten(0, 1), by_rank[:, 1].flip(0).flatten(0, 1)))


def causal_attention(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor, group: torch.distributed.ProcessGroup, **arguments: Any
) -> Tensor:
    """Queries [L, B, N, D] of this rank's chunks; keys and values [S, B, G, D] of whole sequences.

    Each chunk attends to the keys up to its own end, the last of them under the diagonal.
    """
    contexts = []
    for chunk, number in zip(query.chunk(2), (group.rank(), 2 * group.size() - 1 - group.rank()), strict=True):
        end = (number + 1) * len(chunk)
        mask = causal_lower_right(len(chunk), end)
        contexts.append(attend(chunk, key[:end], value[:end], attn_mask=mask, **arguments))
    return torch.cat(contexts)
