"""Executes a pipeline plan with Megatron Core's communicator, forward and backward steps.

`PipelineSchedule` stands where Megatron-LM asks for a forward-backward function, and has its signature.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    deallocate_output_tensor,
    forward_step,
    get_tensor_shapes,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, get_model_type

from megatron.bcd import platform
from megatron.bcd.blocks import Partition
from megatron.bcd.pipeline_plan.plan import (
    MAX_SENDS_IN_FLIGHT,
    Action,
    Kind,
    PlanShape,
    bcd_shape,
    default_run_ahead,
    evaluation_shape,
    stage_actions,
)

_OF_A_PHASE = ("grad_scale_func", "finalize_model_grads_func", "no_sync_func", "grad_sync_func", "param_sync_func")


@dataclass(frozen=True, kw_only=True)
class TimedAction:
    """An action that was executed, and when: seconds of a clock that never goes back."""

    action: Action
    start: float
    end: float


class CountingCommunicator(P2PCommunicator):
    """Megatron Core's communicator; counts the gradients that this rank sends and receives."""

    backward_messages = 0

    def _communicate(
        self, *, tensor_send_prev: torch.Tensor | None, recv_next: bool, **others: Any
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        self.backward_messages += (tensor_send_prev is not None) + bool(recv_next)
        return super()._communicate(tensor_send_prev=tensor_send_prev, recv_next=recv_next, **others)


class OneWayLink:
    """Forward messages along a row of stages that hand nothing back.

    A sender goes on without waiting for the receiver, MAX_SENDS_IN_FLIGHT messages at most; a receiver begins to
    receive the next message while it computes on the present one.
    """

    def __init__(self, communicator: P2PCommunicator) -> None:
        config = copy.copy(communicator.config)
        config.batch_p2p_comm = False  # batched messages of a rank wait for each other, whoever they are for
        self._communicator = P2PCommunicator(communicator.pp_group, config)
        self._sent: deque[tuple[torch.Tensor, Any]] = deque()
        self._coming: deque[tuple[torch.Tensor, Any]] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        """Begin to send; the tensor stays alive until the receiver has it."""
        while len(self._sent) >= MAX_SENDS_IN_FLIGHT:
            self._finish_oldest_send()
        self._sent.append((tensor, self._begin(tensor, None)[1]))

    def begin_receive(self, shape: tuple[int, ...]) -> None:
        self._coming.append(self._begin(None, shape))

    def receive(self, shape: tuple[int, ...], *, more_follow: bool) -> torch.Tensor:
        """The oldest message that was not taken yet, without a gradient; begins to receive the one after it."""
        if not self._coming:
            self.begin_receive(shape)
        tensor, requests = self._coming.popleft()
        _wait(requests)
        if more_follow and not self._coming:
            self.begin_receive(shape)
        return tensor.requires_grad_(False)

    def finish_sends(self) -> None:
        while self._sent:
            self._finish_oldest_send()

    def _finish_oldest_send(self) -> None:
        _wait(self._sent[0][1])
        self._sent.popleft()

    def _begin(self, tensor: torch.Tensor | None, shape: tuple[int, ...] | None) -> tuple[torch.Tensor, Any]:
        received, _, requests = self._communicator._communicate(
            tensor_send_next=tensor,
            tensor_send_prev=None,
            recv_prev=shape is not None,
            recv_next=False,
            tensor_shape=shape,
            wait_on_reqs=False,
        )
        return received, requests


def _wait(requests: dict[str, Any]) -> None:
    for request in requests.values():
        request.wait()


class PipelineSchedule:
    """Forward and backward passes of one iteration, as the active block needs them.

    Called as Megatron Core's forward-backward functions are. `begin_phase` says which block is active, and
    `prepare_next` whether forward-only stages may run ahead. On one pipeline stage, and with `name` "stock", Megatron
    Core's own function runs.
    """

    def __init__(self, *, name: str, partition: Partition, run_ahead: int | None) -> None:
        """`name` is "bcd" or "stock", `run_ahead` a number of microbatches; None takes `default_run_ahead`."""
        self.name = name
        self.backward_messages = 0
        """Gradients that this rank sent and received in the last training iteration."""
        self.trace: list[TimedAction] | None = None
        """Give it a list, and every action is added to it (which synchronises the device)."""
        self._partition = partition
        self._run_ahead = run_ahead
        self._block = 0
        self._is_prefix_served = False
        self._num_next = self._done_ahead = 0
        self._communicator: CountingCommunicator | None = None
        self._link: OneWayLink | None = None
        self._groups: ProcessGroupCollection | None = None

    def begin_phase(self, block: int, *, is_prefix_served: bool = False) -> None:
        """`block` is active from now on. With `is_prefix_served` the pivot stage's batches bring its input along, and
        the stages before it do nothing but take part in the collectives that end an iteration."""
        assert self._done_ahead == 0, "what a stage ran ahead with belongs to the phase before"
        self._block, self._is_prefix_served = block, is_prefix_served

    def prefix_link(self, model: torch.nn.Module) -> OneWayLink | None:
        """For forward passes of the prefix outside of an iteration; None on one pipeline stage. A collective."""
        if self._partition.num_stages == 1:
            return None
        self._set_up(model)
        return self._link

    def prepare_next(self, num_microbatches: int) -> None:
        """The next training iteration follows directly upon the coming one, in the same phase, with so many
        microbatches; 0 if not: at the end of a phase, before an evaluation or a checkpoint, at the end of the data."""
        self._num_next = num_microbatches

    @property
    def is_ahead(self) -> bool:
        """Whether forward-only stages have begun the next iteration; the same on every rank."""
        return self._done_ahead > 0

    def __call__(self, *, model: Any, num_microbatches: int, forward_only: bool = False, **arguments: Any) -> list[Any]:
        """Returns what the loss function reported, by microbatch, on the last stage; else an empty list."""
        if self._partition.num_stages == 1:
            return get_forward_backward_func()(
                model=model, num_microbatches=num_microbatches, forward_only=forward_only, **arguments
            )
        self._set_up(model)
        assert self._communicator is not None and self._groups is not None and self._link is not None
        self._communicator.backward_messages = 0
        if self.name == "stock":
            reported = get_forward_backward_func()(
                model=model,
                num_microbatches=num_microbatches,
                forward_only=forward_only,
                p2p_communicator=self._communicator,
                pg_collection=self._groups,
                **arguments,
            )
        else:
            shape = self._shape(num_microbatches, forward_only=forward_only)
            reported = self.execute(shape, model=model, **arguments)
        if not forward_only:
            self.backward_messages = self._communicator.backward_messages
        return reported

    def execute(self, shape: PlanShape, *, model: Any, **arguments: Any) -> list[Any]:
        """Execute this rank's part of the plan of `shape`."""
        self._set_up(model)
        assert self._communicator is not None and self._groups is not None and self._link is not None
        iteration = _Iteration(
            shape, model, self._communicator, self._link, self._groups, trace=self.trace, **arguments
        )
        return iteration.run()

    def _shape(self, num_microbatches: int, *, forward_only: bool) -> PlanShape:
        num_stages = self._partition.num_stages
        if forward_only:
            assert self._done_ahead == 0, "what a stage ran ahead with comes first"
            return evaluation_shape(num_stages=num_stages, num_microbatches=num_microbatches)
        pivot = self._partition.pivot_stage(self._block)
        active = [self._partition.stage_active(self._block, stage) for stage in range(num_stages)]
        if self._is_prefix_served:  # the pipeline begins with the pivot stage
            return bcd_shape(
                num_stages=num_stages - pivot, num_microbatches=num_microbatches, pivot=0, active=active[pivot:]
            )
        default = default_run_ahead(num_stages=num_stages, pivot=pivot)
        ahead = min(default if self._run_ahead is None else self._run_ahead, self._num_next) if pivot else 0
        shape = bcd_shape(
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            pivot=pivot,
            active=active,
            done_ahead=self._done_ahead,
            run_ahead=ahead,
        )
        self._done_ahead, self._num_next = ahead, 0
        return shape

    def _set_up(self, model: torch.nn.Module) -> None:
        if self._communicator is None:
            self._groups = _process_groups()
            config = copy.copy(get_model_config(model))
            for name in _OF_A_PHASE:  # the copy would keep the first phase's wrapper and optimizer alive
                setattr(config, name, None)
            if self.name != "stock":
                # else each batched message ends in a synchronisation of the device, also with what comes ahead
                config.batch_p2p_sync = False
            self._communicator = CountingCommunicator(self._groups.pp, config)
            self._link = OneWayLink(self._communicator)
            # batched messages of some of a group's ranks must not be the first thing that the group does
            torch.distributed.all_reduce(torch.zeros(1, device=platform.device()), group=self._groups.pp)


def _process_groups() -> ProcessGroupCollection:
    """The groups that Megatron Core's schedule takes where none are given."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.cp = parallel_state.get_context_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return groups


class _Iteration:
    """One iteration of one stage: what is under way, and what each kind of action does to it."""

    def __init__(
        self,
        shape: PlanShape,
        model: torch.nn.Module,
        communicator: CountingCommunicator,
        link: OneWayLink,
        groups: ProcessGroupCollection,
        *,
        trace: list[TimedAction] | None,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        force_all_reduce: bool = False,
    ) -> None:
        self._shape, self._model, self._communicator, self._link = shape, model, communicator, link
        self._groups, self._trace = groups, trace
        # where the prefix is served, a plan has fewer stages than the pipeline: its last ones
        self._stage = groups.pp.rank() - (groups.pp.size() - shape.num_stages)
        self._config = get_model_config(model)
        self._forward_step_func, self._batches = forward_step_func, data_iterator
        self._collect_non_loss_data, self._first_val_step = collect_non_loss_data, first_val_step
        self._force_all_reduce = force_all_reduce
        [self._tensor_shape] = get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=self._config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )
        self._actions = stage_actions(shape, self._stage) if self._stage >= 0 else ()
        self._is_training = shape.pivot < shape.num_stages
        self._is_after_prefix = self._stage > 0 and shape.is_one_way(self._stage - 1)
        self._num_to_receive = shape.done_ahead if self._is_pivot else 0
        self._num_to_receive += sum(action.kind is Kind.RECEIVE_FORWARD for action in self._actions)
        self._num_backwards = sum(action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) for action in self._actions)
        # by microbatch; inputs until the forward pass, where they need a gradient until the backward pass
        self._inputs: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._output_gradients: dict[int, torch.Tensor] = {}
        self._input_gradients: dict[int, torch.Tensor] = {}
        self._reported: list[Any] = []
        self._num_tokens = torch.zeros([], dtype=torch.int, device=platform.device())
        self._no_sync: contextlib.AbstractContextManager[Any] | None = None

    @property
    def _is_pivot(self) -> bool:
        return self._stage == self._shape.pivot

    def run(self) -> list[Any]:
        do = self._handlers()
        self._defer_gradient_reduction()
        for action in self._actions:
            start = self._now()
            do[action.kind](action.microbatch, action.received)
            if self._trace is not None:
                self._trace.append(TimedAction(action=action, start=start, end=self._now()))
        self._link.finish_sends()
        if self._is_training:
            self._finish_gradients()
        return self._reported

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
        if microbatch < self._shape.done_ahead and self._is_pivot:
            self._receive_forward(microbatch)
        received = self._inputs.pop(microbatch, None)
        self._outputs[microbatch] = self._forward_step(microbatch, received)
        if received is not None and received.requires_grad:
            self._inputs[microbatch] = received

    def _forward_only(self, microbatch: int, _: int | None = None) -> None:
        with torch.no_grad():
            output = self._forward_step(microbatch, self._inputs.pop(microbatch, None))
        if self._stage < self._shape.last:
            self._outputs[microbatch] = output

    def _forward_step(self, microbatch: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        is_next = microbatch >= self._shape.num_microbatches
        number = microbatch - self._shape.num_microbatches if is_next else microbatch
        is_first = self._is_training or self._first_val_step is not False
        output, num_tokens = forward_step(
            self._forward_step_func,
            self._batches,
            self._model,
            self._shape.num_microbatches,
            input_tensor,
            self._reported,
            self._config,
            cp_group_size=self._groups.cp.size(),
            collect_non_loss_data=self._collect_non_loss_data,
            is_first_microbatch=is_first and number == 0,
            current_microbatch=number,
            is_last_stage=self._stage == self._shape.last,
        )
        self._num_tokens += num_tokens
        return output

    def _backward(self, microbatch: int, _: int | None = None) -> None:
        self._num_backwards -= 1
        # as Megatron Core does: only the first stage of those that run backward overlaps the reduction with its last
        # backward pass, the others reduce while they would wait
        if not self._num_backwards and (self._config.grad_sync_func is None or self._is_pivot):
            self._allow_gradient_reduction()
        gradient = backward_step(
            self._inputs.pop(microbatch, None),
            self._outputs.pop(microbatch),
            self._output_gradients.pop(microbatch, None),
            get_model_type(self._model),
            self._config,
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

    def _defer_gradient_reduction(self) -> None:
        if self._is_training:
            self._no_sync = (self._config.no_sync_func or contextlib.nullcontext)()
            self._no_sync.__enter__()

    def _allow_gradient_reduction(self) -> None:
        if self._no_sync is not None:
            self._no_sync.__exit__(None, None, None)
            self._no_sync = None

    def _finish_gradients(self) -> None:
        """Reduce what is not reduced yet: over data parallel ranks, tied embeddings, sequence-parallel norms."""
        if self._no_sync is not None:
            self._allow_gradient_reduction()
            if self._config.grad_sync_func is not None:
                self._config.grad_sync_func(self._model.parameters())
        if self._config.finalize_model_grads_func is not None:
            self._config.finalize_model_grads_func(
                [self._model],
                self._num_tokens if self._config.calculate_per_token_loss else None,
                pg_collection=self._groups,
                force_all_reduce=self._force_all_reduce,
            )

    def _now(self) -> float:
        if self._trace is None:
            return 0.0
        platform.synchronize()
        return time.perf_counter()
