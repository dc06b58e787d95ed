"""Compute the loss of one microbatch, and sum it over a global batch, for Megatron Core's schedules.

Tensor shapes: B micro-batch size, S sequence length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import parallel_state

from megatron.bcd.runtime import device, replicas

_INT32_MIN = -(2**31)


def masked_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum and the number of the unmasked token losses [B, S]. The schedule divides the sum by the number."""
    loss = torch.sum(losses.float().view(-1) * loss_mask.view(-1))
    num_tokens = loss_mask.sum().to(torch.int)
    # the schedule divides `loss` in place, so return a copy for the report
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach().clone(), num_tokens.float()])}


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
