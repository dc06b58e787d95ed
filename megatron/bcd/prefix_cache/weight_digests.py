"""Digests that identify the present weights of a prefix."""

from __future__ import annotations

from hashlib import sha256

import torch
from megatron.core import parallel_state

from megatron.bcd.blocks.ownership import Ownership, ownership
from megatron.bcd.blocks.partition import Partition
from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.prefix_cache.key import digest_of
from megatron.bcd.runtime import collectives, replicas

_CHUNK = 1 << 22
_ODD = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # odd, as int64: SplitMix64's


def layer_digests(model: torch.nn.Module, partition: Partition, *, stage: int, num_layers: int) -> tuple[str, ...]:
    """Digests of the embedding and of the first `num_layers` layers, over all stages and tensor-parallel ranks; the
    same on every rank. A collective."""
    mine: dict[tuple[int, str, int], str] = {}
    if replicas.rank() == 0:
        for name, parameter in unwrap_model(model).named_parameters():
            place = _place(ownership(name, partition=partition, stage=stage))
            if place is not None and place <= num_layers:
                if name.startswith("chunks."):
                    name = name.split(".", 2)[2]
                within = name if place == 0 else name.split(".", 3)[3]
                mine[place, within, parallel_state.get_tensor_model_parallel_rank()] = tensor_digest(parameter)
    whole = sorted((key, digest) for rank in collectives.gather_objects(mine) for key, digest in rank.items())
    return tuple(
        digest_of([f"{within} {rank} {digest}" for (at, within, rank), digest in whole if at == place])
        for place in range(num_layers + 1)
    )


def _place(owned: Ownership) -> int | None:
    """0 for the embedding, 1 for layer 0, and so on; None for what comes after the layers."""
    if owned.module == "embedding":
        return 0
    return None if owned.layer is None else 1 + owned.layer


@torch.no_grad()
def tensor_digest(tensor: torch.Tensor) -> str:
    """Identifies all bits of a tensor. SHA-256 in host memory; on a GPU a 64-bit hash computed there."""
    if tensor.device.type != "cpu":
        return f"{bits_digest(tensor):016x}"
    return sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def bits_digest(tensor: torch.Tensor) -> int:
    """64 bits from the bits and places of all elements: a sum of a hash of both. Integers, so that the order of
    summation does not count."""
    bits = tensor.detach().reshape(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    total = 0
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + chunk.numel(), device=chunk.device, dtype=torch.int64)
        mixed = (chunk + places * _ODD[0]) * _ODD[1]
        mixed = (mixed ^ (mixed >> 29)) * _ODD[2]
        total += int((mixed ^ (mixed >> 32)).sum())
    return total % 2**64
