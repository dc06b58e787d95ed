"""State that Transformer Engine's Adam holds itself (--use-precision-aware-optimizer).

It steps bf16 weights, without fp32 copies of them. Of a main parameter it holds 16 bits, its remainder: the bits of the
main parameter minus those of the weight in the upper half, where the weight is the main parameter rounded with halves
away from zero (`bf16_split`). Its moments have a precision of their own, those in fp16 with a scale for each tensor.
Only what it documents, or Megatron Core calls, is used.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.bcd.config import RunConfig
from megatron.bcd.model.transformer_config import DTYPES
from megatron.bcd.optim import bf16_split

_REMAINDER = "master_param"
_STORED = (torch.float32, torch.bfloat16)
"""Moments that have no scale."""


def config_fields(config: RunConfig) -> dict[str, Any]:
    """Fields of Megatron Core's OptimizerConfig."""
    exp_avg, exp_avg_sq = (DTYPES[dtype] for dtype in config.moment_dtypes)
    main_grads = DTYPES["fp32" if config.ddp.grad_reduce_in_fp32 else "bf16"]
    return {
        "use_precision_aware_optimizer": True,
        "store_param_remainders": True,
        "main_grads_dtype": main_grads,
        "exp_avg_dtype": exp_avg,
        "exp_avg_sq_dtype": exp_avg_sq,
    }


def is_held(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer holds remainders of main parameters."""
    return bool(getattr(optimizer, "store_param_remainders", False))


def main_param(optimizer: Any, weight: torch.Tensor) -> torch.Tensor:
    """The main parameter of a shard of a weight: a new tensor, fp32, flat."""
    flat = weight.detach().reshape(-1)
    state = optimizer.state.get(weight, {})
    return bf16_split.join(flat, state[_REMAINDER].view(-1)) if state else flat.float()


@torch.no_grad()
def set_main_param(optimizer: Any, weight: torch.Tensor, value: torch.Tensor) -> None:
    """Set the main parameter to a flat fp32 tensor, on any device, whose rounding is the weight.

    A value halfway between two weights, of a run that rounded it to the lower, even one, becomes 1 fp32 step less.
    """
    bits = value.to(weight.device).contiguous().view(torch.int32)
    upper = weight.detach().reshape(-1).view(torch.int16).to(torch.int32) << 16
    remainder = (bits - upper).clamp_(-0x8000, 0x7FFF).to(torch.int16)
    _initialize(optimizer, weight)
    optimizer.set_scaled_state(weight, _REMAINDER, remainder.view_as(weight))


def moments(optimizer: Any, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The moments by name; in fp32 what has a scale, else as they are stored."""
    state = optimizer.state.get(weight, {})
    return {
        name: stored if stored.dtype in _STORED else optimizer.get_unscaled_state(weight, name)
        for name, stored in state.items()
        if name != _REMAINDER
    }


def set_moment(optimizer: Any, weight: torch.Tensor, name: str, value: torch.Tensor) -> None:
    """Set a moment to a copy of a flat tensor, on any device."""
    _initialize(optimizer, weight)
    optimizer.set_scaled_state(weight, name, value.to(weight.device, torch.float32, copy=True).view_as(weight))


def _initialize(optimizer: Any, weight: torch.Tensor) -> None:
    """As the optimizer does in its first step, which leaves alone what has any state."""
    if not optimizer.state.get(weight):
        optimizer.initialize_state(weight, True)
