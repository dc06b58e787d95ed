"""The active block of this rank: its life from one switch to the next, and its steps."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import get_model_config

from megatron.bcd.blocks.ownership import Ownership, ownership
from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import RunConfig
from megatron.bcd.model.builder import get_chunks, get_frozen_weights, unwrap_model
from megatron.bcd.optim.block_state import BlockStateStore
from megatron.bcd.optim.matrix_optimizer import build_matrix_optimizer, rules_of_phase
from megatron.bcd.optim.param_shard import (
    ALWAYS_ACTIVE,
    ParamShard,
    all_optimizer_params,
    chained_optimizers,
    param_shards,
)
from megatron.bcd.optim.phase_optimizer import build_optimizer, wrap_model
from megatron.bcd.optim.switch_check import SwitchCheck
from megatron.bcd.optim.update_rules import FACTORED
from megatron.bcd.runtime import collectives, device, memory, replicas
from megatron.bcd.runtime.compat import megatron_core

_CORE_PARAMETER_ATTRIBUTES = ("main_grad", "main_param", "main_param_sharded", "grad_added_to_main_grad")
"""What Megatron Core's DDP and optimizer attach to parameters."""

T = TypeVar("T", int, float)
Parameters = dict[str, torch.nn.Parameter]
"""By GPTModel's names, in its order."""


