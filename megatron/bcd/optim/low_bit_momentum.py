"""Muon's momentum in 8-bit codes with an fp32 scale for each BLOCK of consecutive elements of a matrix.

Quantization is linear: an element is its code, -127 to 127, times the scale of its group. Rounding is to nearest, so it
depends on nothing but the values. What it costs in loss: studies/gpt_momentum.md; up to 2.7 billion parameters:
arXiv 2509.23106.

Shapes: M = rows, N = columns, G = ceil(M N / BLOCK) scales; MN also stands for any number of matrices, KMN.
"""

from __future__ import annotations

import torch

from megatron.bcd.optim.low_bit_adam import BLOCK, SMALLEST_SCALE

_MOST = 127
_KEPT_BITS = -1 << 7
"""Mask for 17 bits of a scale's mantissa. The product with a code of 7 bits is then exact in fp32, so decoding and
encoding again gives the same codes and scales."""


def zero_scales(shape: torch.Size, device: torch.device) -> torch.Tensor:
    """Return the scales [G] of a momentum [M, N] of zeros."""
    return torch.zeros(*shape[:-2], -(-shape[-2:].numel() // BLOCK), device=device)


def encode(values_MN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, int8 [M, N], and scales, fp32 [G]."""
    groups = _groups(values_MN)
    scales_G = groups.abs().amax(-1).div_(_MOST)
    is_zero = scales_G < SMALLEST_SCALE
    bits = (scales_G.view(torch.int32) - 1 - _KEPT_BITS) & _KEPT_BITS  # rounded up, so that no code exceeds 127
    scales_G = bits.view(torch.float32).masked_fill_(is_zero, 0.0)
    codes = (groups / scales_G.masked_fill(is_zero, torch.inf)[..., None]).round_().to(torch.int8)
    return _matrix(codes, like=values_MN), scales_G


def decode(codes_MN: torch.Tensor, scales_G: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values [M, N]."""
    return _matrix(_groups(codes_MN) * scales_G[..., None], like=codes_MN)


def _groups(tensor_MN: torch.Tensor) -> torch.Tensor:
    """Return a matrix's elements as [G, BLOCK], with zeros behind the last."""
    flat = tensor_MN.flatten(-2)
    padding = -flat.shape[-1] % BLOCK
    return (torch.nn.functional.pad(flat, (0, padding)) if padding else flat).unflatten(-1, (-1, BLOCK))


def _matrix(groups: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    return groups.flatten(-2)[..., : like.shape[-2:].numel()].view_as(like)
