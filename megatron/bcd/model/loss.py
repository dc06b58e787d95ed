"""One microbatch forward, its loss, and the mean over a global batch, as Megatron Core's schedules want them.

Tensor shapes: B micro-batch size, S sequence length, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

from megatron.bcd.runtime import device

Batch = dict[str, torch.Tensor]


def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    """One microbatch through this stage, for Megatron Core's schedules.

    Where the batch holds `prefix_output` [S, B, H], the stage begins with its first active layer.
    """
    batch = next(batches)
    served: dict[str, Any] = {}
    if "prefix_output" in batch:
        served = {"decoder_input": batch["prefix_output"], "extra_block_kwargs": {"behind_prefix": True}}
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        **served,
    )
    return output, partial(_loss, batch.get("loss_mask"))


def _loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the unmasked token losses [B, S] and their number; the schedule divides one by the other."""
    loss = torch.sum(losses.float().view(-1) * loss_mask.view(-1))
    num_tokens = loss_mask.sum().to(torch.int)
    # the schedule divides `loss` in place: what is reported needs memory of its own
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach().clone(), num_tokens.float()])}


def reduce_losses(per_microbatch: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Sum of losses and of tokens over microbatches and data-parallel ranks, the same on every stage: float32 [2]."""
    total = torch.zeros(2, device=device.current())
    if parallel_state.is_pipeline_last_stage():
        total += torch.stack([losses["lm loss"] for losses in per_microbatch]).sum(dim=0)
        if parallel_state.get_data_parallel_world_size() > 1:
            torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        torch.distributed.broadcast(
            total,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return total
