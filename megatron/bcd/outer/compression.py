"""How changes travel between replica groups: as fp32, as bf16, or in 4 bits with error feedback.

4 bits (as in MuLoCo, arXiv 2505.23725): 15 levels in steps of a scale in bf16 that a row of 128 neighbours shares, two
codes a byte. A row that holds an infinite or undefined value arrives as undefined. What is lost is sent with the
next change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_LEVELS = 7
"""On either side of zero."""


@dataclass(frozen=True, kw_only=True)
class Compression:
    """`row`: elements that are sent together. Rows are fp32 [..., row]; in bytes, [..., bytes of a row]."""

    row: int
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]
    keeps_errors: bool = False

    def rows(self, values: torch.Tensor, number: int) -> torch.Tensor:
        """[number, rows, row] of a flat tensor, which zeros fill: a share for each of so many groups."""
        filled = torch.nn.functional.pad(values, (0, -values.numel() % (number * self.row)))
        return filled.view(number, filled.numel() // (number * self.row), self.row)


def _in_4_bits(rows: torch.Tensor) -> torch.Tensor:
    scales = (rows.abs().amax(-1, keepdim=True) / _LEVELS).bfloat16()
    # 0 / 0 is a row of zeros; where a scale is not finite, codes are without meaning
    codes = (rows / scales.float()).round().nan_to_num().clamp(-_LEVELS, _LEVELS).add(_LEVELS).to(torch.uint8)
    return torch.cat([codes[..., ::2] << 4 | codes[..., 1::2], scales.view(torch.uint8)], dim=-1)


def _of_4_bits(sent: torch.Tensor) -> torch.Tensor:
    pairs, scales = sent[..., :-2], sent[..., -2:].contiguous().view(torch.bfloat16)
    codes = torch.stack([pairs >> 4, pairs & 15], dim=-1).flatten(-2)
    return (codes.float() - _LEVELS) * torch.where(scales.isfinite(), scales.float(), torch.nan)


def _as_type(dtype: torch.dtype) -> Compression:
    return Compression(
        row=1,
        encode=lambda rows: rows.to(dtype).view(torch.uint8),
        decode=lambda sent: sent.view(dtype).float(),
    )


COMPRESSIONS = {
    "bf16": _as_type(torch.bfloat16),
    "fp32": _as_type(torch.float32),
    "4bit": Compression(row=128, encode=_in_4_bits, decode=_of_4_bits, keeps_errors=True),
}
