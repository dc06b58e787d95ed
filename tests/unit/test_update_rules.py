"""Update directions that need no optimizer state."""

from __future__ import annotations

import math
import types
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.bcd.model.host_layers import LOW_BITS
from megatron.bcd.optim import bf16, low_bit_momentum, update_rules
from megatron.bcd.optim.low_bit_adam import BLOCK
from megatron.bcd.optim.matrix import FACTORS, MOMENTUM_SCALE, MatrixRule
from megatron.bcd.optim.matrix_update import update_stack
from megatron.bcd.optim.state import MOMENTUM
from megatron.bcd.optim.update_rules import MatrixLayout
from megatron.bcd.planner.cost import newton_schulz_flops


def subtract_factored(
    value: torch.Tensor, gradient: torch.Tensor, factors: torch.Tensor, layout: MatrixLayout = update_rules._WHOLE
) -> None:
    """Subtract the directions of one step at a rate of 1."""
    scales = update_rules.factored_scales(gradient, factors, layout)
    for rows in update_rules.rows_at_once(gradient, layout):
        sizes = layout.parts or (gradient.shape[1],)
        update_rules.subtract_rows(value[:, rows], rows, gradient, *scales, sizes, rate=1.0)


SHAPES = ((48, 16), (16, 48), (32, 32))


def gradient(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_is_one_whatever_the_gradient(shape: tuple[int, int]) -> None:
    """The RMS of a step is about one, whatever the gradient's size and the matrix's shape, and zeros stay zeros."""
    step = update_rules.orthogonalize(gradient(*shape))
    assert float(step.square().mean().sqrt()) == pytest.approx(1.0, rel=0.2)
    for factor in (1e-6, 1e6):
        assert torch.allclose(update_rules.orthogonalize(factor * gradient(*shape)), step, atol=1e-4)
    assert not update_rules.orthogonalize(torch.zeros(shape)).any()


@pytest.mark.parametrize("num_steps", [1, 4, 5])
@pytest.mark.parametrize("shape", [(2, 16, 32), (2, 64, 16), (2, 16, 31)])
def test_steps_of_the_gram_matrix(shape: tuple[int, ...], num_steps: int) -> None:
    """Steps of the Gram matrix have the result of the others, with the operations that the planner counts. A matrix
    that is not twice as long as wide takes the usual steps."""
    results, operations = [], []
    for is_gram_iterated in (False, True):
        layout = MatrixLayout(is_gram_iterated=is_gram_iterated)
        with FlopCounterMode(display=False) as counter:
            results.append(update_rules.orthogonalize(gradient(*shape), layout, num_steps=num_steps))
        operations.append(counter.get_total_flops())
        expected = newton_schulz_flops(*shape[1:], num_steps=num_steps, is_gram_iterated=is_gram_iterated)
        assert operations[-1] == shape[0] * expected
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
    is_used = max(shape[1:]) >= 2 * min(shape[1:])
    assert torch.equal(*results) != is_used and (operations[1] < operations[0]) == (is_used and num_steps > 1)


def test_orthogonal_is_pytorchs_muon() -> None:
    """An orthogonal step is that of PyTorch's Muon."""
    g = gradient(24, 40)
    weight = torch.nn.Parameter(torch.zeros(24, 40))
    weight.grad = g.clone()
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="original").step()
    result = update_rules.orthogonalize(g) / math.sqrt(40)
    assert torch.allclose(result, -weight.detach(), atol=0.02)  # PyTorch's is in bf16


@pytest.mark.parametrize("factor", [1e-9, 1.0, 1e6])
def test_factored_rows_without_gradient(factor: float) -> None:
    """Rows without a gradient get no step, and the steps do not depend on the gradient's size."""
    factors, same = (torch.zeros(2, update_rules.num_factors(6, 5)) for _ in range(2))
    for step in range(4):
        g = gradient(2, 6, 5, seed=step)
        g[:, step + 1 :] = 0.0
        actual, expected = torch.zeros_like(g), torch.zeros_like(g)
        subtract_factored(actual, factor * g, factors)
        subtract_factored(expected, g, same)
        assert torch.allclose(actual, expected, rtol=1e-4)
        assert not actual[:, step + 1 :].any() and actual[:, : step + 1].all()
        assert float(actual.square().mean((1, 2)).max()) < 1.0 + 1e-5
    before = actual.clone()
    subtract_factored(actual, torch.zeros(2, 6, 5), factors)
    assert torch.equal(actual, before)


