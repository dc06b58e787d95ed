"""The active block of this rank: its life from one switch to the next."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import get_model_config

from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import RunConfig
from megatron.bcd.model.builder import chunks_of
from megatron.bcd.optim import loss_scaler, step
from megatron.bcd.optim.block_state import BlockStateStore
from megatron.bcd.optim.main_params import main_params_from_rest, main_params_to_rest
from megatron.bcd.optim.matrix_rules import build_matrix_optimizer, is_muon, rules_of_phase
from megatron.bcd.optim.optimizer_params import ALWAYS_ACTIVE, chained_optimizers, param_groups
from megatron.bcd.optim.owned_parameters import OwnedParameters
from megatron.bcd.optim.param_shard import ParamShard, param_shards
from megatron.bcd.optim.phase_optimizer import build_optimizer, wrap_model
from megatron.bcd.optim.state_bytes import StateBytes, state_bytes, storage_bytes
from megatron.bcd.optim.switch_check import SwitchCheck
from megatron.bcd.runtime import memory, replicas
from megatron.bcd.runtime.compat import megatron_core

_CORE_PARAMETER_ATTRIBUTES = ("main_grad", "main_param", "main_param_sharded", "grad_added_to_main_grad")
"""What Megatron Core's DDP and optimizer attach to parameters."""


