"""Execute one stage's actions of one iteration with Megatron Core's forward and backward steps."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor, forward_step, get_tensor_shapes
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron.bcd.model.builder import select_chunk
from megatron.bcd.pipeline.build import build_plan
from megatron.bcd.pipeline.p2p import Messages
from megatron.bcd.pipeline.plan import Action, Kind, PlanShape
from megatron.bcd.pipeline.saved_tensors import Place
from megatron.bcd.runtime import device
from megatron.bcd.runtime.compat.megatron_core import backward_step


class Iteration:
    """One iteration of one stage, with a method for each kind of action."""

    def __init__(
        self,
        shape: PlanShape,
        model: torch.nn.Module,
        groups: ProcessGroupCollection,
        *,
        messages: Messages,
        prefix_messages: Messages,
        inputs_ahead: dict[int, torch.Tensor],
        forward_step_func: Callable[..., Any],
        data_iterator: Iterator[Any],
        seq_length: int,
        micro_batch_size: int,
        collect_non_loss_data: bool = False,
    ) -> None:
        """Prepare the iteration. `inputs_ahead` are inputs that the previous iteration received, by microbatch."""
        self._shape, self._model, self._groups = shape, model, groups
        self._messages, self._prefix_messages = messages, prefix_messages
        self._stage = groups.pp.rank()
        self._actions = build_plan(shape).stages[self._stage]
        self._config = get_model_config(model)
        self._forward_step_func = forward_step_func
        self._collect_non_loss_data = collect_non_loss_data
        # every chunk reads every microbatch: the first one its tokens, the last one its labels
        self._batches: list[Iterator[Any]] = list(itertools.tee(data_iterator, shape.num_chunks))
        if shape.is_prefix_cached:  # only one chunk reads the cached output of the prefix
            for chunk in range(shape.chunk_of(shape.first_trainable) + 1, shape.num_chunks):
                self._batches[chunk] = (
                    {name: value for name, value in batch.items() if name != "prefix_output"}
                    for batch in self._batches[chunk]
                )
        [self._tensor_shape] = get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=None,
            config=self._config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )
        # an input is kept until its forward pass, or until its backward pass if it needs a gradient
        self._inputs: dict[Place, torch.Tensor] = {(0, number): tensor for number, tensor in inputs_ahead.items()}
        self._outputs: dict[Place, torch.Tensor] = {}
        self._output_gradients: dict[Place, torch.Tensor] = {}
        self._input_gradients: dict[Place, torch.Tensor] = {}
        self._reported: list[Any] = []
        self._num_backwards = Counter(action.chunk for action in self._actions if action.kind.is_backward)
        """Number of remaining backward passes, by chunk."""
        self._num_tokens = torch.zeros([], dtype=torch.int, device=device.current())
        self._no_sync: contextlib.AbstractContextManager[Any] | None = None
        self._do: dict[Kind, Callable[[Action, Place], None]] = {
            Kind.FORWARD: self._forward,
            Kind.FORWARD_ONLY: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECEIVE_FORWARD: self._receive_forward,
            Kind.SEND_BACKWARD: lambda action, place: self._messages.send(
                self._input_gradients.pop(place), is_backward=True
            ),
            Kind.RECEIVE_BACKWARD: self._receive_backward,
        }

    def run(self) -> list[Any]:
        """Run all actions. Return the results of the loss function by microbatch on the last stage, elsewhere []."""
        self._defer_gradient_reduction()
        for action in self._actions:
            self._do[action.kind](action, (action.chunk, action.microbatch))
        self._do.clear()  # a cycle, which would keep the batches until the garbage collector runs
        for messages in (self._messages, self._prefix_messages):
            messages.finish_sends()
        if self._shape.is_training:
            self._finish_gradients()
        return self._reported

    def inputs_ahead(self) -> dict[int, torch.Tensor]:
        """Return the inputs of the next iteration that `run` has received, by microbatch."""
        return {microbatch - self._shape.num_microbatches: tensor for (_, microbatch), tensor in self._inputs.items()}

    def _virtual(self, action: Action) -> int:
        return self._shape.virtual_stage(self._stage, action.chunk)

    def _messages_from(self, virtual: int) -> Messages:
        """Return the channel for outputs of a virtual stage."""
        return self._prefix_messages if self._shape.is_one_way(virtual) else self._messages

    def _forward(self, action: Action, place: Place) -> None:
        shape, virtual = self._shape, self._virtual(action)
        keeps_graph = action.kind.keeps_graph
        received = self._inputs.pop(place, None)
        if received is not None:
            self._messages_from(virtual - 1).wait_for(received)
        select_chunk(self._model, action.chunk)
        is_next = action.microbatch >= shape.num_microbatches
        number = action.microbatch - shape.num_microbatches if is_next else action.microbatch
        with torch.set_grad_enabled(keeps_graph):
            output, num_tokens = forward_step(
                self._forward_step_func,
                self._next_batch(action),
                self._model,
                shape.num_microbatches,
                received,
                self._reported,
                self._config,
                cp_group_size=self._groups.cp.size(),
                collect_non_loss_data=self._collect_non_loss_data,
                is_first_microbatch=number == 0,
                current_microbatch=number,
                is_last_stage=virtual == shape.last,
            )
        self._num_tokens += num_tokens
        if keeps_graph or virtual < shape.last:
            self._outputs[place] = output
        if received is not None and received.requires_grad:
            self._inputs[place] = received

    def _backward(self, action: Action, place: Place) -> None:
        output, gradient = self._outputs.pop(place), self._output_gradients.pop(place, None)
        if gradient is not None:
            self._messages.finish_sends(until=output)  # its storage is freed when sent, which backward_step requires
            self._messages.wait_for(gradient)
        self._num_backwards[action.chunk] -= 1
        is_last = not self._num_backwards[action.chunk]
        # as in Megatron Core, without chunks only the first trainable stage reduces its gradients within its last
        # backward pass; others reduce in the bubble
        is_first = self._config.grad_sync_func is None or self._stage == self._shape.first_trainable
        if is_last and (is_first or self._shape.num_chunks > 1):
            self._allow_gradient_reduction()
        received = self._inputs.pop(place, None)
        input_gradient = backward_step(received, output, gradient, self._config)
        if is_last and any(self._num_backwards.values()):
            self._defer_gradient_reduction()
        if input_gradient is not None:
            self._input_gradients[place] = input_gradient

    def _next_batch(self, action: Action) -> Iterator[Any]:
        """Return an iterator whose next batch is that of the action."""
        return self._batches[action.chunk]

    def _send_forward(self, action: Action, place: Place) -> None:
        virtual = self._virtual(action)
        is_kept = self._outputs[place].requires_grad or not self._shape.is_breadth_first
        if self._shape.is_forward_only(virtual) or not is_kept:
            self._messages_from(virtual).send(self._outputs.pop(place))
        else:  # the backward pass needs the graph, but not the values
            self._messages.send(self._outputs[place], when_sent=self._free)

    def _free(self, output: torch.Tensor) -> None:
        deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)

    def _receive_forward(self, action: Action, place: Place) -> None:
        virtual = self._virtual(action)
        self._inputs[place] = self._messages_from(virtual - 1).receive(
            self._tensor_shape, needs_gradient=self._shape.needs_input_gradient(virtual)
        )

    def _receive_backward(self, action: Action, place: Place) -> None:
        self._output_gradients[place] = self._messages.receive(self._tensor_shape, is_backward=True)

    def _defer_gradient_reduction(self) -> None:
        if self._shape.is_training:
            self._no_sync = (self._config.no_sync_func or contextlib.nullcontext)()
            self._no_sync.__enter__()

    def _allow_gradient_reduction(self) -> None:
        if self._no_sync is not None:
            self._no_sync.__exit__(None, None, None)
            self._no_sync = None

    def _finish_gradients(self) -> None:
        """Reduce the remaining gradients: data-parallel, tied embeddings, sequence-parallel norms."""
        if self._no_sync is not None:
            self._allow_gradient_reduction()
            if self._config.grad_sync_func is not None:
                self._config.grad_sync_func(self._model.parameters())
        if self._config.finalize_model_grads_func is not None:
            self._config.finalize_model_grads_func(
                [self._model],
                self._num_tokens if self._config.calculate_per_token_loss else None,
                pg_collection=self._groups,
            )
