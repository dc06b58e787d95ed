"""Connect iterations in breadth-first order with the optimizer and the layers in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.bcd.model.loss import sum_losses
from megatron.bcd.optim.active_block import ActiveBlock


@dataclass(frozen=True, kw_only=True)
class StepLoss:
    """The loss of a step, equal on every rank that knows it."""

    loss: float
    """Mean per token."""
    requests: tuple[int, ...]
    """Requests of any rank to stop, see `StopRequests.on_this_rank`."""
    is_stepped: bool
    """Whether the step may update anything."""
    gradient_scale: float
    """Factor of gradients that were averaged over the ranks although the loss is a sum of tokens."""


class PieceUpdates:
    """The chunks of a `BreadthFirstIteration`: loads their weights, and updates them as soon as they have run.

    Args:
        reduce_loss: reduces what the loss function reported, and the requests to stop, over all ranks.
        judge_loss: returns the step's loss, without requests, given the sum of the losses and the number of tokens.
    """

    def __init__(
        self,
        active: ActiveBlock,
        *,
        reduce_loss: Callable[[list[Any]], StepLoss],
        judge_loss: Callable[[float, float], StepLoss],
    ) -> None:
        self._active, self._reduce_loss, self._judge_loss = active, reduce_loss, judge_loss
        self.loss: StepLoss | None = None
        """The loss of the present training step, once it is known; with several stages without requests."""

    def enter(self, chunk: int, *, is_backward: bool) -> None:
        """Load the chunk's weights and, before a backward pass, its low bits and gradient buffers."""
        if is_backward:
            self._active.open_piece(chunk)
        else:
            self._active.load_piece(chunk)

    def prefetch(self, chunk: int, *, is_backward: bool) -> None:
        """Start to load the weights of the chunk that comes next."""
        self._active.prefetch_piece(chunk, is_backward=is_backward)

    def reduce_loss(self, reported: list[Any]) -> torch.Tensor | None:
        """Reduce the loss of the step over the ranks of the last stage. A collective."""
        if self._active.partition.num_stages > 1:
            return sum_losses(reported)
        self.loss = self._reduce_loss(reported)
        return None

    def take_loss(self, loss: torch.Tensor) -> None:
        """Take the loss of several stages, before the first update. The CPU waits for it."""
        self.loss = self._judge_loss(*loss.tolist())

    def update(self, chunk: int) -> None:
        """Step the chunk, unless the loss is not finite. A collective over the ranks of the stage."""
        assert self.loss is not None, "the loss comes before the first update"
        if self.loss.is_stepped:
            self._active.update_piece(chunk, gradient_scale=self.loss.gradient_scale)
        else:
            self._active.close_piece(chunk)

    def update_clipped(self, chunks: Sequence[int]) -> None:
        """Step the chunks whose gradients wait for the norm, unless the loss is not finite. A collective."""
        assert self.loss is not None, "the loss comes before the first update"
        if self.loss.is_stepped:
            self._active.update_clipped(chunks)

    def finish(self) -> None:
        """Order later work behind the copies to host memory."""
        self._active.finish_pieces()
