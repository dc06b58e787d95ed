"""A bf16 weight and what is kept beside it give back the exact fp32 main parameter."""

from __future__ import annotations

import pytest
import torch

from megatron.bcd.optim import bf16_residual

TIES = [0x3F7F8000, 0x3F808000, -0x80000000 + 0x3F7F8000, -0x80000000 + 0x3F808000]
NON_FINITE = [0x7F800000, -0x80000000 + 0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1]
EDGES = [0, -0x80000000, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF]


def there_and_back(bits: torch.Tensor) -> tuple[torch.Tensor, bf16_residual.Bf16Residual]:
    main_param = bits.view(torch.float32)
    weight = main_param.to(torch.bfloat16)
    low = bf16_residual.bf16_residual(main_param, weight, into=torch.empty(len(bits), dtype=torch.int16))
    restored = torch.full_like(main_param, 7.0)
    bf16_residual.restore(low, weight, main_param=restored)
    return restored.view(torch.int32), low


def test_ties_edges_and_what_is_not_finite() -> None:
    """The two main parameters in the middle round to one weight, 65,536 apart; a NaN loses its payload."""
    bits = torch.tensor(TIES + NON_FINITE + EDGES, dtype=torch.int32)
    assert torch.equal(
        bits[:2].view(torch.float32).to(torch.bfloat16).view(torch.int16), torch.tensor([0x3F80] * 2).short()
    )
    restored, low = there_and_back(bits)
    assert torch.equal(restored, bits)
    assert 1 in low.odd_places and 0 not in low.odd_places, "only the tie that was rounded down does not fit"


@pytest.mark.parametrize("chunk", [64, 1 << 22])
def test_any_bits(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """A bit that is lost, a place that is counted from the start of its chunk, an exception list that is long."""
    monkeypatch.setattr(bf16_residual, "_CHUNK", chunk)
    any_bits = torch.randint(-(2**31), 2**31, (10_001,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    assert torch.equal(there_and_back(any_bits)[0], any_bits)
    usual = torch.randn(100_001, generator=torch.Generator().manual_seed(2)).view(torch.int32)
    restored, low = there_and_back(usual)
    assert torch.equal(restored, usual)
    assert low.num_bytes < 2.01 * len(usual)


def test_a_weight_that_is_no_rounding_of_its_master() -> None:
    """A weight that another rule rounded, or that was changed: the main parameter comes back all the same."""
    main_param = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    weight = torch.randn(1000, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    low = bf16_residual.bf16_residual(main_param, weight, into=torch.empty(1000, dtype=torch.int16))
    restored = torch.empty_like(main_param)
    bf16_residual.restore(low, weight, main_param=restored)
    assert torch.equal(restored, main_param)
    assert len(low.odd_places) > 900
