"""The loss without storing the logits of a microbatch (--cross-entropy-fusion-impl linear).

One function computes head and cross entropy. At a time it stores the logits of a few hundred tokens, or of a part of
the vocabulary. torch.nn.functional.linear_cross_entropy would return losses in the weights' dtype, and it supports no
vocabulary that is split over ranks.

Tensor shapes: T tokens, H hidden size, V this rank's part of the vocabulary, B micro-batch size, S sequence length.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron.bcd.config import LOSS_CHUNK, LOSS_PARTS
from megatron.bcd.model.chunks import ChunkwiseModel


def _target_columns(labels: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the targets' columns relative to `first`, clamped to `size`, and whether they are inside (1.0 or 0.0)."""
    columns = labels - first
    return columns.clamp(0, size - 1), (columns >= 0).logical_and_(columns < size).float()


def _logit_gradient(exponentials: Tensor, total: Tensor, labels: Tensor, first: int) -> Tensor:
    """Return softmax minus targets, in place of `exponentials` [rows, columns], fp32. Columns start at `first`."""
    columns, is_inside = _target_columns(labels, first, exponentials.size(1))
    exponentials.div_(total[:, None])
    exponentials[torch.arange(len(labels), device=labels.device), columns] -= is_inside
    return exponentials


def _token_losses(hidden: Tensor, weight: Tensor, labels: Tensor, group: Any, gradient: Tensor | None) -> Tensor:
    """Return losses, largest logits and sums of exponentials [3, rows] of a few tokens. Write their ``gradient``.

    This is a separate function so that its logits are freed before those of the next chunk are allocated.
    """
    first = group.rank() * len(weight)
    logits = (hidden @ weight.t()).float()
    largest = logits.amax(dim=1)
    if group.size() > 1:
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
    logits.sub_(largest[:, None])
    columns, is_inside = _target_columns(labels, first, len(weight))
    target = logits.gather(1, columns[:, None])[:, 0].mul_(is_inside)
    exponentials = logits.exp_()
    sums = torch.stack([target, exponentials.sum(dim=1)])
    if group.size() > 1:
        torch.distributed.all_reduce(sums, group=group)
    target, total = sums
    if gradient is not None:
        logit_gradient = _logit_gradient(exponentials, total, labels, first)
        torch.mm(logit_gradient.to(hidden.dtype), weight, out=gradient)
    return torch.stack([total.log() - target, largest, total])


def _write_weight_gradient(
    hidden: Tensor, weight: Tensor, labels: Tensor, first: int, statistics: Tensor, factors: Tensor, gradient: Tensor
) -> None:
    """Write the ``gradient`` of a part of the vocabulary's weights. The part starts at ``first``."""
    _, largest, total = statistics
    exponentials = (hidden @ weight.t()).float().sub_(largest[:, None]).exp_()
    logit_gradient = _logit_gradient(exponentials, total, labels, first).mul_(factors[:, None])
    torch.mm(logit_gradient.to(hidden.dtype).t(), hidden, out=gradient)


class _LinearCrossEntropy(torch.autograd.Function):
    """Losses [T], fp32, given ``hidden`` [T, H], ``weight`` [V, H] and ``labels`` [T].

    The forward pass loops over chunks of tokens. It also computes the gradient of ``hidden`` for a factor of 1 per
    token; the backward pass then only scales its rows. The gradient of an active ``weight`` is a sum over tokens
    weighted by these factors. For it, the backward pass recomputes the logits, in chunks of the vocabulary.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, group: Any, with_graph: bool) -> Tensor:
        statistics = hidden.new_empty(3, len(hidden), dtype=torch.float32)
        gradient = torch.empty_like(hidden) if with_graph and ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), LOSS_CHUNK):
            rows = slice(start, start + LOSS_CHUNK)
            row_gradient = None if gradient is None else gradient[rows]
            statistics[:, rows] = _token_losses(hidden[rows], weight, labels[rows], group, row_gradient)
        ctx.first = group.rank() * len(weight)
        ctx.save_for_backward(
            gradient, *((hidden, weight, labels, statistics) if ctx.needs_input_grad[1] else (None,) * 4)
        )
        return statistics[0].clone()

    @staticmethod
    def backward(ctx: Any, factors: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradient, hidden, weight, labels, statistics = ctx.saved_tensors
        hidden_gradient = None if gradient is None else gradient.mul_(factors[:, None])
        if weight is None:
            return hidden_gradient, None, None, None, None
        weight_gradient = torch.empty_like(weight)
        chunk = LOSS_CHUNK // LOSS_PARTS
        size = max(1, len(weight) * chunk // max(len(hidden), chunk))
        for start in range(0, len(weight), size):
            part = slice(start, start + size)
            _write_weight_gradient(
                hidden, weight[part], labels, ctx.first + start, statistics, factors, weight_gradient[part]
            )
        return hidden_gradient, weight_gradient, None, None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, group: Any) -> Tensor:
    """Return the losses of labels [...], fp32, given the head's input [..., H] and its weight [V, H].

    Args:
        group: the ranks that divide the vocabulary.
    """
    losses: Tensor = _LinearCrossEntropy.apply(
        hidden.flatten(0, -2), weight, labels.flatten(), group, torch.is_grad_enabled()
    )
    return losses.view(labels.shape)


class LinearLossModel(ChunkwiseModel):
    """Model whose loss needs no logits. Without labels it returns logits."""

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the losses [B, S], fp32, or without labels the logits."""
        if labels is None or not self.ends_with_head:
            return super().forward(*args, labels=labels, **kwargs)
        self.post_process = False  # then GPTModel returns the head's input [S, B, H]
        try:
            hidden = super().forward(*args, **kwargs)
        finally:
            self.post_process = True
        is_tied, group = self.share_embeddings_and_output_weights, self.pg_collection.tp
        weight = self.shared_embedding_or_output_weight() if is_tied else self.output_layer.weight
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        return linear_cross_entropy(hidden, weight, labels.transpose(0, 1), group).transpose(0, 1).contiguous()
