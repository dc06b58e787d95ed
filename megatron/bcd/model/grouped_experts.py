"""The experts of a layer in one grouped matrix product (--moe-grouped-gemm without Transformer Engine)."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from megatron.bcd.runtime import device

_BYTES = 16
"""Alignment that CUDA's grouped product requires of rows and of every expert's matrix."""


def is_available(dtype: torch.dtype) -> bool:
    """Return whether PyTorch has a grouped product for matrices of this dtype on this device."""
    has_product = hasattr(torch.nn.functional, "grouped_mm")  # since PyTorch 2.10
    return has_product and (dtype == torch.bfloat16 or not device.has_cuda())


def group_experts(model: torch.nn.Module) -> None:
    """Let the experts of each layer compute together. Parameters and checkpoints stay as they are."""
    for module in model.modules():
        if type(module) is SequentialMLP and module.num_local_experts > 1:
            weights = list(module.local_experts[0].parameters())
            if all(size * weight.element_size() % _BYTES == 0 for weight in weights for size in weight.shape):
                module.__class__ = GroupedExperts


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
        first = self.local_experts[0]

        def linear(name: str) -> Any:
            weights = [getattr(expert, name).weight for expert in self.local_experts]
            return lambda tokens: (_GroupedLinear.apply(tokens, ends, *weights), None)

        expert = SimpleNamespace(  # what Megatron Core's MLP reads of itself
            config=first.config,
            activation_func=first.activation_func,
            linear_fc1=linear("linear_fc1"),
            linear_fc2=linear("linear_fc2"),
        )
        output, _ = MLP.forward(expert, permuted_local_hidden_states, permuted_probs)
        return output, None


class _GroupedLinear(torch.autograd.Function):
    """Products [T, N] of tokens [T, K], sorted by expert, with their expert's matrix [N, K].

    `ends` [E] are the positions behind the last token of each expert.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, ends, *weights)
        return torch.nn.functional.grouped_mm(tokens, _stacked(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tokens, ends, *weights = ctx.saved_tensors
        token_gradient, gradients = None, [None] * len(weights)
        gradient = gradient.contiguous()
        if ctx.needs_input_grad[0]:
            token_gradient = torch.nn.functional.grouped_mm(gradient, _stacked(weights), offs=ends)
        if any(ctx.needs_input_grad[2:]):
            gradients = torch.nn.functional.grouped_mm(gradient.t(), tokens, offs=ends).unbind()
        return token_gradient, None, *gradients


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    """Return matrices [N, K] as [E, N, K]: without a copy if one tensor holds them at equal distances, as in the buffer
    of a layer from host memory."""
    first, second, *_ = weights
    size = first.element_size()
    step = (second.data_ptr() - first.data_ptr()) // size
    is_aligned = not (step * size | first.data_ptr()) % _BYTES
    is_regular = (
        step > 0
        and is_aligned
        and all(
            weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and weight.data_ptr() == first.data_ptr() + index * step * size
            for index, weight in enumerate(weights)
        )
    )
    if not is_regular:
        return torch.stack(list(weights))
    return first.detach().as_strided((len(weights), *first.shape), (step, *first.stride()))
