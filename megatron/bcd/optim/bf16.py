"""fp32 main parameters of bf16 weights in 2 further bytes per element, which lose nothing. Two forms:

`Bf16Residual`, in host memory, for Megatron Core's main parameters, whose weights round halves to even. As integers,
the bits of the main parameter lie within half a step of the weight's, -0x8000 to +0x8000: 65,537 values, and all but
the last fit 16 bits. +0x8000 occurs if a main parameter lies halfway and the even weight is the one below (0x3f808000
rounds to 0x3f80; from the other side 0x3f7f8000 does, too). Those elements, and those whose weight is no rounding at
all (NaN loses its payload), are exceptions: their bits are stored whole, with their index.

`join` and `split`, on the device: the weight rounds halves away from zero. The bits then lie -0x8000 to +0x7fff from
the weight's, which fits without exceptions. Values must be finite.
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
    """int16 by element: bits of the main parameter minus those of the weight, shifted to the upper half."""
    exception_indices: torch.Tensor
    """int64: elements whose difference does not fit."""
    exception_bits: torch.Tensor
    """int32: the bits of their main parameters."""

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return self.differences.nbytes + self.exception_indices.nbytes + self.exception_bits.nbytes

    @torch.no_grad()
    def restore(self, weight: torch.Tensor, *, main_param: torch.Tensor) -> None:
        """Write into `main_param` (fp32, flat) its value at the call of `bf16_residual`.

        `weight` must be the same as then; it may be on another device.
        """
        for start in range(0, main_param.numel(), _CHUNK):
            upper = _upper(weight[start : start + _CHUNK].to(main_param.device))
            difference = self.differences[start : start + _CHUNK].to(main_param.device, non_blocking=True)
            _bits(main_param[start : start + _CHUNK]).copy_(upper + difference)
        if self.exception_indices.numel():
            indices, bits = self.exception_indices.to(main_param.device), self.exception_bits.to(main_param.device)
            _bits(main_param)[indices] = bits


@torch.no_grad()
def bf16_residual(main_param: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> Bf16Residual:
    """What restores `main_param` (fp32, flat) bit for bit from `weight` (bf16, flat).

    `out` is an int16 host buffer for the differences, written without waiting for the device. An optimizer may hold
    main parameters in host memory while weights are on the device.
    """
    indices, exceptions = [], []
    for start in range(0, main_param.numel(), _CHUNK):
        bits = _bits(main_param[start : start + _CHUNK])
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


def _bits(main_param: torch.Tensor) -> torch.Tensor:
    return main_param.view(torch.int32)


def _upper(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int16).to(torch.int32) << 16


@torch.no_grad()
def join(weight: torch.Tensor, low_bits: torch.Tensor) -> torch.Tensor:
    """The fp32 value of a bf16 weight and its int16 low bits, of the same shape."""
    value = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    low, high = _halves(value)
    low.copy_(low_bits)
    torch.add(weight.view(torch.int16), low_bits >> 15, out=high)
    return value


@torch.no_grad()
def split(value: torch.Tensor, *, weight: torch.Tensor, low_bits: torch.Tensor | None) -> None:
    """Write fp32 `value` into `weight` (bf16) and `low_bits` (int16); None drops the low bits."""
    low, high = _halves(value.contiguous())
    torch.sub(high, low >> 15, out=weight.view(torch.int16))
    if low_bits is not None:
        low_bits.copy_(low)


def _halves(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int16 views of the lower and the upper half of fp32 values, on a little-endian machine.

    Read as a signed number, a lower half is the difference from the weight that is nearest. If it is negative, its
    sign (`>> 15` makes -1 of it) lies between the upper half and the weight: the upper half is one less.
    """
    halves = value.view(torch.int16).unflatten(-1, (-1, 2))
    return halves[..., 0], halves[..., 1]
