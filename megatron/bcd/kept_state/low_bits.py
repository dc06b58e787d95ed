"""What a bf16 weight lacks of its fp32 master, in 2 bytes per element.

A bf16 weight is its master rounded to the upper 16 bits, up or down. As integers, the master's bits lie within half a
step of the weight's, -0x8000 to +0x8000: 65,537 values, and all but the last fit 16 bits. +0x8000 occurs where a master
lies in the middle and the even weight is the one below it (0x3f808000 rounds to 0x3f80; 0x3f7f8000 does, too, from the
other side). Those, and what is no rounding at all (NaN loses its payload), are kept whole, with their places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_CHUNK = 1 << 22
"""Elements that are looked at together, so that integers of the whole part never exist."""


@dataclass(frozen=True, kw_only=True)
class LowBits:
    """In host memory."""

    differences: torch.Tensor
    """int16 by element: the master's bits less the weight's in the upper half of 32."""
    odd_places: torch.Tensor
    """int64: elements whose difference does not fit."""
    odd_masters: torch.Tensor
    """Their masters' bits as int32."""

    @property
    def num_bytes(self) -> int:
        return self.differences.nbytes + self.odd_places.nbytes + self.odd_masters.nbytes


@torch.no_grad()
def low_bits(master: torch.Tensor, weight: torch.Tensor, *, into: torch.Tensor) -> LowBits:
    """What `restore` needs beside `weight` (bf16, flat) to give back `master` (fp32, flat) bit for bit.

    `into` is the int16 host buffer for the differences; it is written without waiting for the device.
    """
    places, masters = [], []
    for start in range(0, master.numel(), _CHUNK):
        bits, upper = _bits(master[start : start + _CHUNK]), _upper(weight[start : start + _CHUNK])
        difference = (bits - upper).to(torch.int16)
        odd = torch.nonzero(upper + difference != bits).view(-1)
        into[start : start + _CHUNK].copy_(difference, non_blocking=True)
        places.append((odd + start).cpu())
        masters.append(bits[odd].cpu())
    return LowBits(
        differences=into,
        odd_places=torch.cat(places) if places else torch.empty(0, dtype=torch.int64),
        odd_masters=torch.cat(masters) if masters else torch.empty(0, dtype=torch.int32),
    )


@torch.no_grad()
def restore(low: LowBits, weight: torch.Tensor, *, master: torch.Tensor) -> None:
    """Write into `master` (fp32, flat) what it was when `low_bits` looked; `weight` must be the same as then."""
    for start in range(0, master.numel(), _CHUNK):
        upper = _upper(weight[start : start + _CHUNK])
        difference = low.differences[start : start + _CHUNK].to(master.device, non_blocking=True)
        _bits(master[start : start + _CHUNK]).copy_(upper + difference)
    if low.odd_places.numel():
        _bits(master)[low.odd_places.to(master.device)] = low.odd_masters.to(master.device)


def _bits(master: torch.Tensor) -> torch.Tensor:
    return master.view(torch.int32)


def _upper(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int16).to(torch.int32) << 16
