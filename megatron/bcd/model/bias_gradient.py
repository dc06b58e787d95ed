"""The gradient of a linear layer's bias whose weight is frozen (--bcd-always-active biases).

Megatron Core's linear layer with a frozen weight returns no gradient for its bias, and Transformer Engine computes it
with the weight's. Queries, keys and values have the only such bias: the other linear layers return theirs unused, for
the fused kernels behind them.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel


def add_bias_gradients(model: GPTModel) -> None:
    """Let a phase train the biases of frozen layers."""
    for layer in model.decoder.layers:
        linear = layer.self_attention.linear_qkv
        if linear.bias is not None:
            linear.register_forward_hook(_with_bias_gradient)


def _with_bias_gradient(linear: Any, inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    """Adds a zero with the bias's gradient."""
    if not linear.bias.requires_grad or linear.weight.requires_grad or not torch.is_grad_enabled():
        return output
    return output[0] + (linear.bias - linear.bias.detach()), output[1]
