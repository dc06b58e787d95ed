"""Connect iterations in breadth-first order with the optimizer and the layers in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.bcd.optim.active_block import ActiveBlock


@dataclass(frozen=True, kw_only=True)
class StepLoss:
    """The loss of a step, equal on every rank."""

    loss: float
    """Mean per token."""
    requests: list[int]
    """Requests of any rank to stop, see `StopRequests.on_this_rank`."""
    is_stepped: bool
    """Whether the step may update anything."""
    gradient_scale: float
    """Factor of gradients that were averaged over the ranks although the loss is a sum of tokens."""


class PieceUpdates:
    """The chunks of a `BreadthFirstIteration`: loads their weights, and updates them as soon as they have run."""

    def __init__(self, active: ActiveBlock, reduce_loss: Callable[[list[Any]], StepLoss]) -> None:
        self._active, self._reduce_loss = active, reduce_loss
        self.loss: StepLoss | None = None
        """The loss of the present training step, once it is known."""

    def enter(self, chunk: int, *, is_backward: bool) -> None:
        """Load the chunk's weights and, before a backward pass, its low bits and gradient buffers."""
        if is_backward:
            self._active.open_piece(chunk)
        else:
            self._active.load_piece(chunk)

    def prefetch(self, chunk: int, *, is_backward: bool) -> None:
        """Start to load the weights of the chunk that comes next."""
        self._active.prefetch_piece(chunk, is_backward=is_backward)

    def reduce_loss(self, reported: list[Any]) -> None:
        """Reduce the loss of the step over all ranks. A collective."""
        self.loss = self._reduce_loss(reported)

    def update(self, chunk: int) -> None:
        """Step the chunk, unless the loss is not finite. A collective."""
        assert self.loss is not None, "the loss comes before the first update"
        if self.loss.is_stepped:
            self._active.update_piece(chunk, gradient_scale=self.loss.gradient_scale)
        else:
            self._active.close_piece(chunk)

    def finish(self) -> None:
        """Order later work behind the copies to host memory."""
        self._active.finish_pieces()
