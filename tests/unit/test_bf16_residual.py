"""A bf16 weight with its residual, or with its low 16 bits, restores the exact fp32 main parameter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.bcd.optim import bf16

TIES = [0x3F7F8000, 0x3F808000, -0x80000000 + 0x3F7F8000, -0x80000000 + 0x3F808000]
NON_FINITE = [0x7F800000, -0x80000000 + 0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1]
EDGES = [0, -0x80000000, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF]


def round_trip(bits: torch.Tensor) -> tuple[torch.Tensor, bf16.Bf16Residual]:
    main_param = bits.view(torch.float32)
    weight = main_param.to(torch.bfloat16)
    residual = bf16.bf16_residual(main_param, weight, out=torch.empty(len(bits), dtype=torch.int16))
    restored = torch.full_like(main_param, 7.0)
    residual.restore(weight, main_param=restored)
    return restored.view(torch.int32), residual


def test_ties_edges_and_what_is_not_finite() -> None:
    """Ties, edges and non-finite values come back bit by bit, even where two ties round to the same weight."""
    bits = torch.tensor(TIES + NON_FINITE + EDGES, dtype=torch.int32)
    assert torch.equal(
        bits[:2].view(torch.float32).to(torch.bfloat16).view(torch.int16), torch.tensor([0x3F80] * 2).short()
    )
    restored, residual = round_trip(bits)
    assert torch.equal(restored, bits)
    assert 1 in residual.exception_indices and 0 not in residual.exception_indices, (
        "only the tie that was rounded down does not fit"
    )


@pytest.mark.parametrize("chunk", [64, 1 << 22])
def test_any_bits(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Any bits come back whatever the chunk size, and usual values take less than 2.01 bytes each."""
    monkeypatch.setattr(bf16, "_CHUNK", chunk)
    any_bits = torch.randint(-(2**31), 2**31, (10_001,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    assert torch.equal(round_trip(any_bits)[0], any_bits)
    usual = torch.randn(100_001, generator=torch.Generator().manual_seed(2)).view(torch.int32)
    restored, residual = round_trip(usual)
    assert torch.equal(restored, usual)
    assert sum(tensor.nbytes for tensor in vars(residual).values()) < 2.01 * len(usual)


@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**120), max_value=2.0**120),
        min_size=1,
    )
)
def test_split_loses_no_bit(values: list[float]) -> None:
    """A split loses no bit, and the weight is within one bf16 step of the value."""
    value = torch.tensor(values, dtype=torch.float32)
    weight, low_bits = torch.empty_like(value, dtype=torch.bfloat16), torch.empty_like(value, dtype=torch.int16)
    bf16.split(value, weight=weight, low_bits=low_bits)
    assert torch.equal(bf16.join(weight, low_bits).view(torch.int32), value.view(torch.int32))
    spacing = (weight.float().abs() * 2**-8).clamp(min=2.0**-133)
    assert ((weight.float() - value).abs() <= spacing).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_split_with_a_second_moment_rounds_like_torch(dtype: torch.dtype) -> None:
    """A split with a second moment rounds like PyTorch and keeps the moment; it joins exactly, in 8 bits within one
    fp32 step."""
    bits = torch.randint(-(2**31), 2**31, (10_000,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    bits[::2] = (bits[::2] & -0x10000) | 0x8000
    value = bits.view(torch.float32)
    value = value[value.abs() < 2.0**120]
    weight, low_bits = torch.empty_like(value, dtype=torch.bfloat16), torch.empty_like(value, dtype=torch.int16)
    squares = (torch.arange(len(value)) % 5).to(dtype)
    marked = squares.clone()
    bf16.split(value, weight=weight, low_bits=low_bits, squares=marked)
    assert torch.equal(weight, value.to(torch.bfloat16))
    assert torch.equal(marked.abs() if marked.is_floating_point() else marked, squares)
    difference = bf16.join(weight, low_bits, marked).view(torch.int32) - value.view(torch.int32)
    assert set(difference.unique().tolist()) == ({0} if marked.is_floating_point() else {-1, 0})
