"""Compare the weights of ranks that must hold the same ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from megatron.bcd.runtime import collectives


def first_difference(weights: Iterable[tuple[str, torch.Tensor]], *, place: tuple[int, ...]) -> str | None:
    """Return a description of the first weight that differs between ranks of the same `place`, or None. Collective.

    `place` is the position in the model: pipeline stage and tensor-parallel rank.
    """
    digests = {
        name: hashlib.sha256(weight.detach().cpu().contiguous().view(torch.uint8).numpy()).digest()[:8]
        for name, weight in weights
    }
    ranks: list[Any] = collectives.gather_objects((place, digests))
    reference_ranks: dict[tuple[int, ...], int] = {}
    for rank, (rank_place, rank_digests) in enumerate(ranks):
        reference = reference_ranks.setdefault(rank_place, rank)
        for name, digest in rank_digests.items():
            if digest != ranks[reference][1][name]:
                return f"{name} on rank {rank} differs from the copy on rank {reference}"
    return None
