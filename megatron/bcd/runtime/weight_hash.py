"""Compare the weights of ranks that must hold the same ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from megatron.bcd.runtime import collectives, replicas


def first_difference(
    weights: Iterable[tuple[str, torch.Tensor]], *, place: tuple[int, ...], place_of_experts: tuple[int, ...]
) -> str | None:
    """Return a description of the first weight that differs between ranks of the same place, or None. Collective.

    `place` is the position in the model: pipeline stage and tensor-parallel rank. `place_of_experts` is that of experts
    of expert-parallel ranks.
    """
    digests = {
        (name, place_of_experts if replicas.is_expert(weight) else place): hashlib.sha256(
            weight.detach().cpu().contiguous().view(torch.uint8).numpy()
        ).digest()[:8]
        for name, weight in weights
    }
    first: dict[Any, tuple[int, bytes]] = {}
    for rank, rank_digests in enumerate(collectives.gather_objects(digests)):
        for key, digest in rank_digests.items():
            reference, expected = first.setdefault(key, (rank, digest))
            if digest != expected:
                return f"{key[0]} on rank {rank} differs from the copy on rank {reference}"
    return None
