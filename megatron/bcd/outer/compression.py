"""Encode the changes that replica groups send: as fp32, as bf16, or in 4 bits with error feedback.

The 4-bit form follows MuLoCo (arXiv 2505.23725). Each row of 128 neighbours shares a scale in bf16. A code is one of 15
multiples of the scale, and two codes make a byte. A row with an infinite or undefined value arrives as undefined. The
next change includes the rounding errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_LEVELS = 7
"""Number of levels on either side of zero."""


@dataclass(frozen=True, kw_only=True)
class Compression:
    """Encodes rows of fp32 values [..., row] as bytes [..., bytes of a row], and decodes them."""

    row: int
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]
    keeps_errors: bool = False

    def rows(self, values: torch.Tensor, number: int) -> torch.Tensor:
        """Pad a flat tensor with zeros and return it as [number, rows, row]: one share for each of `number` groups."""
        filled = torch.nn.functional.pad(values, (0, -values.numel() % (number * self.row)))
        return filled.view(number, filled.numel() // (number * self.row), self.row)


def _encode_4_bits(rows: torch.Tensor) -> torch.Tensor:
    scales = (rows.abs().amax(-1, keepdim=True) / _LEVELS).bfloat16()
    # 0 / 0 is a row of zeros; if a scale is not finite, its codes have no meaning
    codes = (rows / scales.float()).round().nan_to_num().clamp(-_LEVELS, _LEVELS).add(_LEVELS).to(torch.uint8)
    return torch.cat([codes[..., ::2] << 4 | codes[..., 1::2], scales.view(torch.uint8)], dim=-1)


def _decode_4_bits(sent: torch.Tensor) -> torch.Tensor:
    pairs, scales = sent[..., :-2], sent[..., -2:].contiguous().view(torch.bfloat16)
    codes = torch.stack([pairs >> 4, pairs & 15], dim=-1).flatten(-2)
    return (codes.float() - _LEVELS) * torch.where(scales.isfinite(), scales.float(), torch.nan)


def _cast_to(dtype: torch.dtype) -> Compression:
    return Compression(
        row=1,
        encode=lambda rows: rows.to(dtype).view(torch.uint8),
        decode=lambda sent: sent.view(dtype).float(),
    )


COMPRESSIONS = {
    "bf16": _cast_to(torch.bfloat16),
    "fp32": _cast_to(torch.float32),
    "4bit": Compression(row=128, encode=_encode_4_bits, decode=_decode_4_bits, keeps_errors=True),
}
