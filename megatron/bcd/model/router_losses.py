"""The losses that balance the experts, which Megatron Core's routers collect for reports."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

from megatron.bcd.runtime import device

_NAMES = ("load_balancing_loss", "seq_load_balancing_loss", "z_loss")
"""Megatron Core's names, which are also stock's tags."""


def collect(num_microbatches: int) -> dict[str, float]:
    """Return the losses since `clear_router_losses` by name, divided by their coefficients. Collective over all ranks.

    Each is the mean over microbatches, replicas and layers. Only layers that ran with a graph have collected one.
    """
    tracker = get_moe_layer_wise_logging_tracker()
    by_layer = [tracker[name]["values"] if name in tracker else torch.zeros(1) for name in _NAMES]
    sums = [(losses.sum(), (losses != 0).sum()) for losses in by_layer]
    totals = torch.tensor(sums, dtype=torch.float32, device=device.current())
    torch.distributed.all_reduce(totals)
    # a balancing loss is the sum over the ranks that share a sequence, a z-loss the mean
    parts = parallel_state.get_tensor_and_context_parallel_world_size()
    return {
        name: total * (1 if name == "z_loss" else parts) / count / num_microbatches
        for name, (total, count) in zip(_NAMES, totals.tolist(), strict=True)
        if count
    }
