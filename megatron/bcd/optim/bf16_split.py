"""An fp32 value as a bf16 weight and 16 further bits, both on the device: 4 bytes that lose nothing.

The weight is the value rounded to the nearest bf16, halves away from zero. As integers, the bits of the value then lie
-0x8000 to +0x7fff from the weight's, which fits 16 bits without exceptions (`bf16_residual` restores Megatron Core's
rounding, halves to even, and has some). Values must be finite.
"""

from __future__ import annotations

import torch


@torch.no_grad()
def join(weight: torch.Tensor, low_bits: torch.Tensor) -> torch.Tensor:
    """The fp32 value of a bf16 weight and its int16 low bits, of the same shape."""
    bits = weight.contiguous().view(torch.int16).to(torch.int32)
    bits <<= 16
    bits += low_bits
    return bits.view(torch.float32)


@torch.no_grad()
def split(value: torch.Tensor, *, weight: torch.Tensor, low_bits: torch.Tensor | None) -> None:
    """Write fp32 `value` into `weight` (bf16) and `low_bits` (int16); None drops the low bits."""
    bits = value.contiguous().view(torch.int32)
    upper = bits + 0x8000
    upper >>= 16
    weight.view(torch.int16).copy_(upper)
    if low_bits is not None:
        upper <<= 16
        low_bits.copy_(bits - upper)
