"""The forward step of one microbatch, its loss, and the sum over a global batch, for Megatron Core's schedules.

Tensor shapes: B micro-batch size, S sequence length, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

from megatron.bcd.runtime import device, replicas

Batch = dict[str, torch.Tensor]


def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    """Run one microbatch through this stage.

    If the batch holds `prefix_output` [S, B, H], the stage starts at its first active layer.

    Returns:
        The stage's output (token losses [B, S] on the last stage), and the function that reduces it to the loss.
    """
    batch = next(batches)
    from_prefix: dict[str, Any] = {}
    if "prefix_output" in batch:
        from_prefix = {"decoder_input": batch["prefix_output"], "extra_block_kwargs": {"behind_prefix": True}}
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        **from_prefix,
    )
    return output, partial(_loss, batch.get("loss_mask"))


def _loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum and number of the unmasked token losses [B, S]; the schedule divides the sum by the number."""
    loss = torch.sum(losses.float().view(-1) * loss_mask.view(-1))
    num_tokens = loss_mask.sum().to(torch.int)
    # the schedule divides `loss` in place, so the reported value is a copy
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach().clone(), num_tokens.float()])}


def reduce_losses(per_microbatch: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Sums of the losses and of the tokens over microbatches and replicas, float32 [2], equal on every
    stage. A collective."""
    total = torch.zeros(2, device=device.current())
    if parallel_state.is_pipeline_last_stage():
        total += torch.stack([losses["lm loss"] for losses in per_microbatch]).sum(dim=0)
        if replicas.size() > 1:
            torch.distributed.all_reduce(total, group=replicas.group())
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        torch.distributed.broadcast(
            total,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return total
