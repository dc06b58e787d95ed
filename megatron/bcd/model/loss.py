"""Compute the loss of one microbatch, and sum it over a global batch, for Megatron Core's schedules.

Also the losses that balance the experts, which Megatron Core's routers collect for reports.

Tensor shapes: B micro-batch size, S sequence length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

from megatron.bcd.runtime import device, replicas

_INT32_MIN = -(2**31)
_ROUTER_LOSSES = ("load_balancing_loss", "seq_load_balancing_loss", "z_loss")
"""Megatron Core's names, which are also stock's tags."""


def masked_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum and the number of the unmasked token losses [B, S]. The schedule divides the sum by the number."""
    loss = torch.sum(losses.float().view(-1) * loss_mask.view(-1))
    num_tokens = loss_mask.sum()
    # the schedule divides `loss` in place, and the report has a copy
    return loss, num_tokens.to(torch.int), {"lm loss": torch.stack([loss.detach(), num_tokens])}


def sum_losses(per_microbatch: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Collective over the ranks of the last stage. Return the sum of the losses and of the tokens of a global batch."""
    total = torch.stack([losses["lm loss"] for losses in per_microbatch]).sum(dim=0)
    if replicas.size() > 1:
        torch.distributed.all_reduce(total, group=replicas.group())
    return total


def reduce_losses(
    per_microbatch: list[dict[str, torch.Tensor]], integers: Sequence[int] = ()
) -> tuple[float, float, list[int]]:
    """Collective over all ranks. Reduce the losses of a global batch and some integers to all ranks.

    Returns:
        The sum of the losses and of the tokens over microbatches and replicas, and the maximum of each (non-negative)
        integer over all ranks.

    Everything takes one all-reduce over all ranks and one wait for the device. Only the last stage knows the loss sums.
    It sends their fp32 bits as int32, and all other ranks contribute INT32_MIN. The maximum is then the last stage's
    bits, unchanged: INT32_MIN is no larger than any int32, and all ranks of the last stage send the same bits.
    """
    message = torch.full((2 + len(integers),), _INT32_MIN, dtype=torch.int32, device=device.current())
    if parallel_state.is_pipeline_last_stage():
        message[:2] = sum_losses(per_microbatch).view(torch.int32)
    for place, integer in enumerate(integers, 2):
        message[place : place + 1].fill_(integer)  # building a tensor of integers would copy it and wait for the device
    torch.distributed.all_reduce(message, op=torch.distributed.ReduceOp.MAX)
    on_host = message.cpu()
    loss_sum, num_tokens = on_host[:2].view(torch.float32).tolist()
    return loss_sum, num_tokens, on_host[2:].tolist()


def router_losses(num_microbatches: int) -> dict[str, float]:
    """Return the losses since `clear_router_losses` by name, divided by their coefficients. Collective over all ranks.

    Each is the mean over microbatches, replicas and layers. Only layers that ran with a graph have collected one.
    """
    tracker = get_moe_layer_wise_logging_tracker()
    by_layer = [tracker[name]["values"] if name in tracker else torch.zeros(1) for name in _ROUTER_LOSSES]
    sums = [(losses.sum(), (losses != 0).sum()) for losses in by_layer]
    totals = torch.tensor(sums, dtype=torch.float32, device=device.current())
    torch.distributed.all_reduce(totals)
    # a balancing loss is the sum over the ranks that share a sequence, a z-loss the mean
    parts = parallel_state.get_tensor_and_context_parallel_world_size()
    return {
        name: total * (1 if name == "z_loss" else parts) / count / num_microbatches
        for name, (total, count) in zip(_ROUTER_LOSSES, totals.tolist(), strict=True)
        if count
    }
