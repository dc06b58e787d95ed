"""Executes one stage's actions of an interleaved plan with Megatron Core's passes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.bcd.model.builder import select_chunk
from megatron.bcd.pipeline.actions import Action, Kind
from megatron.bcd.pipeline.chunk_shape import ChunkShape
from megatron.bcd.pipeline.interleaved import build_chunk_plan
from megatron.bcd.pipeline.iteration import Iteration
from megatron.bcd.pipeline.p2p import ChunkMessages

_Place: TypeAlias = tuple[int, int]
"""Chunk and microbatch."""


class ChunkExecutor(Iteration):
    """One iteration of one stage. Tensors under way are named by chunk and microbatch."""

    def __init__(
        self,
        shape: ChunkShape,
        model: torch.nn.Module,
        messages: ChunkMessages,
        groups: ProcessGroupCollection,
        *,
        data_iterator: Any,
        **common: Any,
    ) -> None:
        is_training = shape.first_trainable < shape.num_virtual
        super().__init__(model, groups, num_microbatches=shape.num_microbatches, is_training=is_training, **common)
        self._shape, self._messages = shape, messages
        self._stage = groups.pp.rank()
        self._actions = build_chunk_plan(shape).stages[self._stage]
        # every chunk reads every microbatch: the first one its tokens, the last one its labels
        self._batches: list[Iterator[Any]] = list(itertools.tee(data_iterator, shape.num_chunks))
        if shape.is_prefix_served:  # the prefix's output enters one chunk; the others have their inputs
            first = shape.chunk_of(shape.first_trainable)
            for chunk in range(first + 1, shape.num_chunks):
                self._batches[chunk] = map(_without_prefix_output, self._batches[chunk])
        self._num_backwards = [
            sum(
                action.chunk == chunk and action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
                for action in self._actions
            )
            for chunk in range(shape.num_chunks)
        ]

    def run(self) -> list[Any]:
        """What the loss function reported, by microbatch, on the last stage."""
        do = {
            Kind.FORWARD: self._forward,
            Kind.FORWARD_ONLY: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECEIVE_FORWARD: self._receive_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECEIVE_BACKWARD: self._receive_backward,
        }
        return self._run(
            lambda action: do[action.kind](action, (action.chunk, action.microbatch)), self._messages.finish_sends
        )

    def _virtual(self, action: Action) -> int:
        return self._shape.virtual_stage(self._stage, action.chunk)

    def _forward(self, action: Action, place: _Place) -> None:
        virtual, keeps_graph = self._virtual(action), action.kind is Kind.FORWARD
        received = self._inputs.pop(place, None)
        if received is not None:
            self._messages.wait_for(received)
            self._begun = self._now()
        select_chunk(self._model, action.chunk)
        with torch.set_grad_enabled(keeps_graph):
            output = self._forward_step(
                self._batches[action.chunk], action.microbatch, received, is_last_stage=virtual == self._shape.last
            )
        if keeps_graph or virtual < self._shape.last:
            self._outputs[place] = output
        if received is not None and received.requires_grad:
            self._inputs[place] = received

    def _backward(self, action: Action, place: _Place) -> None:
        output, gradient = self._outputs.pop(place), self._output_gradients.pop(place, None)
        if gradient is not None:
            self._messages.finish_send(output)
            self._messages.wait_for(gradient)
            self._begun = self._now()
        self._num_backwards[action.chunk] -= 1
        is_last = not self._num_backwards[action.chunk]
        if is_last:  # the chunk's gradients are complete with this pass: overlapped reductions begin here
            self._allow_gradient_reduction()
        input_gradient = self._backward_step(self._inputs.pop(place, None), output, gradient)
        if is_last and any(self._num_backwards):
            self._defer_gradient_reduction()
        if input_gradient is not None:
            self._input_gradients[place] = input_gradient

    def _send_forward(self, action: Action, place: _Place) -> None:
        if not self._shape.is_forward_only(self._virtual(action)):
            # its backward pass needs the graph, but not the values
            self._messages.send_forward(self._outputs[place], when_sent=self._free)
        else:
            self._messages.send_forward(self._outputs.pop(place))

    def _free(self, output: torch.Tensor) -> None:
        deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)

    def _receive_forward(self, action: Action, place: _Place) -> None:
        needs_gradient = self._shape.needs_input_gradient(self._virtual(action))
        self._inputs[place] = self._messages.receive_forward(self._tensor_shape, needs_gradient=needs_gradient)

    def _send_backward(self, action: Action, place: _Place) -> None:
        self._messages.send_backward(self._input_gradients.pop(place))

    def _receive_backward(self, action: Action, place: _Place) -> None:
        self._output_gradients[place] = self._messages.receive_backward(self._tensor_shape)


def _without_prefix_output(batch: Any) -> Any:
    return {name: value for name, value in batch.items() if name != "prefix_output"}
