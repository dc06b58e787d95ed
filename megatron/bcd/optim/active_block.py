"""The active block of this rank: its life from one switch to the next."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config

from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import RunConfig
from megatron.bcd.model.builder import get_host_layers
from megatron.bcd.optim.core_optimizer import CoreOptimizer
from megatron.bcd.optim.matrix_optimizer import MatrixOptimizer
from megatron.bcd.optim.parameters import ParametersByBlock
from megatron.bcd.optim.phase_optimizer import build_matrix_optimizer, phase_rules
from megatron.bcd.optim.state import OUTER_MOMENTUM, ParamState
from megatron.bcd.runtime import memory, replicas
from megatron.bcd.runtime.compat import megatron_core


class ActiveBlock:
    """The parts of a rank that exist for one phase: gradient buffers, main parameters and moments.

    `build` freezes the other blocks, wraps the model in Megatron Core's DDP (buffers for active parameters only) and
    builds the optimizers. `dispose` frees them; the weights stay. Both are collectives, even for a rank without
    parameters of the block.

    What `dispose` offloads (docs/concepts.md, Memory), the next `build` of the block restores. The state of
    always-active parameters and fp16's loss scale continue from phase to phase.
    """

    def __init__(self, *, model: torch.nn.Module, config: RunConfig, partition: Partition, stage: int) -> None:
        self.model = model
        self.partition = partition
        self.stage = stage
        self.parameters = ParametersByBlock(model, partition=partition, stage=stage)
        self._host_layers = get_host_layers(model)
        self.core = CoreOptimizer(model, config, self.parameters)
        self.offloaded = self.core.offloaded
        self.chunks: Sequence[range] = ()
        """The layers of each chunk of --bcd-schedule breadth-first, by their numbers on this stage."""
        self.passes = partition
        """The partition into what the schedule runs at once."""
        if config.is_breadth_first:
            self.passes = partition.in_passes(config.bcd.bcd_layers_per_pass)
            self.chunks = self.passes.chunks_on_stage(stage)
        passes = self.passes if self.chunks else None
        self.matrices = build_matrix_optimizer(config, model, self.parameters, passes)
        if config.updates_streamed_layers:
            owned = {matrix.parameter for matrix in self.matrices.matrices.values() if matrix.is_owner}
            self._host_layers.owned = owned
        self.optimizers = (self.core, self.matrices)
        """All that steps parameters and owns their state."""
        self.outer_momenta: dict[str, torch.Tensor] = {}
        """Momenta of the outer step of replica groups, in host memory: by name, flat, this rank's `shard_slice`."""
        self.config = config
        self._model_config = get_model_config(model)
        self.is_checked = True
        """Whether the switch check of this phase is done, or there is no phase."""
        self._in_buffers: list[torch.nn.Parameter] = []

    @property
    def block(self) -> int | None:
        """Number of the active block; None between phases."""
        return self.core.block

    def optimizer_of(self, name: str) -> CoreOptimizer | MatrixOptimizer:
        """Return the optimizer that steps a parameter."""
        return self.matrices if name in self.matrices.matrices else self.core

    @property
    def wrapped(self) -> DistributedDataParallel | None:
        """The model in Megatron Core's DDP; None between phases."""
        return self.core.wrapped

    # ---------------------------------------------------------------------------------------------------------- phase

    def build(self, block: int) -> None:
        """Make `block` the active one. A collective."""
        assert self.wrapped is None, "dispose() of the last phase comes first"
        rules = phase_rules(self.config, self.parameters, block)
        self.parameters.activate(block, without={name for _, names, _ in rules for name in names})
        self._in_buffers = list(self.parameters.active().values())
        parameters = self.parameters.all()
        updated = [parameters[name] for rule, names, _ in rules for name in names if rule.is_by_chunk]
        loaded = [parameters[name] for rule, names, _ in rules for name in names if not rule.is_by_chunk]
        self._host_layers.begin_phase({*self._in_buffers, *loaded}, updated=updated)
        self.core.begin(block)
        # the hooks of Megatron Core's schedule, as Megatron-LM's training loop sets them
        model_config = self._model_config
        model_config.grad_scale_func = self.core.optimizer.scale_loss
        model_config.finalize_model_grads_func = finalize_model_grads
        if self.config.ddp.overlap_grad_reduce:
            model_config.no_sync_func = self._no_sync
            if model_config.pipeline_model_parallel_size > 1:
                model_config.grad_sync_func = self._start_grad_sync
        self.matrices.begin(
            rules,
            chunk_of=self._chunk_of if self.chunks else None,
            streamed=self._host_layers.streamed_parameters(),
            block=block,
        )
        self.is_checked = False

    def dispose(self, *, is_end_of_run: bool = False) -> None:
        """Save the state that outlives the phase, and free gradients, optimizer and buffers. A collective.

        At the end of the run no state is saved.
        """
        assert self.wrapped is not None, "build() comes first"
        megatron_core.gather_parameters(self.wrapped)
        if not is_end_of_run:
            self.core.save()
        self.matrices.end(keeps_moments=self.offloaded.keeps_moments and not is_end_of_run)
        model_config = self._model_config
        model_config.grad_scale_func = model_config.finalize_model_grads_func = None
        model_config.no_sync_func = model_config.grad_sync_func = model_config.param_sync_func = None
        self.core.end()
        self.is_checked = True
        self._host_layers.end_phase()
        gc.collect()  # wrapper, buckets and hooks form reference cycles
        on_device = [weight for weight in self._in_buffers if not self._host_layers.is_on_host(weight)]
        if self.partition.always_active or self._host_layers.is_used:
            for weight in on_device:  # each is a view of a buffer, and the last one of them would keep all of it alive
                weight.data = weight.data.clone()
        memory.release_cached_memory()

    def _chunk_of(self, name: str) -> int | None:
        """Return the chunk that steps a matrix; None for a tied embedding with a copy on another stage."""
        if getattr(self.parameters.all()[name], "shared_embedding", False):  # Megatron Core's attribute
            return None
        return self.parameters.ownership(name).virtual_stage(self.passes) // self.partition.num_stages

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.no_sync())
            yield

    def _start_grad_sync(self, *_: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.start_reductions()

    @contextlib.contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Inside the context, every rank has the current weights of its stage, also with --overlap-param-gather, and
        copies to host memory are done."""
        if self.wrapped is not None:
            megatron_core.gather_parameters(self.wrapped)
        self.leave_buffers()
        try:
            yield
        finally:
            if self.wrapped is not None:
                megatron_core.gather_in_forward(self.wrapped)

    def leave_buffers(self) -> None:
        """Wait for all copies of layers, and point their parameters to host memory until they compute again."""
        self._host_layers.leave_buffers()

    # ------------------------------------------------------------------------------------------------------------ step

    def zero_grad(self) -> None:
        """Set the gradient buffers to zero."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def set_learning_rate(self, scheduler: OptimizerParamScheduler) -> None:
        """Set the scheduler's present learning rate and weight decay for the coming step."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        scheduler.optimizer = SimpleNamespace(param_groups=groups)
        scheduler.step(0)  # sets the rates without counting a step
        scheduler.optimizer = None  # a reference would keep the optimizer of this phase alive

    def state(self, *, joins: bool = False) -> Iterator[ParamState]:
        """Yield the state of all parameters of the stage. With `joins` a collective, as of `CoreOptimizer.state`."""
        for optimizer, states in ((self.core, self.core.state(joins=joins)), (self.matrices, self.matrices.state())):
            yield from (each for each in states if self.optimizer_of(each.name) is optimizer)
        for index, (name, parameter) in enumerate(self.parameters.all().items()):
            part, momentum = replicas.shard_slice(parameter.numel()), self.outer_momenta.get(name)
            yield ParamState(
                group="outer",
                name=name,
                parameter=parameter,
                set=functools.partial(self._set_outer_momentum, name, part),
                tensors={} if momentum is None else {OUTER_MOMENTUM: momentum.float},
                start=part.start,
                is_divided=replicas.size() > 1,
                saver=index % replicas.size(),
            )

    def _set_outer_momentum(
        self, name: str, part: slice, tensors: Mapping[str, torch.Tensor], _: int, start: int | None = None
    ) -> None:
        for momentum in tensors.values():
            self.outer_momenta[name] = (momentum if start is not None else momentum.reshape(-1)[part]).clone()

    def rank_state(self) -> dict[str, Any]:
        """Return copies in host memory of this rank's state, for the same rank of a replica group that joins."""
        states = [
            (
                {name: read().to("cpu", copy=True) for name, read in each.tensors.items()},
                int(each.num_steps),
                each.start,
            )
            for each in self.state()
        ]
        return {"states": states, "loss_scaler": self.core.loss_scaler_state()}

    def load_rank_state(self, rank_state: Mapping[str, Any]) -> None:
        """Load the `rank_state` of another group, whose weights are loaded, while no block is active."""
        self.offloaded.shards, self.outer_momenta = {}, {}
        for matrix in self.matrices.matrices.values():
            matrix.state, matrix.offloaded = {}, {}
        for each, values in zip(self.state(), rank_state["states"], strict=True):
            each.set(*values)
        self.core.next_loss_scaler = rank_state["loss_scaler"]

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of this rank in the present phase, by field of `StepMetrics`.

        They are counted from live storages, and a shared storage counts once. In fp32 the main parameters are the
        weights and do not count as optimizer state.
        """
        frozen = self._host_layers
        weights = [weight for weight in self.model.parameters() if not frozen.is_on_host(weight)]
        weights += frozen.device_tensors()
        weight_buffers = [each.param_data for each in self.core.buffers() if each.param_data is not None]
        gradients = [gradient for optimizer in self.optimizers for gradient in optimizer.gradients()]
        state = [tensor for optimizer in self.optimizers for tensor in optimizer.state_tensors(on_host=False)]
        # by address: Megatron Core lists some of its tensors twice, and many are parts of one storage
        on_host = {
            each.data_ptr(): each.nbytes
            for optimizer in self.optimizers
            for each in optimizer.state_tensors(on_host=True)
        }
        return {
            "model_state_bytes": memory.storage_bytes([*weights, *weight_buffers, *gradients, *state]),
            "gradient_bytes": memory.storage_bytes(gradients),
            "optimizer_state_bytes": memory.storage_bytes(state, without=weights),
            "host_state_bytes": frozen.bytes_on_host() + sum(on_host.values()),
        }
