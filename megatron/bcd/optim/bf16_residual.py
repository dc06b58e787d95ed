"""What a bf16 weight lacks of its fp32 main parameter, in 2 bytes per element.

A bf16 weight is its main parameter rounded to the upper 16 bits, up or down. As integers, the main parameter's bits
lie within half a step of the weight's, -0x8000 to +0x8000: 65,537 values, and all but the last fit 16 bits. +0x8000
occurs where a main parameter lies in the middle and the even weight is the one below it (0x3f808000 rounds to 0x3f80;
0x3f7f8000 does, too, from the other side). Those, and what is no rounding at all (NaN loses its payload), are kept
whole, with their places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_CHUNK = 1 << 22
"""Elements that are looked at together, so that integers of the whole part never exist."""


@dataclass(frozen=True, kw_only=True)
class Bf16Residual:
    """In host memory."""

    differences: torch.Tensor
    """int16 by element: the main parameter's bits less the weight's in the upper half of 32."""
    odd_places: torch.Tensor
    """int64: elements whose difference does not fit."""
    odd_main_params: torch.Tensor
    """Their main parameters' bits as int32."""

    @property
    def num_bytes(self) -> int:
        return self.differences.nbytes + self.odd_places.nbytes + self.odd_main_params.nbytes


@torch.no_grad()
def bf16_residual(main_param: torch.Tensor, weight: torch.Tensor, *, into: torch.Tensor) -> Bf16Residual:
    """What `restore` needs beside `weight` (bf16, flat) to give back `main_param` (fp32, flat) bit for bit.

    `into` is the int16 host buffer for the differences; it is written without waiting for the device.
    """
    places, main_params = [], []
    for start in range(0, main_param.numel(), _CHUNK):
        bits, upper = _bits(main_param[start : start + _CHUNK]), _upper(weight[start : start + _CHUNK])
        difference = (bits - upper).to(torch.int16)
        odd = torch.nonzero(upper + difference != bits).view(-1)
        into[start : start + _CHUNK].copy_(difference, non_blocking=True)
        places.append((odd + start).cpu())
        main_params.append(bits[odd].cpu())
    return Bf16Residual(
        differences=into,
        odd_places=torch.cat(places) if places else torch.empty(0, dtype=torch.int64),
        odd_main_params=torch.cat(main_params) if main_params else torch.empty(0, dtype=torch.int32),
    )


@torch.no_grad()
def restore(low: Bf16Residual, weight: torch.Tensor, *, main_param: torch.Tensor) -> None:
    """Write into `main_param` (fp32, flat) what it was when `bf16_residual` looked; `weight` must be the same as
    then."""
    for start in range(0, main_param.numel(), _CHUNK):
        upper = _upper(weight[start : start + _CHUNK])
        difference = low.differences[start : start + _CHUNK].to(main_param.device, non_blocking=True)
        _bits(main_param[start : start + _CHUNK]).copy_(upper + difference)
    if low.odd_places.numel():
        _bits(main_param)[low.odd_places.to(main_param.device)] = low.odd_main_params.to(main_param.device)


def _bits(main_param: torch.Tensor) -> torch.Tensor:
    return main_param.view(torch.int32)


def _upper(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int16).to(torch.int32) << 16