def test_a_large_matrix_is_stepped_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large matrix is stepped some rows at a time, with the step of the whole."""
    whole, factors = torch.zeros(1, 50, 8), torch.zeros(1, update_rules.num_factors(50, 8))
    by_rows, same = whole.clone(), factors.clone()
    for step in range(3):
        g = gradient(1, 50, 8, seed=step)
        subtract_factored(whole, g, factors)
        with monkeypatch.context() as patched:
            patched.setattr(update_rules, "ROWS_ELEMENTS", 7 * 8 + 3)
            assert [rows.stop - rows.start for rows in update_rules.rows_at_once(g)] == [7] * 7 + [1]
            subtract_factored(by_rows, g, same)
    assert torch.allclose(by_rows, whole, rtol=1e-5) and torch.equal(same, factors)


@pytest.mark.parametrize(
    ("rule", "dtype", "parts", "momentum"),
    [
        (update_rules.FACTORED, torch.bfloat16, (4, 2, 2), None),
        (update_rules.ORTHOGONAL, torch.float32, (), None),
        (update_rules.ORTHOGONAL, torch.bfloat16, (), None),
        (update_rules.ORTHOGONAL, torch.bfloat16, (4, 2, 2), torch.bfloat16),
        (update_rules.ORTHOGONAL, torch.bfloat16, (), torch.int8),
    ],
)
def test_compiled_updates_are_the_eager_ones(
    rule: str, dtype: torch.dtype, parts: tuple[int, ...], momentum: torch.dtype | None
) -> None:
    """Compiled updates differ from eager ones by rounding of fp32 values, and a skipped one changes no bit."""
    shape = (2, 32, 24)
    start = gradient(*shape).to(dtype)

    def trained(*, is_compiled: bool) -> list[torch.Tensor]:
        weights = [matrix.clone() for matrix in start]
        low_bits = [torch.zeros_like(matrix, dtype=torch.int16) for matrix in start if dtype is torch.bfloat16]
        factors = [torch.zeros(update_rules.num_factors(*shape[1:], len(parts) or 1)) for _ in start]
        momenta = [torch.zeros_like(matrix, dtype=momentum) for matrix in start] if momentum else []
        scales = [torch.zeros(-(-32 * 24 // BLOCK)) for _ in momenta] if momentum is torch.int8 else []
        state = {LOW_BITS: low_bits, FACTORS: factors, MOMENTUM: momenta, MOMENTUM_SCALE: scales}
        settings: dict[str, Any] = {"gradient_scale": 1.0, "on_device": torch.tensor, "is_compiled": is_compiled}
        for step in range(3):
            stack = types.SimpleNamespace(
                rule=MatrixRule(name=rule, grad_dtype=dtype, momentum=0.9 if momentum else None, nesterov=True),
                param_group={"lr": 1e-2, "weight_decay": 0.1},
                layout=MatrixLayout(parts=parts),
                weights=[matrix[None] for matrix in weights],
                state=lambda kind: [tensor[None] for tensor in state[kind]],
                gradient=gradient(*shape, seed=step).to(dtype),
                is_skipped=torch.tensor([step == 1]),
            )
            if step == 1:
                stack.gradient[0, 0, 0] = math.nan
            written = *weights, *low_bits, *momenta, *scales
            before = [tensor.clone() for tensor in written]
            update_stack(stack, clip_coefficient=0.5 if step else 1.0, num_steps=step, **settings)  # type: ignore[arg-type]
            changed = [not torch.equal(old, new) for old, new in zip(before, written, strict=True)]
            assert changed == [step != 1] * len(changed)
        values = [bf16.join(*pair) for pair in zip(weights, low_bits, strict=True)] if low_bits else weights
        exact = [low_bit_momentum.decode(*each) for each in zip(momenta, scales, strict=True)] if scales else momenta
        return [*values, *exact, *(means for means in factors if rule == update_rules.FACTORED)]

    for eager, fast in zip(trained(is_compiled=False), trained(is_compiled=True), strict=True):
        # a momentum's rounding to 8 or 16 bits may turn where fp32 values differ in their last bit
        rounding = {torch.int8: 2e-3, torch.bfloat16: 1e-3, None: 1e-7}[momentum]
        torch.testing.assert_close(fast, eager, rtol=1e-2 if momentum else 1e-5, atol=rounding)
