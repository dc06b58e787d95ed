"""PyTorch's Adam, fused: Megatron Core takes it where neither Transformer Engine nor Apex is installed, and unfused."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def patch_megatron_core() -> None:
    """Let Megatron Core's optimizers go through their tensors once, not once per operation. Permanent.

    Megatron Core asks PyTorch for that with --optimizer-cpu-offload only. The results differ by rounding. The Adam of
    Transformer Engine and of Apex is fused anyway, and left alone.
    """
    from megatron.core import optimizer

    of_groups = "_get_megatron_optimizer_based_on_param_groups"
    build = getattr(optimizer, of_groups)

    @functools.wraps(build)
    def build_fused(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        take_fused_adam(built.optimizer)
        return built

    setattr(optimizer, of_groups, build_fused)


def take_fused_adam(optimizer: torch.optim.Optimizer | None) -> None:
    """Before the first step."""
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        for group in optimizer.param_groups:
            group["fused"] = True
