"""Execute an iteration in breadth-first order: all microbatches pass through a chunk before the next one starts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron.bcd.model.builder import get_fp8_weights, get_host_layers, select_chunk, unwrap_model
from megatron.bcd.model.loss import sum_losses
from megatron.bcd.optim.step import Step
from megatron.bcd.pipeline.build import host_passes
from megatron.bcd.pipeline.execute import Iteration
from megatron.bcd.pipeline.plan import Action, Kind
from megatron.bcd.pipeline.saved_tensors import Place, SavedTensors
from megatron.bcd.runtime import rng

_Visit = tuple[int, bool]
"""A chunk, and whether it runs backward."""


class BreadthFirstIteration(Iteration):
    """One iteration of one stage. If it is the only stage, chunks are layers of one model (`model.chunk_layers`), and
    their outputs and gradients are no messages.

    It loads the weights of a chunk in host memory before its passes, and lets the training step update it behind them.

    Args:
        step: the training step; None in an evaluation.
        layers: the layers of each chunk, by their numbers on this stage.
        saved: what waits in host memory for backward passes.
    """

    def __init__(
        self, *args: Any, step: Step | None, layers: Sequence[range], saved: SavedTensors, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._step, self._layers, self._saved = step, layers, saved
        self._on_host = set(host_passes(self._shape, self._stage))
        backwards = [(action.chunk, action.microbatch) for action in self._actions if action.kind.is_backward]
        self._next_backward = dict(itertools.pairwise(backwards))
        self._weights = get_host_layers(self._model)
        self._has_messages = self._shape.num_stages > 1
        self._microbatches = list(itertools.islice(self._batches[0], self._shape.num_microbatches))
        self._waiting: dict[Place, Any] = {}
        """The inputs of passes that are repeated, as `SavedTensors.pack` returns them."""
        self._random_states: dict[Place, rng.States] = {}
        has_dropout = self._config.hidden_dropout > 0 or self._config.attention_dropout > 0
        self._repeats_random_numbers = has_dropout and self._shape.is_training
        self._loss: torch.Tensor | None = None
        """The loss, on its way from the last stage to the first one."""
        self._is_loss_taken = False
        self._visits = [*dict.fromkeys(_visit(action) for action in self._actions if action.kind.computes)]
        """The coming visits."""
        self._visit: _Visit | None = None
        self._do |= {
            Kind.FORWARD: self._forward_once,
            Kind.FORWARD_ONLY: self._forward_once,
            Kind.FORWARD_AHEAD: self._forward_ahead,
            Kind.RECOMPUTE: self._recompute,
            Kind.LOSS: self._reduce_loss,
            Kind.SEND_LOSS: lambda action, place: self._messages.send(self._arrived_loss(), is_backward=True),
            Kind.RECEIVE_LOSS: self._receive_loss,
            Kind.UPDATE: self._update,
        }

    def run(self) -> list[Any]:
        """Run all actions. Return the results of the loss function by microbatch on the last stage, elsewhere []."""
        reported = super().run()
        if self._loss is not None:
            self._messages.wait_for(self._loss)  # a stage without updates has not
        select_chunk(self._model, None)
        if self._shape.clips_by_chunk:  # the norm needs all gradients
            updated = sorted(action.chunk for action in self._actions if action.kind is Kind.UPDATE)
            self._training_step.update_clipped(updated)
        self._weights.finish_step()
        return reported

    @property
    def _training_step(self) -> Step:
        assert self._step is not None, "an evaluation runs no backward passes"
        return self._step

    def _enter(self, action: Action) -> None:
        """Prepare a pass, unless the pass before was of the same visit, and prefetch for the next visit."""
        if _visit(action) == self._visit:
            return
        self._visit, *self._visits = self._visits
        chunk, is_backward = self._visit
        get_fp8_weights(self._model).keep_copies()
        self._weights.load(self._layers[chunk], with_state=is_backward and not self._shape.clips_by_chunk)
        if is_backward:
            self._saved.release()
            self._training_step.open(chunk)
        if self._visits:
            chunk, is_backward = self._visits[0]
            self._weights.prefetch(self._layers[chunk], with_state=is_backward and not self._shape.clips_by_chunk)

    def _forward_once(self, action: Action, place: Place) -> None:
        """Run the first forward pass, whose output is the input of the next virtual stage."""
        self._enter(action)
        virtual, received = self._virtual(action), self._inputs.pop(place, None)
        if received is not None:
            self._messages_from(virtual - 1).wait_for(received)
        runs_again = action.kind is Kind.FORWARD_ONLY and not self._shape.is_forward_only(virtual)
        if runs_again and received is not None:
            self._waiting[place] = received.detach()
            if self._saved.has_inputs:
                self._waiting[place] = self._saved.pack(place, (), self._waiting[place])
                self._saved.save(place)
        if runs_again and self._repeats_random_numbers:
            self._random_states[place] = rng.states()
        self._set_input(place, received, needs_gradient=action.kind.keeps_graph)
        self._forward(action, place)
        if virtual < self._shape.last:
            # Megatron Core records bias and dropout of a layer even without a graph
            self._outputs[place] = self._outputs[place].detach()
            if not self._has_messages:
                self._inputs[place[0] + 1, place[1]] = self._outputs.pop(place)

    def _forward_ahead(self, action: Action, place: Place) -> None:
        """Run a forward pass whose graph waits for the backward pass, while other chunks compute."""
        self._enter(action)
        received, is_on_host = self._inputs.pop(place, None), place in self._on_host
        if received is not None:
            self._messages_from(self._virtual(action) - 1).wait_for(received)
        self._set_input(place, received, needs_gradient=True)
        pack = functools.partial(self._saved.pack, place, self._storages_of_weights) if is_on_host else None
        with self._weights.saved_by_graphs(pack):
            self._forward(action, place)
        if is_on_host:
            self._saved.save(place)
            if (leaf := self._inputs.get(place)) is not None:  # its values are saved; one element gives it its shape
                leaf.data = leaf.new_empty(1).expand(leaf.shape)
        if not self._has_messages:
            output = self._outputs[place]
            self._inputs[place[0] + 1, place[1]] = output.detach()
            self._free(output)

    @functools.cached_property
    def _storages_of_weights(self) -> set[int]:
        """Addresses of what graphs save but do not own."""
        model = unwrap_model(self._model)
        tensors = itertools.chain(model.parameters(), model.buffers(), self._weights.device_tensors())
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def _recompute(self, action: Action, place: Place) -> None:
        """Repeat a forward pass with a graph."""
        self._enter(action)
        received = self._waiting.pop(place, None)
        if callable(received):
            self._saved.load(place)
            received = received()
            self._saved.drop(place)
        self._set_input(place, received, needs_gradient=True)
        with rng.repeating(self._random_states.pop(place, None)):
            self._forward(action, place)
        self._free(self._outputs[place])

    def _set_input(self, place: Place, tensor: torch.Tensor | None, *, needs_gradient: bool) -> None:
        """Set the input of a pass. It stays until the backward pass only if it requires a gradient."""
        if tensor is not None:
            virtual = self._shape.virtual_stage(self._stage, place[0])
            needs_gradient = needs_gradient and self._shape.needs_input_gradient(virtual)
            self._inputs[place] = tensor.detach().requires_grad_(needs_gradient)

    def _next_batch(self, action: Action) -> Iterator[Any]:
        return iter([self._microbatches[action.microbatch]])

    def _backward(self, action: Action, place: Place) -> None:
        self._enter(action)
        if place in self._on_host:
            self._saved.load(place)
        if place in self._next_backward:  # what it reads arrives during this backward pass
            self._saved.prefetch(self._next_backward[place])
        super()._backward(action, place)
        if place in self._on_host:
            self._saved.drop(place)
        if not self._has_messages and place in self._input_gradients:
            self._output_gradients[place[0] - 1, place[1]] = self._input_gradients.pop(place)

    def _reduce_loss(self, action: Action, place: Place) -> None:
        if self._has_messages:
            self._loss = sum_losses(self._reported)
        else:
            self._training_step.reduce_loss(self._reported)

    def _receive_loss(self, action: Action, place: Place) -> None:
        self._loss = self._messages.receive((2,), is_backward=True, dtype=torch.float32)

    def _arrived_loss(self) -> torch.Tensor:
        assert self._loss is not None, "LOSS or RECEIVE_LOSS comes first"
        self._messages.wait_for(self._loss)
        return self._loss

    def _update(self, action: Action, place: Place) -> None:
        if self._has_messages and not self._is_loss_taken:
            self._training_step.set_loss(*self._arrived_loss().tolist())
            self._is_loss_taken = True
        self._training_step.update(action.chunk)


def _visit(action: Action) -> _Visit:
    return action.chunk, action.kind not in (Kind.FORWARD_ONLY, Kind.FORWARD_AHEAD)
