"""Layer norms in plain PyTorch, for what Megatron Core leaves to Apex and Transformer Engine.

Tensor shapes: S sequence length on this rank, B micro-batch size, H hidden size.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class PlainNorm(torch.nn.Module):
    """LayerNorm or RMSNorm with --apply-layernorm-1p and --sequence-parallel.

    Megatron Core's own wrapper of PyTorch's norms has neither. With --apply-layernorm-1p the weight is what is added
    to 1. With --sequence-parallel each tensor-parallel rank sees a part of the sequence: Megatron Core sums the
    gradients of parameters that say so over these ranks. The signature is that of Megatron Core's norms.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.is_centered = config.layernorm_zero_centered_gamma
        self.is_rms = config.normalization == "RMSNorm"
        self.weight = torch.nn.Parameter((torch.zeros if self.is_centered else torch.ones)(hidden_size))
        self.bias = None if self.is_rms else torch.nn.Parameter(torch.zeros(hidden_size))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[S, B, H], or [S, B, heads, head size] for queries and keys."""
        if not self.is_centered:
            return self._normalized(x, self.weight, self.bias)
        # in 16 bits the sum would lose what a small weight says: 1 + 0.001 is 1 in bf16
        bias = None if self.bias is None else self.bias.float()
        return self._normalized(x.float(), self.weight.float() + 1, bias).to(x.dtype)

    def _normalized(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.is_rms:
            return torch.nn.functional.rms_norm(x, weight.shape, weight, self.eps)
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, self.eps)
