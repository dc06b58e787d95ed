"""The product of all experts of a layer: outputs and gradients against one product per expert."""

from __future__ import annotations

import pytest
import torch

from megatron.bcd.model import grouped_experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", ["apart", "one_buffer", "reversed"])
def test_one_product_is_that_of_every_expert(place: str, dtype: torch.dtype) -> None:
    """Matrices are taken from the wrong place of a layer's buffer, or an expert without tokens gets a gradient."""
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
    is_shared = grouped_experts._stacked(weights).untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert is_shared == (place == "one_buffer"), "a copy of all experts in each pass"
