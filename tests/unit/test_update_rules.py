"""Directions without optimizer state, and bf16 weights with 16 further bits."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.bcd.blocks.ownership import STACK_ELEMENTS, matrix_stacks
from megatron.bcd.optim import bf16, update_rules
from megatron.bcd.optim.matrix_optimizer import MatrixOptimizer, MatrixRule
from megatron.bcd.optim.update_rules import MatrixLayout

SHAPES = ((48, 16), (16, 48), (32, 32))


def gradient(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", update_rules.RULES)
def test_rms_is_one_whatever_the_gradient(rule: str, shape: tuple[int, int]) -> None:
    """A rate that depends on the gradient's size, or on the matrix's shape."""
    one = update_rules.direction(rule, gradient(*shape))
    assert float(one.square().mean().sqrt()) == pytest.approx(1.0, rel=0.2)
    for factor in (1e-6, 1e6):
        assert torch.allclose(update_rules.direction(rule, factor * gradient(*shape)), one, atol=1e-4)
    assert not update_rules.direction(rule, torch.zeros(shape)).any()


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonal_is_near_the_polar_factor(shape: tuple[int, int]) -> None:
    """An iteration that loses singular vectors, or a transposed result."""
    g = gradient(*shape)
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    found = update_rules.orthogonalize(g) / math.sqrt(max(shape))
    values = torch.linalg.svdvals(found)
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3
    # same singular vectors: U^T X V is diagonal
    core = u.T @ found @ vh.T
    assert torch.allclose(core, torch.diag(core.diag()), atol=1e-4)


def test_orthogonal_is_pytorchs_muon() -> None:
    """Other coefficients or another order of products than Muon's."""
    g = gradient(24, 40)
    weight = torch.nn.Parameter(torch.zeros(24, 40))
    weight.grad = g.clone()
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="original").step()
    assert torch.allclose(update_rules.orthogonalize(g, scale=1.0), -weight.detach(), atol=0.02)  # PyTorch's is in bf16


def test_normalized_rows() -> None:
    """Columns in place of rows."""
    found = update_rules.normalize_rows(gradient(8, 5) * torch.logspace(-3, 3, 8)[:, None])
    assert torch.allclose(found.square().mean(dim=1), torch.ones(8))


def test_rows_of_zeros_in_fp16() -> None:
    """Zero divided by a smallest divisor that fp16 rounds to zero."""
    rows = gradient(4, 8).half()
    rows[1] = 0
    found = update_rules.normalize_rows(rows)
    assert torch.equal(found[1], torch.zeros(8, dtype=torch.float16))
    torch.testing.assert_close(found, update_rules.normalize_rows(rows.float()).half())


def test_queries_keys_and_values_apart() -> None:
    """Rows of one query group that are taken for another's: they are interleaved, [q q k v] for each group."""
    groups, width, hidden = 2, 3, 8
    parts = (2 * width, width, width)
    g = gradient(groups * sum(parts), hidden)
    [found] = update_rules.direction("orthogonal", g[None], MatrixLayout(parts=parts), num_steps=5)
    rows = torch.arange(g.shape[0]).view(groups, sum(parts))
    for start, size in ((0, 6), (6, 3), (9, 3)):
        mine = rows[:, start : start + size].flatten()
        assert torch.allclose(found[mine], update_rules.orthogonalize(g[mine]), atol=1e-5)


class _TwoSlices:
    """Runs a function on two slices of a matrix in threads, with a sum over both as all-reduce."""

    def __init__(self) -> None:
        import threading

        self._barrier = threading.Barrier(2)
        self._tensors: list[torch.Tensor] = [torch.empty(0), torch.empty(0)]

    def run(self, function: Any, slices: list[torch.Tensor]) -> list[torch.Tensor]:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda rank: function(slices[rank], self._all_reduce(rank)), range(2)))

    def _all_reduce(self, rank: int) -> update_rules.AllReduce:
        def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
            self._tensors[rank] = tensor
            self._barrier.wait()
            total = self._tensors[0] + self._tensors[1]
            self._barrier.wait()
            return total

        return all_reduce


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_slices_make_up_the_whole(shape: tuple[int, int], dim: int) -> None:
    """A tensor-parallel rank that orthogonalises its slice alone."""
    g = gradient(*shape)

    def one(piece: torch.Tensor, all_reduce: update_rules.AllReduce) -> torch.Tensor:
        return update_rules.orthogonalize(piece, scale=1.0, sharded_dim=dim, all_reduce=all_reduce)

    found = torch.cat(_TwoSlices().run(one, list(g.chunk(2, dim=dim))), dim=dim)
    assert torch.allclose(found, update_rules.orthogonalize(g, scale=1.0), atol=1e-4)


