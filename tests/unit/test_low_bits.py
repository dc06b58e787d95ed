"""What optimizers store in fewer bits: Adam's moments in 8, and beside bf16 weights the rest of their fp32 values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.bcd.optim import bf16, low_bit_adam
from megatron.bcd.optim.low_bit_adam import BLOCK, LowBitAdam

LARGEST = torch.finfo(torch.float32).max


def same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first
    )


@given(
    size=st.integers(1, 3 * BLOCK + 1),
    magnitude=st.sampled_from([1e-45, 1e-40, 1e-37, 1e-31, 1e-20, 1.0, 1e30, LARGEST / 8]),
    decades=st.integers(0, 40),
    zeros=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_encoding_what_was_decoded_changes_nothing(
    size: int, magnitude: float, decades: int, zeros: float, seed: int
) -> None:
    """Encoding what was decoded changes no bit, and no value turns positive."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator) * 10.0 ** -(decades * torch.rand(size, generator=generator))
    values = values * magnitude * (torch.rand(size, generator=generator) >= zeros)
    stored = low_bit_adam.encode({"exp_avg": values, "exp_avg_sq": values.abs()})
    decoded = {name: low_bit_adam.read(stored, name) for name in low_bit_adam.names(stored)}
    assert same_bits(low_bit_adam.encode(decoded), stored)
    assert torch.equal(decoded["exp_avg"] > 0, (decoded["exp_avg"] > 0) & (values > 0)), "a sign that turned"
    assert bool((decoded["exp_avg_sq"] >= 0).all())


def independent_codes(values: torch.Tensor, is_signed: bool) -> torch.Tensor:
    """Return the nearest numbers of the paper's format by exhaustive search in fp64, for one block without zeros."""
    table = {0.0, 1.0}
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade * (1 if is_signed else 2) + 1, dtype=torch.float64)
        table |= set(((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)).tolist())
    entries = sorted(table)
    if is_signed:
        entries.remove(entries[-2])
        entries += [-entry for entry in entries]
    else:
        entries.remove(0.0)
    scale = values.abs().max()
    candidates = torch.tensor(entries, dtype=torch.float64) * scale
    return candidates[(values[:, None] - candidates).abs().argmin(1)]


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_8_bits_are_the_nearest_of_the_format(name: str) -> None:
    """8 bits are the nearest of the paper's format, scaled by block."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5 * BLOCK + 7, generator=generator)
    values *= 10.0 ** -(5 * torch.rand(values.shape, generator=generator))
    values *= 10.0 ** torch.arange(values.numel()).div(BLOCK, rounding_mode="floor")
    values = values if name == "exp_avg" else values.abs()
    decoded = low_bit_adam.read(low_bit_adam.encode({name: values}), name)
    expected = torch.cat([independent_codes(block.double(), name == "exp_avg") for block in values.split(BLOCK)])
    error, smallest = (decoded - values).abs(), (expected - values).abs()
    assert bool((error <= smallest + 0.001 * values.abs()).all()), "close to the middle either neighbour will do"
    assert torch.isclose(decoded.double(), expected, rtol=1e-6).double().mean() > 0.98


def test_a_second_moment_above_0_stays_above_0() -> None:
    """A second moment above 0 stays above 0, also beside a far larger one."""
    values = torch.tensor([1e10, 1e-30, 0.0, 1e3])
    decoded = low_bit_adam.read(low_bit_adam.encode({"exp_avg_sq": values}), "exp_avg_sq")
    assert (decoded > 0).tolist() == [True, True, False, True]


def adam(parameter: torch.Tensor, *, decoupled: bool = True, beta2: float = 0.95) -> LowBitAdam:
    group = {"params": [parameter], "lr": 0.01, "betas": (0.9, beta2), "eps": 1e-8, "weight_decay": 0.1}
    return LowBitAdam([group], decoupled_weight_decay=decoupled)


@pytest.mark.parametrize("decoupled", [True, False])
def test_first_step_is_pytorchs(decoupled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step is that of PyTorch's Adam or AdamW."""
    monkeypatch.setattr("megatron.bcd.optim.low_bit_adam.CHUNK", 2 * BLOCK)
    parameter = torch.nn.Parameter(torch.randn(3, 3 * BLOCK, generator=torch.Generator().manual_seed(1)))
    reference = torch.nn.Parameter(parameter.detach().double())
    parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    reference.grad = parameter.grad.double()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    kind([reference], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1).step()
    adam(parameter, decoupled=decoupled).step()
    assert torch.allclose(parameter.double(), reference, rtol=0, atol=1e-6)


def test_second_moment_follows_a_gradient_that_shrinks() -> None:
    """With beta2 0.999 a second moment follows a shrinking gradient within 3 % in its root, though rounding is coarser
    than a step."""
    generator = torch.Generator().manual_seed(4)
    parameter = torch.nn.Parameter(torch.zeros(8 * BLOCK))
    optimizer, expected = adam(parameter, beta2=0.999), torch.zeros(8 * BLOCK)
    for step in range(2000):
        parameter.grad = torch.randn(8 * BLOCK, generator=generator) * (1.0 if step < 1000 else 0.3)
        expected = 0.999 * expected + 0.001 * parameter.grad**2
        optimizer.step()
    roots = (low_bit_adam.read(optimizer.state[parameter], "exp_avg_sq") / expected).sqrt()
    assert roots.mean() == pytest.approx(1, abs=0.03) and roots.std() < 0.1


# ---- a bf16 weight with its residual, or with its low 16 bits, restores the exact fp32 main parameter

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
