"""Execute an iteration in breadth-first order: all microbatches pass through a chunk before the next one starts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from megatron.core.pipeline_parallel.schedules import backward_step
from megatron.core.utils import get_model_type

from megatron.bcd.model.builder import select_chunk
from megatron.bcd.pipeline.execute import Iteration
from megatron.bcd.pipeline.plan import Action, Kind
from megatron.bcd.pipeline.saved_inputs import Place, SavedInputs
from megatron.bcd.runtime import rng


class Chunks(Protocol):
    """The optimizer and the layers in host memory, as an iteration calls them."""

    def enter(self, chunk: int, *, is_backward: bool) -> None:
        """Prepare the coming passes of a chunk: its weights and, if they run backward, its gradients."""

    def prefetch(self, chunk: int, *, is_backward: bool) -> None:
        """Start to load the weights of the chunk that comes next."""

    def reduce_loss(self, reported: list[Any]) -> None:
        """Reduce what the loss function reported. A collective. It decides whether `update` steps."""

    def update(self, chunk: int) -> None:
        """Step the chunk's matrices that need no optimizer state, and free their gradients. A collective."""

    def finish(self) -> None:
        """Finish an iteration: order later work behind the copies to host memory."""


class BreadthFirstIteration(Iteration):
    """One iteration of the only stage. Chunks are pieces of the model (`model.pieces`)."""

    def __init__(self, *args: Any, chunks: Chunks, saved_inputs: SavedInputs, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._chunks, self._saved_inputs = chunks, saved_inputs
        self._microbatches = list(itertools.islice(self._batches[0], self._shape.num_microbatches))
        self._next_recomputed: dict[Action, Place] = {}
        """The next pass that reads a saved input, by backward pass."""
        coming: Action | None = None
        for action in reversed(self._actions):
            if action.kind is Kind.RECOMPUTE:
                coming = action
            elif action.kind.is_backward and coming is not None and coming.chunk > 0:
                self._next_recomputed[action] = coming.chunk, coming.microbatch
                coming = None
        self._random_states: dict[Place, rng.States] = {}
        has_dropout = self._config.hidden_dropout > 0 or self._config.attention_dropout > 0
        self._repeats_random_numbers = has_dropout and self._shape.is_training

    def run(self) -> list[Any]:
        """Run all actions. Return the results of the loss function by microbatch."""
        self._defer_gradient_reduction()
        visits = [list(actions) for _, actions in itertools.groupby(self._actions, key=_visit)]
        for actions, coming in zip(visits, [*visits[1:], []], strict=True):
            chunk, is_backward = _visit(actions[0])
            self._chunks.enter(chunk, is_backward=is_backward)
            if coming:
                chunk, is_backward = _visit(coming[0])
                self._chunks.prefetch(chunk, is_backward=is_backward)
            for action in actions:
                self._run(action)
        select_chunk(self._model, None)
        if self._shape.is_training:
            self._finish_gradients()
        self._chunks.finish()
        return self._reported

    def _run(self, action: Action) -> None:
        place = (action.chunk, action.microbatch)
        if action.kind is Kind.LOSS:
            self._chunks.reduce_loss(self._reported)
        elif action.kind is Kind.UPDATE:
            self._chunks.update(action.chunk)
        elif action.kind.is_backward:
            if action in self._next_recomputed:  # its input arrives during this backward pass
                self._saved_inputs.prefetch(self._next_recomputed[action])
            self._backward(action, place)
        elif action.kind is Kind.RECOMPUTE:
            self._recompute(place)
        else:
            self._forward_once(action, place)

    def _forward_once(self, action: Action, place: Place) -> None:
        """Run the first forward pass, whose output is the input of the next chunk."""
        chunk, microbatch = place
        received = self._inputs.pop(place, None)
        runs_again = action.kind is Kind.FORWARD_ONLY and not self._shape.is_forward_only(chunk)
        if runs_again and received is not None:
            self._saved_inputs.save(place, received)
        if runs_again and self._repeats_random_numbers:
            self._random_states[place] = rng.states()
        self._set_input(place, received, keeps_graph=action.kind.keeps_graph)
        self._forward(action, place)
        if chunk < self._shape.last:
            # Megatron Core records bias and dropout of a layer even without a graph
            self._inputs[chunk + 1, microbatch] = self._outputs.pop(place).detach()

    def _recompute(self, place: Place) -> None:
        """Repeat a forward pass with a graph."""
        self._set_input(place, self._saved_inputs.take(place) if place[0] > 0 else None, keeps_graph=True)
        with rng.repeating(self._random_states.pop(place, None)):
            self._forward(Action(Kind.RECOMPUTE, place[1], place[0]), place)
        self._free(self._outputs[place])

    def _set_input(self, place: Place, tensor: torch.Tensor | None, *, keeps_graph: bool) -> None:
        """Set the input of a pass. It stays until the backward pass only if it requires a gradient."""
        if tensor is not None:
            needs_gradient = keeps_graph and self._shape.needs_input_gradient(place[0])
            self._inputs[place] = tensor.detach().requires_grad_(needs_gradient)

    def _next_batch(self, action: Action) -> Iterator[Any]:
        return iter([self._microbatches[action.microbatch]])

    def _wait_for_input(self, virtual: int, received: torch.Tensor) -> None:
        """Do nothing: inputs of a single stage are no messages."""

    def _backward(self, action: Action, place: Place) -> None:
        chunk, microbatch = place
        self._begin_backward(chunk)
        received = self._inputs.pop(place, None)
        gradient = self._output_gradients.pop(place, None)
        input_gradient = backward_step(
            received, self._outputs.pop(place), gradient, get_model_type(self._model), self._config
        )
        self._end_backward(chunk)
        if input_gradient is not None:
            self._output_gradients[chunk - 1, microbatch] = input_gradient


def _visit(action: Action) -> tuple[int, bool]:
    """Return the chunk of an action and whether the chunk runs backward then."""
    return action.chunk, action.kind is not Kind.FORWARD_ONLY