class ParametersByBlock:
    """The parameters of one pipeline stage, by the block that owns them.

    Raises:
        KeyError: the model has a parameter that no block owns.
    """

    def __init__(self, model: torch.nn.Module, *, partition: Partition, stage: int) -> None:
        self._parameters: Parameters = dict(unwrap_model(model).named_parameters())
        self._ownership = {name: ownership(name, partition=partition, stage=stage) for name in self._parameters}

    def of_block(self, block: int) -> Parameters:
        """Parameters that are active in the block's phases only."""
        return self._where(lambda owned: owned.block == block and not owned.is_always_active)

    def inactive(self, block: int) -> Parameters:
        """Matrices of layers that are updated without state in the block's phases (--bcd-inactive-update)."""
        return self._where(lambda owned: owned.is_stateless(block) and owned.module == "layer")

    def outside_layers(self) -> Parameters:
        """Embedding and head, if they are updated by the rule `factored` (--bcd-embedding-update)."""
        return self._where(lambda owned: owned.is_matrix and owned.module != "layer")

    def all(self) -> Parameters:
        """All of this stage."""
        return self._parameters

    def matrices(self) -> Parameters:
        """Matrices of this stage that a stateless update may step: those of all layers, and `outside_layers`."""
        return self._where(lambda owned: owned.is_matrix)

    def stateless_of(self, block: int | None) -> Parameters:
        """Matrices of the block's layers that are updated without state in the phases of other blocks; None: those of
        layers without a block, in every phase."""
        return self._where(lambda owned: bool(owned.stateless_in) and owned.block == block and owned.module == "layer")

    def always_active(self) -> Parameters:
        """Return the parameters that are active in every phase (--bcd-always-active)."""
        return self._where(lambda owned: owned.is_always_active)

    def active(self) -> Parameters:
        """Parameters that require a gradient now."""
        return {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}

    def activate(self, block: int, *, without: Container[str] = ()) -> None:
        """Require gradients of the block's and of always-active parameters, and freeze the others and those in
        `without`."""
        for name, owned in self._ownership.items():
            self._parameters[name].requires_grad_(owned.is_active(block) and name not in without)

    def _where(self, is_wanted: Callable[[Ownership], bool]) -> Parameters:
        return {name: self._parameters[name] for name, owned in self._ownership.items() if is_wanted(owned)}


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes that this rank holds, counted from live storages; a shared storage counts once."""

    model_state: int
    """Weights, gradients, main parameters and moments on the device."""
    gradients: int
    """Gradients on the device."""
    optimizer_state: int
    """Moments, momenta, low bits and main parameters on the device; in fp32 the main parameters are the weights and
    don't count."""
    offloaded: int
    """Main parameters, moments and gradients in host memory (--optimizer-cpu-offload)."""


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
        self.parameters = ParametersByBlock(model, partition=partition, stage=stage)
        self.block: int | None = None
        self.num_zeros: int | None = None
        """--log-num-zeros-in-grad: of the last step; None if it was skipped."""
        self.wrapped: DistributedDataParallel | None = None
        self.optimizer: MegatronOptimizer | None = None
        self._frozen_weights = get_frozen_weights(model)
        self.kept = BlockStateStore(
            places={} if self._frozen_weights is None else self._frozen_weights.residuals,
            are_shared=self._frozen_weights is not None and self._frozen_weights.is_shared_by_all,
            keeps_moments=config.bcd.bcd_optimizer_state == "host",
            keeps_main_params=config.bcd.bcd_main_params == "host",
        )
        self.matrices = build_matrix_optimizer(config, model, self.parameters.matrices())
        """Steps matrices by stateless updates, and Muon's; None where there are none of both."""
        self.outer_momenta: dict[str, torch.Tensor] = {}
        """Of the outer step of replica groups: of each exchanged parameter `replicas.shard_slice`, flat, in host
        memory."""
        self._config = config
        self._model_config = get_model_config(model)
        self._loss_scaler_state: Mapping[str, float] | None = None
        self._switch_check: SwitchCheck | None = None
        self._in_buffers: list[torch.nn.Parameter] = []

    def build(self, block: int) -> None:
        """Make `block` the active one. A collective."""
        assert self.wrapped is None, "dispose() of the last phase comes first"
        self.block = block
        rules = []
        if self.matrices is not None:
            matrices = self.parameters.matrices()
            of_block = [name for name in self.parameters.of_block(block) if name in matrices]
            rules = rules_of_phase(
                self._config,
                inactive=self.parameters.inactive(block),
                outside_layers=self.parameters.outside_layers(),
                of_block=of_block,
            )
        elsewhere = {name for _, names, _ in rules for name in names}
        self.parameters.activate(block, without=elsewhere)
        self._in_buffers = list(self.parameters.active().values())
        if self._frozen_weights is not None:
            self._frozen_weights.begin_phase(set(self._in_buffers))
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
            self._take_main_params(block)
            self.matrices.begin(rules)
        self._switch_check = SwitchCheck(
            self.optimizer,
            self.model.parameters(),
            self.matrices,
            streamed=set() if self._frozen_weights is None else self._frozen_weights.streamed_parameters(),
            block=block,
            stage=self.stage,
        )

    def dispose(self, *, is_end_of_run: bool = False) -> None:
        """Save what is kept between phases, and free gradients, optimizer state and buffers. A collective.

        At the end of the run nothing is kept.
        """
        assert self.wrapped is not None and self.block is not None, "build() comes first"
        megatron_core.gather_parameters(self.wrapped)
        if not is_end_of_run:
            self._keep()
        if self.matrices is not None:
            self.matrices.end(keeps_momenta=self.kept.keeps_moments and not is_end_of_run)
        self._disconnect()
        has_others = bool(self.partition.always_active) or self._frozen_weights is not None
        in_buffers = self._in_buffers if has_others else []
        megatron_core.drop_gradient_hooks(self.wrapped)
        for chunk in get_chunks(self.model):
            chunk.set_input_tensor(None)  # holds the last input that was received, and its gradient
        for parameter in self.model.parameters():
            parameter.grad = None
            for name in _CORE_PARAMETER_ATTRIBUTES:
                if hasattr(parameter, name):
                    delattr(parameter, name)
        self.wrapped = self.optimizer = self.block = self._switch_check = None
        if self._frozen_weights is not None:
            self._frozen_weights.end_phase()
        gc.collect()  # wrapper, buckets and hooks form reference cycles
        for parameter in in_buffers:
            if self._frozen_weights is not None and self._frozen_weights.is_on_host(parameter):
                continue
            # the weight is a view of the buffer, which it would keep alive for itself
            parameter.data = parameter.data.clone()
        memory.release_cached_memory()

    def _keep(self) -> None:
        """Save the block's state for its next phase, and that of always-active parameters for the next block's."""
        assert self.block is not None
        self._loss_scaler_state = self.loss_scaler_state()
        handed_over = self._stepped_elsewhere(self.block)
        self.kept.save(self.block, self.own_shards(), without_main_param=handed_over)
        if self.matrices is not None:
            self._hand_over_main_params(handed_over)
        if self.partition.always_active:
            self.kept.save_always_active(
                self.always_active_shards(),
                self.parameters.always_active(),
                group=replicas.group() if self.is_sharded else None,
            )

    def _stepped_elsewhere(self, block: int) -> list[str]:
        """The block's bf16 matrices that the matrix optimizer steps in the phases of other blocks.

        Megatron Core's optimizer, which shards their main parameters over the data-parallel ranks, steps them in the
        block's own; between both the main parameters change hands, and no bit is lost.
        """
        if self.matrices is None or self._config.precision == "fp32" or self.is_muon:
            return []
        return [name for name in self.parameters.of_block(block) if name in self.matrices.matrices]

    def _take_main_params(self, block: int) -> None:
        """Set the block's main parameters to the matrix optimizer's. A collective over ranks with the same weights."""
        assert self.matrices is not None
        shards = self.own_shards()
        for name in self._stepped_elsewhere(block):
            value = self.matrices.take_main_param(name).view(-1)
            if (shard := shards.get(name)) is not None:
                shard.set_main_param(value[shard.start : shard.end])

    @torch.no_grad()
    def _hand_over_main_params(self, names: Iterable[str]) -> None:
        """The opposite, at the end of the block's phase. A collective over the same ranks if they are sharded."""
        assert self.matrices is not None
        shards = self.own_shards()
        for name in names:
            shard = shards.get(name)
            if shard is not None and not self.is_sharded:
                value = shard.main_param
            else:
                mine, start = (None, 0) if shard is None else (shard.main_param, shard.start)
                weight = self.matrices.matrices[name].parameter
                value = collectives.join_shards(mine, start, like=weight, group=replicas.group(), rank=None)
            self.matrices.set_main_param(name, value)

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
        if self.wrapped is not None:
            megatron_core.gather_parameters(self.wrapped)
        try:
            yield
        finally:
            if self.wrapped is not None:
                megatron_core.gather_in_forward(self.wrapped)

    def begin_switch_check(self) -> None:
        """Remember the weights that `check_switch` compares with. Call it after all state of the phase is loaded."""
        assert self._switch_check is not None, "build() comes first"
        self._switch_check.begin()

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

    @torch.no_grad()
    def step(self, *, skip_non_finite: bool, num_tokens: float | None = None) -> float | None:
        """Clip the gradient and step all that is updated. A collective.

        Megatron Core's step with one more check. It is skipped after an overflow in fp16, and with `skip_non_finite` if
        a gradient is not finite. Matrices without a momentum are neither clipped nor part of the norm: their updates
        have a size of their own.

        `num_tokens` is the number of tokens of the global batch where the loss is their sum: Megatron Core divides the
        gradients in DDP's buffers by it, and those of matrices are divided here.

        Returns:
            L2 norm of the gradient before clipping, the same on every rank; None if the step was skipped.
        """
        optimizer, matrices = self.optimizer, self.matrices
        assert optimizer is not None
        self.num_zeros = None
        squares = None if matrices is None else matrices.reduce_gradients()
        if optimizer.prepare_grads():
            return None
        norm = float(optimizer.get_grad_norm())  # the CPU waits for the device
        with_state, without = (0.0, 0.0) if squares is None else squares.tolist()
        if matrices is not None:
            norm = math.sqrt(norm**2 + with_state)
        if skip_non_finite and not (math.isfinite(norm) and math.isfinite(without)):
            return None
        for each in self.optimizers():
            if not each.is_stub_optimizer and each.get_parameters() and each.config.clip_grad > 0.0:
                clip_grad_by_total_norm_fp32(
                    each.get_parameters(),
                    max_norm=each.config.clip_grad,
                    total_norm=norm,
                    use_decoupled_grad=each.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )
        if self._config.report.log_num_zeros_in_grad:
            self.num_zeros = self._count_zeros()
        optimizer.step_with_ready_grads()
        if not self._config.optimizer.optimizer_cpu_offload:
            optimizer.zero_grad()  # frees fp32 copies of 16-bit gradients
        if matrices is not None:
            max_norm = optimizer.config.clip_grad
            # as in Megatron Core's `clip_grad_by_total_norm_fp32`
            matrices.step(
                clip_coefficient=min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0.0 else 1.0,
                gradient_scale=replicas.group().size() / num_tokens if num_tokens else 1.0,  # they are means of ranks
            )
        return norm

    def _count_zeros(self) -> int:
        """Zeros in the clipped gradient of all that Megatron Core's optimizer steps in this phase, the same on every
        rank. Counted like the norm of a step. A collective."""
        total = 0
        for each in self.optimizers():
            gradients = _gradients(each, _counted_main_params(each, with_always_active=True))
            on_this_rank = sum(gradient.numel() - int(torch.count_nonzero(gradient)) for gradient in gradients)
            total += _sum_over(each.get_grad_stats_parallel_group(), on_this_rank)
        return total

    def scheduled(self) -> SimpleNamespace:
        """The parameter groups of all optimizers, for the learning-rate scheduler."""
        assert self.optimizer is not None
        matrices = [] if self.matrices is None else self.matrices.param_groups
        return SimpleNamespace(param_groups=[*self.optimizer.param_groups, *matrices])

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the learning rate of the block's own parameters, for the next step only.

        The scheduler must have set the rates since the last call. Always-active parameters and inactive layers keep the
        global rate.
        """
        of_matrices = [] if self.matrices is None else self.matrices.param_groups
        groups = [group for group in of_matrices if group["is_of_block"]]
        for each in self.optimizers():
            if not each.is_stub_optimizer:
                groups += [group for group in each.optimizer.param_groups if not group.get(ALWAYS_ACTIVE)]
        for group in groups:
            group["lr"] *= factor

    @torch.no_grad()
    def block_gradient_norm(self) -> float:
        """L2 norm of the gradient of the block's own parameters, unscaled and unclipped, the same on every rank.

        A collective over all ranks, for use after a backward pass instead of a step. Like the norm of a step, it counts
        tensor-parallel duplicates and the tied copy once. inf or NaN if the gradient is not finite.
        """
        assert self.optimizer is not None
        scaler_state = self.loss_scaler_state()
        self.optimizer.prepare_grads()
        if scaler_state is not None:  # no step follows, so an overflow must not change the loss scale
            self.set_loss_scaler_state(scaler_state)
        sum_of_squares = 0.0
        for each in self.optimizers():
            gradients = _gradients(each, _counted_main_params(each, with_always_active=False))
            group = each.get_grad_stats_parallel_group()
            sum_of_squares += get_grad_norm_fp32(gradients, grad_stats_parallel_group=group) ** 2
        return math.sqrt(sum_of_squares)

    def num_block_parameters(self) -> int:
        """Number of the block's own parameters over all ranks, counted like `block_gradient_norm`. A collective."""
        total = 0
        for each in self.optimizers():
            on_this_rank = sum(one.numel() for one in _counted_main_params(each, with_always_active=False))
            total += _sum_over(each.get_grad_stats_parallel_group(), on_this_rank)
        return total

    @torch.no_grad()
    def params_norm(self) -> float:
        """L2 norm of the weights of the whole model, active and frozen (--log-params-norm), the same on every rank. A
        collective.

        As stock Megatron-LM counts: tensor-parallel duplicates and the tied copy once, and where a 16-bit weight has a
        main parameter now, that. The weights must be current on every rank.
        """
        held = self._held_main_params()
        whole, sharded = 0.0, 0.0
        for weight in self.model.parameters():
            if not (param_is_not_shared(weight) and param_is_not_tensor_parallel_duplicate(weight)):
                continue
            has_main = weight.dtype != torch.float32 and hasattr(weight, "main_param")
            if not has_main:
                whole += _sum_of_squares(weight)
            elif not getattr(weight, "main_param_sharded", False):
                whole += _sum_of_squares(weight.main_param)
            elif (shard := weight.main_param if held is None else held.get(weight)) is not None:
                sharded += _sum_of_squares(shard)
        over_shards = _sum_over(replicas.group(), sharded)
        return math.sqrt(_sum_over(parallel_state.get_model_parallel_group(), whole + over_shards))

    def loss_scale(self) -> float:
        """Factor of the loss; 1 without a loss scaler."""
        assert self.optimizer is not None
        return float(self.optimizer.get_loss_scale().item())

    def loss_scaler_state(self) -> dict[str, float] | None:
        """fp16's loss scale and its counters, which continue from phase to phase; None without a loss scaler."""
        scalers = [getattr(each, "grad_scaler", None) for each in self.optimizers()]
        state = scalers[0].state_dict() if scalers and scalers[0] else None
        return {name: float(value) for name, value in state.items()} if state else None

    def set_loss_scaler_state(self, state: Mapping[str, float]) -> None:
        """Load what `loss_scaler_state` returned."""
        for each in self.optimizers():
            each.grad_scaler.load_state_dict(
                {name: torch.tensor([value]) if name == "scale" else int(value) for name, value in state.items()}
            )

    def remember_loss_scaler(self, state: Mapping[str, float] | None) -> None:
        """Let the next `build` start from this state of another run."""
        self._loss_scaler_state = state

    def state_bytes(self) -> StateBytes:
        """Bytes of the present phase: Megatron Core's objects, and those of the matrix optimizer."""
        weights: list[torch.Tensor] = list(self.model.parameters())
        if (frozen := self._frozen_weights) is not None:
            weights = [weight for weight in weights if not frozen.is_on_host(weight)] + list(frozen.device_tensors())
        buffers = [] if self.wrapped is None else self.wrapped.buffers
        parameter_buffers = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
        gradients = [buffer.grad_data for buffer in buffers if buffer.grad_data is not None]
        on_device: list[torch.Tensor] = []
        on_host: list[torch.Tensor] = []
        for one in all_optimizer_params(self.optimizer):
            state = on_host if one.on_host else on_device
            state += [one.stepped, *(value for value in one.state.values() if torch.is_tensor(value))]
            if one.stepped.grad is not None:
                (on_host if one.on_host else gradients).append(one.stepped.grad)
        if self.matrices is not None:
            gradients += self.matrices.gradients()
            on_device += self.matrices.state_on_device()
        return StateBytes(
            model_state=_storage_bytes([*weights, *parameter_buffers, *gradients, *on_device]),
            gradients=_storage_bytes(gradients),
            optimizer_state=_storage_bytes(on_device, without=weights),
            offloaded=_storage_bytes(on_host),
        )

    def kept_bytes(self) -> int:
        """Bytes in host memory: frozen weights (--bcd-frozen-weights), and what is kept of frozen blocks' state."""
        frozen = 0 if self._frozen_weights is None else self._frozen_weights.bytes_on_host()
        return frozen + self.kept.num_bytes + (0 if self.matrices is None else self.matrices.host_bytes)

    @property
    def is_muon(self) -> bool:
        """Whether Muon steps the active block's matrices."""
        return self._config.is_muon

    @property
    def has_factored_layers(self) -> bool:
        """Whether the rule `factored` steps matrices of layers."""
        return self._config.bcd.bcd_inactive_update == FACTORED

    @property
    def is_sharded(self) -> bool:
        """Whether the distributed optimizer shards each parameter's state over several ranks."""
        is_distributed = self._config.training.use_distributed_optimizer
        return is_distributed and replicas.size() > 1

    def own_shards(self) -> dict[str, ParamShard]:
        """This rank's optimizer state of the active block's own parameters, by name."""
        assert self.block is not None, "build() comes first"
        return param_shards(self.optimizers(), self.parameters.of_block(self.block))

    def always_active_shards(self) -> dict[str, ParamShard]:
        """This rank's optimizer state of always-active parameters, by name."""
        return param_shards(self.optimizers(), self.parameters.always_active())

    def _held_main_params(self) -> dict[torch.Tensor, torch.Tensor] | None:
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


