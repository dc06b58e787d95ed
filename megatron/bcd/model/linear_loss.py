"""The loss without the logits of a microbatch (--cross-entropy-fusion-impl linear): head and cross entropy in one
function, which holds the logits of a few hundred tokens, or of a part of the vocabulary, at a time.

torch.nn.functional.linear_cross_entropy returns the losses in the weights' dtype and knows no split vocabulary.

Tensor shapes: T tokens, H hidden size, V this rank's part of the vocabulary, B micro-batch size, S sequence length.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron.bcd.config import LOSS_CHUNK, LOSS_PARTS


def _of_target(labels: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Where the targets are in `size` columns from `first`, and 1 where they are in them, else 0."""
    columns = labels - first
    return columns.clamp(0, size - 1), (columns >= 0).logical_and_(columns < size).float()


def _gradient_of_logits(exponentials: Tensor, total: Tensor, labels: Tensor, first: int) -> Tensor:
    """Softmax minus the targets, in place; `exponentials` [rows, columns], fp32, of columns from `first`."""
    columns, is_inside = _of_target(labels, first, exponentials.size(1))
    exponentials.div_(total[:, None])
    exponentials[torch.arange(len(labels), device=labels.device), columns] -= is_inside
    return exponentials


def _of_tokens(hidden: Tensor, weight: Tensor, labels: Tensor, group: Any, gradient: Tensor | None) -> Tensor:
    """Losses, largest logits and sums of exponentials [3, rows] of a few tokens; writes their ``gradient``.

    A function of its own: a loop would hold the logits of the chunk before beside those of the next.
    """
    first = group.rank() * len(weight)
    logits = (hidden @ weight.t()).float()
    largest = logits.amax(dim=1)
    if group.size() > 1:
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
    logits.sub_(largest[:, None])
    columns, is_inside = _of_target(labels, first, len(weight))
    target = logits.gather(1, columns[:, None])[:, 0].mul_(is_inside)
    exponentials = logits.exp_()
    sums = torch.stack([target, exponentials.sum(dim=1)])
    if group.size() > 1:
        torch.distributed.all_reduce(sums, group=group)
    target, total = sums
    if gradient is not None:
        of_logits = _gradient_of_logits(exponentials, total, labels, first)
        torch.mm(of_logits.to(hidden.dtype), weight, out=gradient)
    return torch.stack([total.log() - target, largest, total])


def _of_columns(
    hidden: Tensor, weight: Tensor, labels: Tensor, first: int, of_tokens: Tensor, factors: Tensor, gradient: Tensor
) -> None:
    """Writes the ``gradient`` of a part of the vocabulary's weights, which starts at ``first``."""
    _, largest, total = of_tokens
    exponentials = (hidden @ weight.t()).float().sub_(largest[:, None]).exp_()
    of_logits = _gradient_of_logits(exponentials, total, labels, first).mul_(factors[:, None])
    torch.mm(of_logits.to(hidden.dtype).t(), hidden, out=gradient)


class _LinearCrossEntropy(torch.autograd.Function):
    """Losses [T], fp32, of ``hidden`` [T, H], ``weight`` [V, H] and ``labels`` [T].

    The forward pass goes over chunks of tokens and computes the gradient of ``hidden`` too, for factor 1 of each token;
    the backward pass multiplies its rows. The gradient of an active ``weight`` is a sum over tokens, which needs their
    factors: the backward pass computes the logits again, in chunks of the vocabulary.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, group: Any, with_graph: bool) -> Tensor:
        of_tokens = hidden.new_empty(3, len(hidden), dtype=torch.float32)
        gradient = torch.empty_like(hidden) if with_graph and ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), LOSS_CHUNK):
            rows = slice(start, start + LOSS_CHUNK)
            of_rows = None if gradient is None else gradient[rows]
            of_tokens[:, rows] = _of_tokens(hidden[rows], weight, labels[rows], group, of_rows)
        ctx.first = group.rank() * len(weight)
        ctx.save_for_backward(
            gradient, *((hidden, weight, labels, of_tokens) if ctx.needs_input_grad[1] else (None,) * 4)
        )
        return of_tokens[0].clone()

    @staticmethod
    def backward(ctx: Any, factors: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradient, hidden, weight, labels, of_tokens = ctx.saved_tensors
        of_hidden = None if gradient is None else gradient.mul_(factors[:, None])
        if weight is None:
            return of_hidden, None, None, None, None
        of_weight = torch.empty_like(weight)
        chunk = LOSS_CHUNK // LOSS_PARTS
        size = max(1, len(weight) * chunk // max(len(hidden), chunk))
        for start in range(0, len(weight), size):
            part = slice(start, start + size)
            _of_columns(hidden, weight[part], labels, ctx.first + start, of_tokens, factors, of_weight[part])
        return of_hidden, of_weight, None, None, None


class _DeferredHead(ColumnParallelLinear):
    """Megatron Core's head, which with labels hands on its input in place of logits: the loss multiplies it."""

    is_deferred = False

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """[S, B, H] to [S, B, H] or [S, B, V]."""
        return (input_, None) if self.is_deferred else super().forward(input_, *args, **kwargs)


class LinearLossModel(GPTModel):
    """GPTModel whose loss has no logits; without labels it returns them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:  # GPTModel takes no class for its head
            self.output_layer.__class__ = _DeferredHead

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Tensor:
        """As GPTModel's: losses [B, S], fp32."""
        if self.post_process:
            self.output_layer.is_deferred = labels is not None
        return super().forward(*args, labels=labels, **kwargs)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Losses [B, S] of labels [B, S]; ``logits`` is the head's input [S, B, H]."""
        is_tied, group = self.share_embeddings_and_output_weights, self.pg_collection.tp
        weight = self.shared_embedding_or_output_weight() if is_tied else self.output_layer.weight
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(logits, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(logits, group=group)
        targets = labels.transpose(0, 1)
        losses = _LinearCrossEntropy.apply(
            hidden.flatten(0, 1), weight, targets.flatten(), group, torch.is_grad_enabled()
        )
        return losses.view(targets.shape).transpose(0, 1).contiguous()
