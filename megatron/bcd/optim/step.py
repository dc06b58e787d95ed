"""One training step: its loss, the norm of its gradient, and its updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from megatron.core.utils import get_model_config

from megatron.bcd.model.builder import get_host_layers
from megatron.bcd.model.loss import reduce_losses
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.runtime import replicas


class Step:
    """A training step, which updates what the phase trains and says what it did.

    The schedule runs the passes. In breadth-first order it also updates the chunks: it calls `open` before the backward
    passes of a chunk and `update` behind them. `reduce_loss` and `finish` follow the passes.

    Args:
        read_requests: returns this rank's requests to stop, which the ranks exchange with the loss.
    """

    def __init__(self, active: ActiveBlock, read_requests: Callable[[], Sequence[int]] = tuple) -> None:
        self.loss = math.nan
        """Mean per token. NaN until it is known."""
        self.requests: tuple[int, ...] = ()
        """Requests of any rank to stop, see `StopRequests.on_this_rank`."""
        self.grad_norm: float | None = None
        """L2 norm of the gradient before clipping, the same on every rank; None if the step is skipped."""
        self.skipped_layers = 0
        """Number of layers that were left as they were, because their gradients were not finite."""
        self._active, self._read_requests = active, read_requests
        self._matrices, self._weights = active.matrices, get_host_layers(active.model)
        self._clips_by_chunk = active.config.clips_by_chunk
        self._skips_non_finite = active.config.training.check_for_nan_in_loss_and_grad
        self._is_skipped = False
        self._gradient_scale = 1.0
        """Factor of gradients that were averaged over the ranks although the loss is a sum of tokens. Megatron Core
        divides those in DDP's buffers by the number of tokens."""

    def reduce_loss(self, reported: list[dict[str, torch.Tensor]]) -> None:
        """Reduce the loss and the requests to stop, unless the schedule has. A collective over all ranks.

        `reported` is what the loss function reported for each microbatch.
        """
        if not self.requests:
            loss_sum, num_tokens, requests = reduce_losses(reported, self._read_requests())
            self.set_loss(loss_sum, num_tokens)
            self.requests = tuple(requests)

    def set_loss(self, loss_sum: float, num_tokens: float) -> None:
        """Set the loss, which decides whether the step may update anything."""
        self.loss = loss_sum / max(num_tokens, 1.0)
        # with fp16 the optimizer must see the overflow, to lower the loss scale
        steps_always = self._active.config.precision == "fp16" or not self._skips_non_finite
        self._is_skipped = not (math.isfinite(self.loss) or steps_always)
        if num_tokens and get_model_config(self._active.model).calculate_per_token_loss:
            self._gradient_scale = replicas.size() / num_tokens

    @torch.no_grad()
    def finish(self) -> None:
        """Clip the gradient, and step all that has not been stepped by chunk. A collective.

        The step is skipped if the loss or a gradient is not finite, in fp16 by Megatron Core's rule.
        """
        if not self._clips_by_chunk:
            self._compute_norm()
        if self.grad_norm is not None:
            for optimizer in self._active.optimizers:
                optimizer.step(norm=self.grad_norm, gradient_scale=self._gradient_scale)

    def _compute_norm(self) -> None:
        """Reduce the gradients and compute their norm, unless the step is skipped. A collective."""
        if self._is_skipped:
            return
        self._matrices.reduce_gradients(gradient_scale=self._gradient_scale)
        norm = self._active.core.gradient_norm()
        if norm is None:
            return
        norm, is_finite, self.skipped_layers = self._matrices.add_norm(norm)
        if not self._skips_non_finite or (math.isfinite(norm) and is_finite):
            self.grad_norm = norm

    # ---------------------------------------------------------------------------------------------------------- chunks

    def open(self, chunk: int) -> None:
        """Allocate the gradients of a chunk whose weights are loaded, with its state unless updates wait for a norm."""
        self._matrices.open_chunk(chunk, (lambda _: {}) if self._clips_by_chunk else self._weights.state)

    def update(self, chunk: int) -> None:
        """Step a chunk, or keep its gradients for `update_clipped`, and free them. A collective over the stage.

        The loss must be known.
        """
        if self._is_skipped:
            self._matrices.close_chunk(chunk)
            return
        self._matrices.step_chunk(
            chunk,
            num_layers=len(self._active.chunks[chunk]),
            gradient_scale=self._gradient_scale,
            skip_non_finite=self._skips_non_finite,
            keep=self._weights.keep_gradient if self._clips_by_chunk else None,
        )
        if not self._clips_by_chunk:
            self._weights.write_back(self._active.chunks[chunk])

    def update_clipped(self, chunks: Sequence[int]) -> None:
        """Compute the norm of all gradients, and step the chunks whose gradients wait for it. A collective."""
        self._compute_norm()
        if self.grad_norm is None:
            return
        layers = [self._active.chunks[chunk] for chunk in chunks]
        for chunk, loaded, coming in zip(chunks, layers, [*layers[1:], ()], strict=True):
            self._weights.load(loaded, with_state=True)
            self._weights.prefetch(coming, with_state=True)
            self._matrices.open_chunk(chunk, self._weights.state, is_kept=True)
            self._matrices.step_kept_chunk(chunk, norm=self.grad_norm)
            self._weights.write_back(loaded)
