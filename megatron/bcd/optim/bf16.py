"""Store fp32 main parameters without loss in 2 bytes per element beside their bf16 weights. There are two forms.

`Bf16Residual`, in host memory, is for Megatron Core's main parameters, whose weights round halves to even. Read as
integers, the bits of the main parameter differ from those of the weight (shifted to the upper half) by -0x8000 to
+0x8000. These are 65,537 values, and all except the last fit 16 bits. The difference is +0x8000 if the main parameter
is halfway between two weights and the even weight is the lower one. For example, 0x3f808000 rounds to 0x3f80, and so
does 0x3f7f8000 from the other side. These elements are exceptions, and so are elements whose weight is not their
rounding (NaN loses its payload). Exceptions are stored with all bits and their index.

`join` and `split`, on the device, are for weights that round halves away from zero. Then the bits differ by -0x8000 to
+0x7fff, which fits without exceptions. Values must be finite.

With `squares` weights round halves to even, like Megatron Core's. Halves on both sides of an even weight have
the same low bits, so the sign of Adam's second moment, which is never negative, marks those above the weight. A second
moment in 8 bits has no sign: such a half becomes one fp32 step less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_CHUNK = 1 << 22
"""Elements processed at once, to bound the memory of temporary integers."""


@dataclass(frozen=True, kw_only=True)
class Bf16Residual:
    """The difference of fp32 main parameters and their bf16 weights, in host memory."""

    differences: torch.Tensor
    """int16 by element: bits of the main parameter minus the bits of the weight, shifted to the upper half."""
    exception_indices: torch.Tensor
    """int64: indices of elements whose difference does not fit."""
    exception_bits: torch.Tensor
    """int32: the bits of their main parameters."""

    @torch.no_grad()
    def restore(self, weight: torch.Tensor, *, main_param: torch.Tensor) -> None:
        """Write the value that `bf16_residual` stored into `main_param` (fp32, flat).

        `weight` must not have changed since; it may be on another device.
        """
        for start in range(0, main_param.numel(), _CHUNK):
            upper = _upper(weight[start : start + _CHUNK].to(main_param.device))
            difference = self.differences[start : start + _CHUNK].to(main_param.device, non_blocking=True)
            main_param[start : start + _CHUNK].view(torch.int32).copy_(upper + difference)
        if self.exception_indices.numel():
            indices, bits = self.exception_indices.to(main_param.device), self.exception_bits.to(main_param.device)
            main_param.view(torch.int32)[indices] = bits


@torch.no_grad()
def bf16_residual(main_param: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> Bf16Residual:
    """Return the difference that restores `main_param` (fp32, flat) bit for bit from `weight` (bf16, flat).

    `out` is an int16 host buffer for the differences, written without waiting for the device. Main parameters may be in
    host memory while weights are on the device.
    """
    indices, exceptions = [], []
    for start in range(0, main_param.numel(), _CHUNK):
        bits = main_param[start : start + _CHUNK].view(torch.int32)
        upper = _upper(weight[start : start + _CHUNK].to(main_param.device))
        difference = (bits - upper).to(torch.int16)
        exception = torch.nonzero(upper + difference != bits).view(-1)
        out[start : start + _CHUNK].copy_(difference, non_blocking=True)
        indices.append((exception + start).cpu())
        exceptions.append(bits[exception].cpu())
    return Bf16Residual(
        differences=out,
        exception_indices=torch.cat(indices) if indices else torch.empty(0, dtype=torch.int64),
        exception_bits=torch.cat(exceptions) if exceptions else torch.empty(0, dtype=torch.int32),
    )


def _upper(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int16).to(torch.int32) << 16


@torch.no_grad()
def join(weight: torch.Tensor, low_bits: torch.Tensor, squares: torch.Tensor | None = None) -> torch.Tensor:
    """Return the fp32 value of a bf16 weight and its int16 low bits, in the same shape."""
    value = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    low, high = _halves(value)
    low.copy_(low_bits)
    torch.add(weight.view(torch.int16), low_bits >> 15, out=high)  # a half is below the weight
    if squares is not None and squares.is_floating_point():
        high.add_(torch.signbit(squares))
    return value


@torch.no_grad()
def split(
    value: torch.Tensor, *, weight: torch.Tensor, low_bits: torch.Tensor | None, squares: torch.Tensor | None = None
) -> None:
    """Write fp32 `value` into `weight` (bf16), `low_bits` (int16; None drops them) and signs of the second moment."""
    low, high = _halves(value.contiguous())
    torch.sub(high, low >> 15, out=weight.view(torch.int16))
    if low_bits is None:  # this rank does not own the matrix
        return
    low_bits.copy_(low)
    if squares is not None:
        weight.copy_(value)
        is_above = (low == -0x8000) & (weight.view(torch.int16) == high)
        if squares.is_floating_point():
            squares.copy_(torch.where(is_above, -squares, squares))
        else:
            low_bits.masked_fill_(is_above, 0x7FFF)


def _halves(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int16 views of the lower and the upper half of fp32 values, on a little-endian machine.

    Read as a signed number, the lower half is the difference between the value and its nearest weight. If it is
    negative, the value is below the weight, so the upper half is the weight minus one. `lower >> 15` is -1 then, and 0
    otherwise: the weight is the upper half minus this sign.
    """
    halves = value.view(torch.int16).unflatten(-1, (-1, 2))
    return halves[..., 0], halves[..., 1]
