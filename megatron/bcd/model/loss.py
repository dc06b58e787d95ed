"""The loss of one microbatch and the sum over a global batch, for Megatron Core's schedules.

Tensor shapes: B micro-batch size, S sequence length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import parallel_state

from megatron.bcd.runtime import device, replicas

_LEAST = -(2**31)


def masked_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum and number of the unmasked token losses [B, S]; the schedule divides the sum by the number."""
    loss = torch.sum(losses.float().view(-1) * loss_mask.view(-1))
    num_tokens = loss_mask.sum().to(torch.int)
    # the schedule divides `loss` in place, so the reported value is a copy
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach().clone(), num_tokens.float()])}


def reduce_losses(
    per_microbatch: list[dict[str, torch.Tensor]], integers: Sequence[int] = ()
) -> tuple[float, float, list[int]]:
    """Sums of the losses and of the tokens over microbatches and replicas, and of each integer (not negative) the
    maximum over all ranks; equal on every rank.

    A collective over all ranks. One reduction and one wait of the CPU for the device: the bits of the sums, which all
    ranks of the last stage have alike, are the maximum of themselves and the least integer.
    """
    together = torch.full((2 + len(integers),), _LEAST, dtype=torch.int32, device=device.current())
    if parallel_state.is_pipeline_last_stage():
        total = torch.stack([losses["lm loss"] for losses in per_microbatch]).sum(dim=0)
        if replicas.size() > 1:
            torch.distributed.all_reduce(total, group=replicas.group())
        together[:2] = total.view(torch.int32)
    for place, integer in enumerate(integers, 2):
        together[place : place + 1].fill_(integer)  # a tensor of integers would be copied to the device, and waited for
    torch.distributed.all_reduce(together, op=torch.distributed.ReduceOp.MAX)
    on_host = together.cpu()
    loss_sum, num_tokens = on_host[:2].view(torch.float32).tolist()
    return loss_sum, num_tokens, on_host[2:].tolist()
