"""Adam with moments in bf16 and 8 bits: the stored form, the step, and its effect on training."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.bcd.optim import low_bit_adam
from megatron.bcd.optim.low_bit_adam import BLOCK, LowBitAdam

DTYPES = ("bf16", "int8")
LARGEST = torch.finfo(torch.float32).max


def same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first
    )


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    size=st.integers(1, 3 * BLOCK + 1),
    magnitude=st.sampled_from([1e-45, 1e-40, 1e-37, 1e-31, 1e-20, 1.0, 1e30, LARGEST / 8]),
    decades=st.integers(0, 40),
    zeros=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_encoding_what_was_decoded_changes_nothing(
    dtype: str, size: int, magnitude: float, decades: int, zeros: float, seed: int
) -> None:
    """Encoding what was decoded changes no bit, and no value turns positive."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator) * 10.0 ** -(decades * torch.rand(size, generator=generator))
    values = values * magnitude * (torch.rand(size, generator=generator) >= zeros)
    stored = low_bit_adam.encode({"exp_avg": values, "exp_avg_sq": values.abs()}, dtype)
    decoded = {name: low_bit_adam.read(stored, name) for name in low_bit_adam.names(stored)}
    assert same_bits(low_bit_adam.encode(decoded, dtype), stored)
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
    decoded = low_bit_adam.read(low_bit_adam.encode({name: values}, "int8"), name)
    expected = torch.cat([independent_codes(block.double(), name == "exp_avg") for block in values.split(BLOCK)])
    error, smallest = (decoded - values).abs(), (expected - values).abs()
    assert bool((error <= smallest + 0.001 * values.abs()).all()), "close to the middle either neighbour will do"
    assert torch.isclose(decoded.double(), expected, rtol=1e-6).double().mean() > 0.98


def test_a_second_moment_above_0_stays_above_0() -> None:
    """A second moment above 0 stays above 0, also beside a far larger one."""
    values = torch.tensor([1e10, 1e-30, 0.0, 1e3])
    decoded = low_bit_adam.read(low_bit_adam.encode({"exp_avg_sq": values}, "int8"), "exp_avg_sq")
    assert (decoded > 0).tolist() == [True, True, False, True]


def adam(
    parameter: torch.Tensor, dtype: str, *, decoupled: bool = True, beta2: float = 0.95, start: int = 0
) -> LowBitAdam:
    group = {"params": [parameter], "lr": 0.01, "betas": (0.9, beta2), "eps": 1e-8, "weight_decay": 0.1}
    return LowBitAdam([group], starts={parameter: start}, dtype=dtype, decoupled_weight_decay=decoupled)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_first_step_is_pytorchs(dtype: str, decoupled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step is that of PyTorch's Adam or AdamW."""
    monkeypatch.setattr("megatron.bcd.optim.low_bit_adam.CHUNK", 2 * BLOCK)
    parameter = torch.nn.Parameter(torch.randn(3, 3 * BLOCK, generator=torch.Generator().manual_seed(1)))
    reference = torch.nn.Parameter(parameter.detach().double())
    parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    reference.grad = parameter.grad.double()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    kind([reference], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1).step()
    adam(parameter, dtype, decoupled=decoupled).step()
    assert torch.allclose(parameter.double(), reference, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_second_moment_follows_a_gradient_that_shrinks(dtype: str) -> None:
    """With beta2 0.999 a second moment follows a shrinking gradient within 3 % in its root, though rounding is coarser
    than a step."""
    generator = torch.Generator().manual_seed(4)
    parameter = torch.nn.Parameter(torch.zeros(8 * BLOCK))
    optimizer, expected = adam(parameter, dtype, beta2=0.999), torch.zeros(8 * BLOCK)
    for step in range(2000):
        parameter.grad = torch.randn(8 * BLOCK, generator=generator) * (1.0 if step < 1000 else 0.3)
        expected = 0.999 * expected + 0.001 * parameter.grad**2
        optimizer.step()
    roots = (low_bit_adam.read(optimizer.state[parameter], "exp_avg_sq") / expected).sqrt()
    assert roots.mean() == pytest.approx(1, abs=0.03) and roots.std() < 0.1
