"""Attention of a sequence that is split over context-parallel ranks, against attention over the whole of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.bcd.model.attention import causal_attention

LENGTH, BATCH, HEADS, SIZE = 24, 2, 4, 8


def attend(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
    context = torch.nn.functional.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in (query, key, value)), enable_gqa=True, **arguments
    )
    return context.permute(2, 0, 1, 3).flatten(2)


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax of the scores under the diagonal, written out."""
    key, value = (x.repeat_interleave(HEADS // x.size(2), dim=2) for x in (key, value))
    scores = torch.einsum("qbnd,kbnd->bnqk", query, key) / SIZE**0.5
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    shares = scores.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("bnqk,kbnd->qbnd", shares, value).flatten(2)


@pytest.mark.parametrize("groups", [HEADS, 2], ids=["heads", "grouped"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_parts_make_up_the_whole(num_ranks: int, groups: int) -> None:
    """Would expose a mask that lets a query see a later key, or hides an earlier one, in some chunk of some rank."""
    generator = torch.Generator().manual_seed(num_ranks)
    shapes = ((HEADS,), (groups,), (groups,))
    whole = [
        torch.randn(LENGTH, BATCH, *heads, SIZE, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in shapes
    ]
    expected = plain(*whole)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad((expected * weights).sum(), whole)
    positions = torch.arange(LENGTH).chunk(2 * num_ranks)
    parts = torch.zeros_like(expected)
    for rank in range(num_ranks):
        here = torch.cat((positions[rank], positions[2 * num_ranks - 1 - rank]))
        group: Any = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: num_ranks)
        parts[here] = causal_attention(attend, whole[0][here], whole[1], whole[2], group)
    torch.testing.assert_close(parts, expected)
    for mine, other in zip(torch.autograd.grad((parts * weights).sum(), whole), gradients, strict=True):
        torch.testing.assert_close(mine, other)
