"""The product of all experts of a layer: outputs and gradients against one product per expert."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from megatron.bcd.model import grouped_experts
from megatron.bcd.runtime.compat import pytorch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", ["apart", "one_buffer", "reversed"])
def test_one_product_is_that_of_every_expert(place: str, dtype: torch.dtype) -> None:
    """One product has the outputs and gradients of one per expert, and copies no matrices that lie in one buffer."""
    generator = torch.Generator().manual_seed(1)
    buffer = torch.randn(4 * 2 * 24 * 16, generator=generator).to(dtype).view(8, 24, 16)
    weights = list(buffer[::2])  # others lie between them
    if place == "apart":
        weights = [weight.clone() for weight in weights]
    elif place == "reversed":
        weights.reverse()
    counts = [3, 0, 7, 1]
    tokens = torch.randn(sum(counts), 16, generator=generator).to(dtype)
    upstream = torch.randn(sum(counts), 24, generator=generator).to(dtype)

    def run(grouped: bool) -> list[torch.Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in (tokens, *weights)]
        if grouped:
            ends = torch.tensor(counts).cumsum(0).to(torch.int32)
            output = grouped_experts._GroupedLinear.apply(leaves[0], ends, *leaves[1:])
        else:
            parts = zip(leaves[0].split(counts), leaves[1:], strict=True)
            output = torch.cat([part @ weight.t() for part, weight in parts])
        return [output, *torch.autograd.grad(output, leaves, upstream)]

    for actual, expected in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(actual, expected)
    is_shared = grouped_experts.stacked(weights).untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert is_shared == (place == "one_buffer"), "a copy of all experts in each pass"


def test_gradients_are_added_to_their_buffers_at_once() -> None:
    """The backward pass adds the gradients to Megatron Core's buffers by one call, and says so."""
    weights: list[Any] = [torch.randn(24, 16).requires_grad_() for _ in range(3)]
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones(24, 16), False
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    with mock.patch.object(pytorch, "add_each", wraps=pytorch.add_each) as add:
        for _ in range(2):
            grouped_experts._GroupedLinear.apply(torch.ones(5, 16), ends, *weights).sum().backward()
    assert add.call_count == 2 and all(weight.grad_added_to_main_grad for weight in weights)
    for weight, count in zip(weights, (2, 0, 3), strict=True):
        assert weight.main_grad.eq(1 + 2 * count).all()


@pytest.mark.parametrize("counts", [[3, 0, 7, 1], [0, 11, 0, 0], [0, 0, 5, 6]], ids=str)
def test_an_expert_without_tokens_has_no_gradient(counts: list[int]) -> None:
    """The gradient of an expert without tokens is zero, also where grouped_mm leaves garbage, as on Blackwell."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(24, 16, generator=generator).requires_grad_() for _ in counts]
    tokens = torch.randn(sum(counts), 16, generator=generator).requires_grad_()
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    grouped_mm = torch.nn.functional.grouped_mm

    def leaves_garbage(left: torch.Tensor, right: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        product = grouped_mm(left, right, offs=offs)
        if product.ndim == 3:
            product[torch.tensor(counts) == 0] = torch.nan
        return product

    def gradients() -> tuple[torch.Tensor, ...]:
        output = grouped_experts._GroupedLinear.apply(tokens, ends, *weights)
        return torch.autograd.grad(output.square().sum(), [tokens, *weights])

    expected = gradients()
    with mock.patch.object(torch.nn.functional, "grouped_mm", leaves_garbage):
        actual = gradients()
    assert all(map(torch.equal, actual, expected))
    assert [bool(gradient.any()) for gradient in actual[1:]] == [count > 0 for count in counts]