class ActiveBlock:
    """Owns what exists for a phase only: gradient buffers, main parameters and moments (docs/concepts.md).

    `build` freezes the other blocks, wraps the model in Megatron Core's DDP (buffers for active parameters only) and
    builds the optimizer. `dispose` frees all of it; the weights stay. Both are collectives, also for a rank that holds
    nothing of the block.

    `dispose` saves to host memory (`kept`) the moments, if --bcd-optimizer-state is host, and what 16-bit weights lack
    of their main parameters, if --bcd-main-params is host; the next `build` of the block restores it. The state of
    always-active parameters and fp16's loss scale continue from phase to phase.
    """

    def __init__(self, *, model: torch.nn.Module, config: RunConfig, partition: Partition, stage: int) -> None:
        self.model = model
        self.partition = partition
        self.stage = stage
        self.parameters = OwnedParameters(model, partition=partition, stage=stage)
        self.block: int | None = None
        self.num_zeros: int | None = None
        """--log-num-zeros-in-grad: of the last step; None if it was skipped."""
        self.wrapped: DistributedDataParallel | None = None
        self.optimizer: MegatronOptimizer | None = None
        self.kept = BlockStateStore(
            keeps_moments=config.bcd.bcd_optimizer_state == "host",
            keeps_main_params=config.bcd.bcd_main_params == "host",
        )
        self.matrices = build_matrix_optimizer(config, model, self.parameters)
        """Steps resting matrices and Muon's; None where there are none of both."""
        self._config = config
        self._model_config = get_model_config(model)
        self._loss_scaler_state: loss_scaler.LossScalerState | None = None
        self._switch_check: SwitchCheck | None = None
        self._in_buffers: list[torch.nn.Parameter] = []

    def build(self, block: int) -> None:
        """Make `block` the active one. A collective."""
        assert self.wrapped is None, "dispose() of the last phase comes first"
        self.block = block
        rules = rules_of_phase(self._config, self.parameters, block) if self.matrices else []
        elsewhere = {name for _, names, _ in rules for name in names}
        self.parameters.activate(block, without=elsewhere)
        self._in_buffers = list(self.parameters.active().values())
        self.wrapped = wrap_model(self.model, self._config)
        self.optimizer = build_optimizer(
            self.wrapped, self._config, always_active=self.parameters.always_active().values()
        )
        if self._loss_scaler_state is not None:
            self.set_loss_scaler_state(self._loss_scaler_state)
        self._connect()
        self.kept.restore(block, self.own_shards())
        self.kept.restore_always_active(self.always_active_shards())
        if self.matrices is not None:
            main_params_from_rest(self.matrices, self.own_shards(), self._rested_before(block))
            self.matrices.begin(rules)
        self._switch_check = SwitchCheck(self.optimizer, self.parameters, self.matrices, block=block, stage=self.stage)

    def dispose(self, *, is_end_of_run: bool = False) -> None:
        """Save what is kept between phases, and free gradients, optimizer state and buffers. A collective.

        At the end of the run nothing is kept.
        """
        assert self.wrapped is not None and self.block is not None, "build() comes first"
        self._gather_parameters()
        if not is_end_of_run:
            self._keep()
        if self.matrices is not None:
            self.matrices.end(keeps_momenta=self.kept.keeps_moments and not is_end_of_run)
        self._disconnect()
        in_buffers = self._in_buffers if self.partition.always_active else []
        megatron_core.drop_gradient_hooks(self.wrapped)
        for chunk in chunks_of(self.model):
            chunk.set_input_tensor(None)  # holds the last input that was received, and its gradient
        for parameter in self.model.parameters():
            parameter.grad = None
            for name in _CORE_PARAMETER_ATTRIBUTES:
                if hasattr(parameter, name):
                    delattr(parameter, name)
        self.wrapped = self.optimizer = self.block = self._switch_check = None
        gc.collect()  # wrapper, buckets and hooks form reference cycles
        for parameter in in_buffers:
            # the weight is a view of the buffer; always-active ones would keep this buffer alive beside the next
            parameter.data = parameter.data.clone()
        memory.release_cached_memory()

    def _keep(self) -> None:
        """Save the block's state for its next phase, and that of always-active parameters for the next block's."""
        assert self.block is not None
        self._loss_scaler_state = self.loss_scaler_state()
        rested_before = self._rested_before(self.block)
        self.kept.save(self.block, self.own_shards(), without_main_param=rested_before)
        if self.matrices is not None:
            main_params_to_rest(self.matrices, self.own_shards(), rested_before, is_sharded=self.is_sharded)
        if self.partition.always_active:
            self.kept.save_always_active(
                self.always_active_shards(),
                self.parameters.always_active(),
                group=replicas.group() if self.is_sharded else None,
            )

    def _rested_before(self, block: int) -> list[str]:
        """The block's 16-bit matrices that Megatron Core's optimizer steps now and the matrix optimizer otherwise."""
        if self.matrices is None or self._config.precision == "fp32" or is_muon(self._config):
            return []
        return [name for name in self.parameters.of_block(block) if name in self.matrices.matrices]

    def _connect(self) -> None:
        """Set the hooks of Megatron Core's schedule, as Megatron-LM's training loop does."""
        assert self.wrapped is not None and self.optimizer is not None
        model_config = self._model_config
        model_config.grad_scale_func = self.optimizer.scale_loss
        model_config.finalize_model_grads_func = finalize_model_grads
        if self._config.ddp.overlap_grad_reduce:
            model_config.no_sync_func = self._no_sync
            if model_config.pipeline_model_parallel_size > 1:
                model_config.grad_sync_func = self._start_grad_sync

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        assert self.wrapped is not None
        with self.wrapped.no_sync(), contextlib.nullcontext() if self.matrices is None else self.matrices.no_sync():
            yield

    def _start_grad_sync(self, *_: Any) -> None:
        assert self.wrapped is not None
        self.wrapped.start_grad_sync()
        if self.matrices is not None:
            self.matrices.start_reductions()

    def _disconnect(self) -> None:
        model_config = self._model_config
        model_config.grad_scale_func = model_config.finalize_model_grads_func = None
        model_config.no_sync_func = model_config.grad_sync_func = model_config.param_sync_func = None

    @contextlib.contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Inside, every rank holds the current weights of its stage, also with --overlap-param-gather."""
        self._gather_parameters()
        try:
            yield
        finally:
            if self.wrapped is not None:
                megatron_core.gather_in_forward(self.wrapped)

    def _gather_parameters(self) -> None:
        if self.wrapped is not None:
            megatron_core.gather_parameters(self.wrapped)

    def check_switch(self) -> str | None:
        """As `SwitchCheck.problem`."""
        assert self._switch_check is not None, "build() comes first"
        return self._switch_check.problem()

    def zero_grad(self) -> None:
        """Set the gradient buffers to zero."""
        assert self.wrapped is not None and self.optimizer is not None
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.matrices is not None:
            self.matrices.zero_grad()

    def step(self, *, skip_non_finite: bool) -> float | None:
        """As `step.clip_and_step`, for all that is updated."""
        optimizer = self.optimizer
        assert optimizer is not None
        self.num_zeros = None

        def count_zeros() -> None:
            self.num_zeros = step.num_zero_gradients(optimizer)

        on_clipped = count_zeros if self._config.report.log_num_zeros_in_grad else None
        return step.clip_and_step(optimizer, self.matrices, skip_non_finite=skip_non_finite, on_clipped=on_clipped)

    def scheduled(self) -> SimpleNamespace:
        """The parameter groups of all optimizers, for the learning-rate scheduler."""
        assert self.optimizer is not None
        matrices = [] if self.matrices is None else self.matrices.param_groups
        return SimpleNamespace(param_groups=[*self.optimizer.param_groups, *matrices])

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the learning rate of the block's own parameters, for the next step only.

        The scheduler must have set the rates since the last call. Always-active parameters and resting layers keep the
        global rate.
        """
        groups = [group for group in param_groups(self.optimizer) if not group.get(ALWAYS_ACTIVE)]
        for group in (*groups, *([] if self.matrices is None else self.matrices.groups_of_block())):
            group["lr"] *= factor

    def block_gradient_norm(self) -> float:
        """As `step.block_gradient_norm`."""
        assert self.optimizer is not None
        return step.block_gradient_norm(self.optimizer)

    def num_block_parameters(self) -> int:
        """As `step.num_block_parameters`."""
        assert self.optimizer is not None
        return step.num_block_parameters(self.optimizer)

    def loss_scale(self) -> float:
        """Factor of the loss; 1 without a loss scaler."""
        assert self.optimizer is not None
        return float(self.optimizer.get_loss_scale().item())

    def loss_scaler_state(self) -> loss_scaler.LossScalerState | None:
        """As `loss_scaler.get_state`."""
        return loss_scaler.get_state(self.optimizer)

    def set_loss_scaler_state(self, state: Mapping[str, float]) -> None:
        """As `loss_scaler.set_state`."""
        loss_scaler.set_state(self.optimizer, state)

    def remember_loss_scaler(self, state: Mapping[str, float] | None) -> None:
        """Let the next `build` start from this state of another run."""
        self._loss_scaler_state = None if state is None else dict(state)

    def state_bytes(self) -> StateBytes:
        """Bytes of the present phase: Megatron Core's objects, and gradients, momenta and low bits of the matrix
        optimizer."""
        counted = state_bytes(self.model, self.wrapped, self.optimizer)
        if self.matrices is None:
            return counted
        gradients = storage_bytes(self.matrices.gradients())
        state = storage_bytes(self.matrices.state_on_device())
        return replace(
            counted,
            model_state=counted.model_state + gradients + state,
            gradients=counted.gradients + gradients,
            optimizer_state=counted.optimizer_state + state,
        )

    def kept_bytes(self) -> int:
        """Bytes in host memory of what is kept of frozen blocks."""
        return self.kept.num_bytes + (0 if self.matrices is None else self.matrices.host_bytes)

    @property
    def is_muon(self) -> bool:
        """Whether Muon steps the active block's matrices."""
        return is_muon(self._config)

    @property
    def is_sharded(self) -> bool:
        """Whether the distributed optimizer shards each parameter's state over several replicas."""
        is_distributed = self._config.training.use_distributed_optimizer
        return is_distributed and replicas.size() > 1

    def own_shards(self) -> dict[str, ParamShard]:
        """This rank's optimizer state of the active block's own parameters, by name."""
        assert self.block is not None, "build() comes first"
        return param_shards(self.optimizers(), self.parameters.of_block(self.block))

    def always_active_shards(self) -> dict[str, ParamShard]:
        """This rank's optimizer state of always-active parameters, by name."""
        return param_shards(self.optimizers(), self.parameters.always_active())

    def held_main_params(self) -> dict[torch.Tensor, torch.Tensor] | None:
        """By weight, this rank's shards of main parameters that the optimizer holds itself; None if it does not.

        With --optimizer-cpu-offload, whose main parameters lie on the host, shards of the weights.
        """
        is_offloaded = self._config.optimizer.optimizer_cpu_offload
        if not (self._config.is_precision_aware or is_offloaded):
            return None
        return {
            one.parameter: one.weight if is_offloaded else one.main_param
            for one in (*self.own_shards().values(), *self.always_active_shards().values())
        }

    def optimizers(self) -> list[Any]:
        """Megatron Core's chained optimizers; none between phases."""
        return chained_optimizers(self.optimizer)
