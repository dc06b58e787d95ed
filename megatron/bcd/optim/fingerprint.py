"""Tensors by their bits and their bytes: did anything change, and what is alive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

Fingerprint = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Weights of this rank as they were when the phase began."""

    main_params: Fingerprint
    """Of the block's own parameters: what is always active moves in any case."""
    frozen: Fingerprint
    has_main_params: bool


@torch.no_grad()
def fingerprint(tensors: Iterable[torch.Tensor]) -> Fingerprint:
    """Two sums over the bits of all tensors: equal if nothing changed, without keeping a copy."""
    total = every_other = 0
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        total += int(bits.sum(dtype=torch.int64))
        every_other += int(bits[::2].sum(dtype=torch.int64))
    return total, every_other


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the storages behind them, shared ones once."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
