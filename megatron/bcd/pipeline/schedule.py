"""The forward-backward function of a phase, with the interface of Megatron Core's."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron.bcd.blocks.partition import Partition
from megatron.bcd.model.transformer_config import OF_A_PHASE
from megatron.bcd.pipeline.build import PlanShape, bcd_shape, default_run_ahead, evaluation_shape
from megatron.bcd.pipeline.chunk_executor import ChunkExecutor
from megatron.bcd.pipeline.chunk_shape import ChunkShape, evaluation_chunk_shape, phase_chunk_shape
from megatron.bcd.pipeline.executor import StageExecutor
from megatron.bcd.pipeline.iteration import TimedAction
from megatron.bcd.pipeline.p2p import ChunkMessages, OneWayLink
from megatron.bcd.runtime import device, distributed
from megatron.bcd.runtime.compat.p2p import CountingCommunicator


class PipelineSchedule:
    """Forward and backward passes of one iteration, as the active block needs them.

    Called as Megatron Core's forward-backward functions are. `begin_phase` says which block is active, and
    `prepare_next` whether forward-only stages may run ahead. On one pipeline stage, and with `name` "stock", Megatron
    Core's own function runs.
    """

    def __init__(
        self,
        *,
        name: str,
        partition: Partition,
        run_ahead: int | None,
        head_passes: float = 1.0,
        timeout_minutes: int | None = None,
    ) -> None:
        """`name` is "bcd" or "stock", `run_ahead` a number of microbatches; None takes `default_run_ahead`. A pass of
        the output head takes about `head_passes` passes of a layer: interleaved plans are arranged by it.
        `timeout_minutes`: of messages between stages of the prefix; None is PyTorch's."""
        self.name = name
        self.backward_messages = 0
        """Gradients that this rank sent and received in the last training iteration."""
        self.trace: list[TimedAction] | None = None
        """Set to a list, it collects every action; each then synchronises the device."""
        self._partition = partition
        self._run_ahead, self._head_passes = run_ahead, head_passes
        self._timeout_minutes = timeout_minutes
        self._block = 0
        self._is_prefix_served = False
        self._num_next = self._done_ahead = 0
        self._communicator: CountingCommunicator | None = None
        self._link: OneWayLink | None = None
        self._messages: ChunkMessages | None = None
        self._groups: ProcessGroupCollection | None = None

    def begin_phase(self, block: int, *, is_prefix_served: bool = False) -> None:
        """`block` is active from now on. With `is_prefix_served` the first trainable stage's batches bring its input
        along, and the stages before it do nothing but take part in the collectives that end an iteration."""
        assert self._done_ahead == 0, "microbatches that ran ahead belong to the phase before"
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
        self._communicator.config.timers = get_model_config(model).timers
        if self._partition.num_chunks > 1:
            with _timed(model):
                return self._execute_chunks(num_microbatches, forward_only=forward_only, model=model, **arguments)
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
            with _timed(model):
                reported = self.execute(shape, model=model, **arguments)
        if not forward_only:
            self.backward_messages = self._communicator.backward_messages
        return reported

    def execute(self, shape: PlanShape, *, model: Any, **arguments: Any) -> list[Any]:
        """Execute this rank's part of the plan of `shape`."""
        self._set_up(model)
        assert self._communicator is not None and self._groups is not None and self._link is not None
        iteration = StageExecutor(
            shape, model, self._communicator, self._link, self._groups, trace=self.trace, **arguments
        )
        return iteration.run()

    def _execute_chunks(self, num_microbatches: int, *, forward_only: bool, model: Any, **arguments: Any) -> list[Any]:
        """Execute this rank's part of an interleaved plan."""
        assert self._groups is not None and self._messages is not None
        self._num_next = self._messages.backward_messages = 0
        shape = self.chunk_shape(num_microbatches, forward_only=forward_only)
        reported = ChunkExecutor(shape, model, self._messages, self._groups, trace=self.trace, **arguments).run()
        if not forward_only:
            self.backward_messages = self._messages.backward_messages
        return reported

    def run_chunks_forward(self, *, model: Any, num_chunks: int, num_microbatches: int, **arguments: Any) -> list[Any]:
        """Forward passes of the first `num_chunks` chunks of every stage, outside of an iteration. A collective.

        Returns what the function beside the output made of it, by microbatch, on the last stage.
        """
        self._set_up(model)
        assert self._groups is not None and self._messages is not None
        num_stages = self._partition.num_stages
        shape = evaluation_chunk_shape(num_stages=num_stages, num_chunks=num_chunks, num_microbatches=num_microbatches)
        executor = ChunkExecutor(
            shape, model, self._messages, self._groups, trace=None, collect_non_loss_data=True, **arguments
        )
        with torch.no_grad():
            return executor.run()

    def chunk_shape(self, num_microbatches: int, *, forward_only: bool = False) -> ChunkShape:
        """Of an iteration with several chunks on a stage."""
        cut = self._partition
        if not forward_only:
            return phase_chunk_shape(
                cut,
                self._block,
                num_microbatches=num_microbatches,
                head=self._head_passes,
                is_prefix_served=self._is_prefix_served,
            )
        return evaluation_chunk_shape(
            num_stages=cut.num_stages, num_chunks=cut.num_chunks, num_microbatches=num_microbatches
        )

    def _shape(self, num_microbatches: int, *, forward_only: bool) -> PlanShape:
        num_stages = self._partition.num_stages
        if forward_only:
            assert self._done_ahead == 0, "microbatches that ran ahead come first"
            return evaluation_shape(num_stages=num_stages, num_microbatches=num_microbatches)
        first_trainable = self._partition.first_trainable_stage(self._block)
        active = [self._partition.stage_active(self._block, stage) for stage in range(num_stages)]
        if self._is_prefix_served:  # the pipeline starts at the first trainable stage
            return bcd_shape(
                num_stages=num_stages - first_trainable,
                num_microbatches=num_microbatches,
                first_trainable=0,
                active=active[first_trainable:],
            )
        default = default_run_ahead(num_stages=num_stages, first_trainable=first_trainable)
        ahead = min(default if self._run_ahead is None else self._run_ahead, self._num_next) if first_trainable else 0
        shape = bcd_shape(
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            first_trainable=first_trainable,
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
            for name in OF_A_PHASE:  # the copy would keep the first phase's wrapper and optimizer alive
                setattr(config, name, None)
            if self.name != "stock":
                # else each batched message ends in a synchronisation of the device, also with what comes ahead
                config.batch_p2p_sync = False
            self._communicator = CountingCommunicator(self._groups.pp, config)
            waiting = distributed.group_for_waiting(self._groups.pp, timeout_minutes=self._timeout_minutes)
            self._link = OneWayLink(self._communicator, group=waiting)
            self._messages = ChunkMessages(self._groups.pp, dtype=config.pipeline_dtype)
            # batched messages of some of a group's ranks must not be the first thing that the group does
            torch.distributed.all_reduce(torch.zeros(1, device=device.current()), group=self._groups.pp)


@contextlib.contextmanager
def _timed(model: torch.nn.Module) -> Iterator[None]:
    """The timer that Megatron Core's own functions start and stop."""
    config = get_model_config(model)
    if config.timers is None:
        yield
        return
    config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    config.timers("forward-backward").stop()


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