def _gradients(optimizer: Any, stepped: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that the optimizer will read, of what it steps."""
    is_decoupled = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    gradients = (getattr(tensor, "decoupled_grad" if is_decoupled else "grad", None) for tensor in stepped)
    return [gradient for gradient in gradients if gradient is not None]


def _counted_main_params(optimizer: Any, *, with_always_active: bool) -> Iterator[torch.Tensor]:
    """Main parameters that the optimizer steps, without those that another rank counts."""
    for group in [] if optimizer.is_stub_optimizer else optimizer.optimizer.param_groups:
        for main_param in [] if group.get(ALWAYS_ACTIVE) and not with_always_active else group["params"]:
            if param_is_not_shared(main_param) and param_is_not_tensor_parallel_duplicate(
                main_param, getattr(optimizer, "tp_group", None)
            ):
                yield main_param


def _sum_over(group: torch.distributed.ProcessGroup, value: T) -> T:
    """The sum of an int, or of a float in fp32, over the ranks of a group. A collective over it."""
    total = torch.tensor(value, device=device.current())
    torch.distributed.all_reduce(total, group=group)
    return type(value)(total)


def _sum_of_squares(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) ** 2


def _storage_bytes(tensors: Iterable[torch.Tensor], *, without: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of the tensors' storages, without those of other tensors."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    for tensor in without:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())
