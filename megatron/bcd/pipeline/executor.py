"""Executes one stage's actions of one iteration with Megatron Core's passes and messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.bcd.pipeline.actions import Kind
from megatron.bcd.pipeline.build import PlanShape, stage_actions
from megatron.bcd.pipeline.iteration import Iteration
from megatron.bcd.pipeline.p2p import OneWayLink
from megatron.bcd.runtime.compat.p2p import CountingCommunicator


class StageExecutor(Iteration):
    """One iteration of one stage: a handler for each kind of action. Tensors under way are named by microbatch."""

    def __init__(
        self,
        shape: PlanShape,
        model: torch.nn.Module,
        communicator: CountingCommunicator,
        link: OneWayLink,
        groups: ProcessGroupCollection,
        *,
        data_iterator: Any,
        **common: Any,
    ) -> None:
        is_training = shape.first_trainable < shape.num_stages
        super().__init__(model, groups, num_microbatches=shape.num_microbatches, is_training=is_training, **common)
        self._shape, self._communicator, self._link = shape, communicator, link
        # with a prefix cache, the plan has only the last stages of the pipeline
        self._stage = groups.pp.rank() - (groups.pp.size() - shape.num_stages)
        self._batches = data_iterator
        self._actions = stage_actions(shape, self._stage) if self._stage >= 0 else ()
        self._is_after_prefix = self._stage > 0 and shape.is_one_way(self._stage - 1)
        self._num_to_receive = shape.done_ahead if self._is_first_trainable else 0
        self._num_to_receive += sum(action.kind is Kind.RECEIVE_FORWARD for action in self._actions)
        self._num_backwards = sum(action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) for action in self._actions)

    @property
    def _is_first_trainable(self) -> bool:
        return self._stage == self._shape.first_trainable

    def run(self) -> list[Any]:
        """What the loss function reported, by microbatch, on the last stage."""
        do = self._handlers()
        return self._run(lambda action: do[action.kind](action.microbatch, action.received), self._link.finish_sends)

    def _handlers(self) -> dict[Kind, Callable[[int, int | None], None]]:
        return {
            Kind.FORWARD: self._forward,
            Kind.FORWARD_ONLY: self._forward_only,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward,
            Kind.SEND_FORWARD: self._send_forward,
            Kind.RECEIVE_FORWARD: self._receive_forward,
            Kind.SEND_BACKWARD: self._send_backward,
            Kind.RECEIVE_BACKWARD: self._receive_backward,
            Kind.SEND_FORWARD_RECEIVE_BACKWARD: self._send_forward_receive_backward,
            Kind.SEND_BACKWARD_RECEIVE_FORWARD: self._send_backward_receive_forward,
            Kind.RECEIVE_AHEAD: self._receive_ahead,
        }

    def _forward(self, microbatch: int, _: int | None = None) -> None:
        if microbatch < self._shape.done_ahead and self._is_first_trainable:
            self._receive_forward(microbatch)
        received = self._inputs.pop(microbatch, None)
        self._outputs[microbatch] = self._run_forward(microbatch, received)
        if received is not None and received.requires_grad:
            self._inputs[microbatch] = received

    def _forward_only(self, microbatch: int, _: int | None = None) -> None:
        with torch.no_grad():
            output = self._run_forward(microbatch, self._inputs.pop(microbatch, None))
        if self._stage < self._shape.last:
            self._outputs[microbatch] = output

    def _run_forward(self, microbatch: int, received: torch.Tensor | None) -> torch.Tensor:
        is_next = microbatch >= self._shape.num_microbatches
        number = microbatch - self._shape.num_microbatches if is_next else microbatch
        return self._forward_step(self._batches, number, received, is_last_stage=self._stage == self._shape.last)

    def _backward(self, microbatch: int, _: int | None = None) -> None:
        self._num_backwards -= 1
        # as Megatron Core: only the first trainable stage overlaps the reduction with its last backward pass; the
        # others reduce in the bubble
        if not self._num_backwards and (self._config.grad_sync_func is None or self._is_first_trainable):
            self._allow_gradient_reduction()
        gradient = self._backward_step(
            self._inputs.pop(microbatch, None),
            self._outputs.pop(microbatch),
            self._output_gradients.pop(microbatch, None),
        )
        if gradient is not None:
            self._input_gradients[microbatch] = gradient

    def _send_forward(self, microbatch: int, _: int | None = None) -> None:
        if self._shape.is_one_way(self._stage):
            self._link.send(self._outputs.pop(microbatch))
            return
        self._communicator.send_forward(self._outputs[microbatch], is_last_stage=False)
        self._free_output(microbatch)

    def _receive_forward(self, microbatch: int, _: int | None = None) -> None:
        if self._is_after_prefix:
            self._num_to_receive -= 1
            self._inputs[microbatch] = self._link.receive(self._tensor_shape, more_follow=self._num_to_receive > 0)
        else:
            self._inputs[microbatch] = self._communicator.recv_forward(self._tensor_shape, is_first_stage=False)

    def _send_backward(self, microbatch: int, _: int | None = None) -> None:
        self._communicator.send_backward(self._input_gradients.pop(microbatch), is_first_stage=False)

    def _receive_backward(self, microbatch: int, _: int | None = None) -> None:
        self._output_gradients[microbatch] = self._communicator.recv_backward(self._tensor_shape, is_last_stage=False)

    def _send_forward_receive_backward(self, sent: int, received: int | None) -> None:
        assert received is not None
        self._output_gradients[received] = self._communicator.send_forward_recv_backward(
            self._outputs[sent], self._tensor_shape, is_last_stage=False
        )
        self._free_output(sent)

    def _send_backward_receive_forward(self, sent: int, received: int | None) -> None:
        assert received is not None
        self._inputs[received] = self._communicator.send_backward_recv_forward(
            self._input_gradients.pop(sent), self._tensor_shape, is_first_stage=False
        )

    def _receive_ahead(self, microbatch: int, _: int | None = None) -> None:
        self._link.begin_receive(self._tensor_shape)

    def _free_output(self, microbatch: int) -> None:
        deallocate_output_tensor(self._outputs[microbatch], self._config.deallocate_pipeline_outputs)