def test_sliced_rows_have_one_norm() -> None:
    """Rows that are cut by tensor parallelism and normalised piece by piece."""
    g = gradient(6, 10)

    def one(piece: torch.Tensor, all_reduce: update_rules.AllReduce) -> torch.Tensor:
        return update_rules.normalize_rows(piece, num_slices=2, all_reduce=all_reduce)

    assert torch.allclose(
        torch.cat(_TwoSlices().run(one, list(g.chunk(2, dim=1))), dim=1), update_rules.normalize_rows(g), atol=1e-6
    )


@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**120), max_value=2.0**120),
        min_size=1,
    )
)
def test_split_loses_no_bit(values: list[float]) -> None:
    """A value halfway between two bf16 numbers whose rest does not fit 16 bits; a lost sign of zero."""
    value = torch.tensor(values, dtype=torch.float32)
    weight, low_bits = torch.empty_like(value, dtype=torch.bfloat16), torch.empty_like(value, dtype=torch.int16)
    bf16.split(value, weight=weight, low_bits=low_bits)
    assert torch.equal(bf16.join(weight, low_bits).view(torch.int32), value.view(torch.int32))
    spacing = (weight.float().abs() * 2**-8).clamp(min=2.0**-133)
    assert ((weight.float() - value).abs() <= spacing).all()


def test_small_updates_add_up_in_bf16() -> None:
    """Updates far below a bf16 step that are rounded away."""
    weight, low_bits = torch.ones(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int16)
    for _ in range(1000):
        bf16.split(bf16.join(weight, low_bits) + 1e-5, weight=weight, low_bits=low_bits)
    assert torch.allclose(bf16.join(weight, low_bits), torch.full((4,), 1.01), atol=1e-4)
    assert (weight > 1).all()


class _CountCalls(TorchDispatchMode):
    """Operators that compute: what only describes a tensor or its memory anew is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (operator.is_view or "view" in operator.name())
        return operator(*args, **(kwargs or {}))


def calls_of_a_step(num_layers: int, momentum: float | None) -> int:
    """Operator calls that step the matrices of so many layers, in bf16."""
    shapes = {"linear_qkv": (24, 8), "linear_fc1": (32, 8), "linear_fc2": (8, 32)}
    matrices = {
        f"layers.{layer}.{name}": (
            torch.nn.Parameter(gradient(*shape, seed=layer).bfloat16()),
            MatrixLayout(parts=(4, 4, 4) if name == "linear_qkv" else ()),
        )
        for layer in range(num_layers)
        for name, shape in shapes.items()
    }
    optimizer = MatrixOptimizer(matrices, group=cast(Any, _OneRank()), momentum_dtype=torch.bfloat16)
    rule = MatrixRule(
        name="orthogonal", scale=0.2, grad_dtype=torch.bfloat16, num_steps=5, momentum=momentum, nesterov=True
    )
    optimizer.begin([(rule, list(matrices), False)])
    with _CountCalls() as calls:
        optimizer.step()
    return calls.count


class _OneRank:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@pytest.mark.parametrize("momentum", [None, 0.95])
def test_matrices_of_one_shape_take_one_product(momentum: float | None) -> None:
    """A step whose small matrices are launched one by one: a GPU that waits for the CPU."""
    assert calls_of_a_step(8, momentum) == calls_of_a_step(2, momentum) < 150


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2 * STACK_ELEMENTS))))
def test_stacks_are_bounded(matrices: list[tuple[int, int]]) -> None:
    """A stack whose temporary memory is a multiple of the largest matrix', or that mixes shapes; a matrix in none."""
    sizes = [size for _, size in matrices]
    stacks = matrix_stacks(matrices, sizes)
    assert sorted(index for stack in stacks for index in stack) == list(range(len(matrices)))
    for stack in stacks:
        assert len({matrices[index] for index in stack}) == 1 and stack == sorted(stack, reverse=True)
        assert len(stack) == 1 or sum(sizes[index] for index in stack) <= STACK_ELEMENTS
