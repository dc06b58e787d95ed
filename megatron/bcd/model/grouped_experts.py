"""The experts of a layer in one grouped matrix product (--moe-grouped-gemm without Transformer Engine)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from megatron.bcd.runtime import device
from megatron.bcd.runtime.compat import pytorch

_BYTES = 16
"""Alignment that CUDA's grouped product requires of rows and of every expert's matrix."""
_NAMES = ("linear_fc1", "linear_fc2")


def is_available(dtype: torch.dtype, *sizes: int) -> bool:
    """Return whether PyTorch has a grouped product for matrices of these sizes on this device."""
    is_aligned = all(size * dtype.itemsize % _BYTES == 0 for size in sizes)
    return not device.has_cuda() or (dtype == torch.bfloat16 and is_aligned)


def group_experts(model: torch.nn.Module) -> None:
    """Let the experts of each layer compute together. Parameters and checkpoints do not change."""
    for module in model.modules():
        if type(module) is SequentialMLP and module.num_local_experts > 1:
            module.__class__ = GroupedExperts
            for name in _NAMES:
                weights = [getattr(expert, name).weight for expert in module.local_experts]
                for weight, part in zip(weights, stacked(weights), strict=True):
                    weight.data = part  # of one tensor, so that later calls of `stacked` copy nothing


class GroupedExperts(SequentialMLP):
    """Megatron Core's experts, whose matrices PyTorch multiplies in one call for all experts of a layer."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Map tokens [T, H], sorted by expert, to [T, H]. `tokens_per_expert` is [E], `permuted_probs` is [T]."""
        if not len(permuted_local_hidden_states):
            output: Tensor = super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)[0]
            return output, None
        ends = tokens_per_expert.to(permuted_local_hidden_states.device).cumsum(0).to(torch.int32)
        linears = {name: _Linears([getattr(each, name).weight for each in self.local_experts], ends) for name in _NAMES}
        expert = pytorch.with_modules(self.local_experts[0], linears)  # with Megatron Core's activation between them
        return expert(permuted_local_hidden_states, permuted_probs)[0], None


class _Linears(torch.nn.Module):
    """One linear layer of all experts, called as Megatron Core's."""

    def __init__(self, weights: Sequence[Tensor], ends: Tensor) -> None:
        super().__init__()
        self._weights, self._ends = weights, ends  # in a list, which does not register them

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        """Map [T, K] to [T, N]."""
        return _GroupedLinear.apply(tokens, self._ends, *self._weights), None


class _GroupedLinear(torch.autograd.Function):
    """Products [T, N] of tokens [T, K], sorted by expert, with their expert's matrix [N, K].

    `ends` [E] are the positions behind the last token of each expert.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        is_frozen = not any(ctx.needs_input_grad[2:])
        ctx.parameters = weights  # saved tensors can be copies of them
        ctx.save_for_backward(None if is_frozen else tokens, ends, *weights)
        return torch.nn.functional.grouped_mm(tokens, stacked(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tokens, ends, *weights = ctx.saved_tensors
        token_gradient, gradients = None, [None] * len(weights)
        gradient = gradient.contiguous()
        if ctx.needs_input_grad[0]:
            token_gradient = torch.nn.functional.grouped_mm(gradient, stacked(weights), offs=ends)
        if tokens is not None:
            products = torch.nn.functional.grouped_mm(gradient.t(), tokens, offs=ends)
            is_empty = ends == torch.cat([ends.new_zeros(1), ends[:-1]])
            # on Blackwell the product of no tokens is what the memory had before (pytorch issue 172439)
            gradients = products.masked_fill_(is_empty[:, None, None], 0.0).unbind()
            if all(hasattr(each, "main_grad") for each in ctx.parameters):  # Megatron Core's, as is the next attribute
                pytorch.add_each([each.main_grad for each in ctx.parameters], gradients)
                for parameter in ctx.parameters:
                    parameter.grad_added_to_main_grad = True
        return token_gradient, None, *gradients


def stacked(matrices: Sequence[Tensor]) -> Tensor:
    """Return matrices [N, K] as [E, N, K]: without a copy if one tensor holds them at equal distances, as in the buffer
    of a layer from host memory."""
    first, second, *_ = matrices
    size = first.element_size()
    step = (second.data_ptr() - first.data_ptr()) // size
    is_aligned = not (step * size | first.data_ptr()) % _BYTES
    is_regular = (
        step > 0
        and is_aligned
        and all(
            matrix.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and matrix.data_ptr() == first.data_ptr() + index * step * size
            for index, matrix in enumerate(matrices)
        )
    )
    if not is_regular:
        return torch.stack(list(matrices))
    return first.detach().as_strided((len(matrices), *first.shape), (step, *first.stride()))
