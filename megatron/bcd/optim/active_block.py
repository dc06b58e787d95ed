"""The active block of this rank: what freezes, what has gradients and optimizer state, and that it is freed at the
switch."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import get_model_config

from megatron.bcd.blocks.ownership import Ownership, ownership
from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import RunConfig, core_keywords
from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.model.transformer_config import DTYPES
from megatron.bcd.optim.block_state import BlockStateStore
from megatron.bcd.optim.fingerprint import Watch, fingerprint, storage_bytes
from megatron.bcd.optim.optimizer_params import OptimizerParam, optimizer_params
from megatron.bcd.optim.param_shard import ParamShard, param_shards
from megatron.bcd.runtime import collectives, device, memory

_BUILT_PARAMETER_ATTRIBUTES = ("main_grad", "main_param", "main_param_sharded", "grad_added_to_main_grad")
_ALWAYS_ACTIVE = "bcd_always_active"
"""Of a parameter, and of the optimizer's groups of such parameters: active in every phase (--bcd-always-active)."""


class ActiveBlock:
    """One owner of everything that exists only for a phase (docs/concepts.md).

    `build` freezes, wraps the model in Megatron Core's DDP (buffers for the active parameters only) and builds the
    optimizer; `dispose` frees all of it, and the weights stay. Both are collectives: every rank calls them, also a
    rank that holds nothing of the block. In fp16 the dynamic loss scale goes on from phase to phase.

    `dispose` leaves in host memory (`kept`) what --bcd-optimizer-state says and what 16-bit weights lack of their
    main parameters; `build` of the same block brings it back. What is always active has one state for the whole run.
    """

    def __init__(self, *, model: torch.nn.Module, config: RunConfig, partition: Partition, stage: int) -> None:
        self.model = model
        self.partition = partition
        self.stage = stage
        self.block: int | None = None
        self.wrapped: DistributedDataParallel | None = None
        self.optimizer: MegatronOptimizer | None = None
        self.kept = BlockStateStore(moments=config.bcd.bcd_optimizer_state == "host")
        self._config = config
        self._model_config = get_model_config(model)
        self._loss_scaler_state: dict[str, float] | None = None
        self._watch: Watch | None = None

    def build(self, block: int) -> None:
        """Make `block` the active one."""
        assert self.wrapped is None, "dispose() of the phase before comes first"
        self.block = block
        for name, parameter in unwrap_model(self.model).named_parameters():
            parameter.requires_grad_(self._ownership(name).is_active(block))
        self.wrapped = DistributedDataParallel(
            config=self._model_config, ddp_config=self._ddp_config(), module=self.model
        )
        self.optimizer = self._build_optimizer()
        for optimizer in self.optimizers():
            if not optimizer.get_parameters():
                # nothing to step here, but this rank still takes shard in every reduction
                optimizer.is_stub_optimizer = True
        if self._loss_scaler_state is not None:
            self.set_loss_scaler_state(self._loss_scaler_state)
        self._connect()
        self.kept.bring_back(block, self.own_shards())
        self.kept.bring_back_always_active(self.always_active_shards())
        self._watch = Watch(
            main_params=fingerprint(self._own_main_params()),
            frozen=fingerprint(self._frozen()),
            has_main_params=any(main_param.numel() for main_param in self._own_main_params()),
        )

    def dispose(self) -> None:
        """Hand over what is kept, and free gradients, optimizer state and buffers; on the device only weights stay."""
        assert self.wrapped is not None and self.block is not None, "build() comes first"
        self.pause_parameter_gather()
        self._loss_scaler_state = self.loss_scaler_state()
        self.kept.keep(self.block, self.own_shards())
        if self.partition.always_active:
            self.kept.keep_always_active(
                self.always_active_shards(),
                self.always_active_parameters(),
                group=parallel_state.get_data_parallel_group() if self.is_cut else None,
            )
        model_config = self._model_config
        model_config.grad_scale_func = model_config.finalize_model_grads_func = None
        model_config.no_sync_func = model_config.grad_sync_func = model_config.param_sync_func = None
        in_buffer = list(self.active_parameters().values()) if self.partition.always_active else []
        self.wrapped.grad_accs.clear()
        unwrap_model(self.model).set_input_tensor(None)  # a stage keeps what it received last, and its gradient
        for parameter in self.model.parameters():
            parameter.grad = None
            for name in _BUILT_PARAMETER_ATTRIBUTES:
                if hasattr(parameter, name):
                    delattr(parameter, name)
        self.wrapped = self.optimizer = self.block = self._watch = None
        gc.collect()  # wrapper, buckets and hooks refer to each other
        for parameter in in_buffer:  # else the buffer would live as long as the block, and the next one has a place for
            parameter.data = parameter.data.clone()  # always-active parameters as well
        memory.release_cached_memory()

    def _ddp_config(self) -> DistributedDataParallelConfig:
        ddp = self._config.ddp
        bucket_size = ddp.bucket_size or max(40_000_000, 1_000_000 * parallel_state.get_data_parallel_world_size())
        return DistributedDataParallelConfig(
            **{**core_keywords(ddp), "bucket_size": bucket_size if ddp.overlap_grad_reduce else None}
        )

    def _optimizer_config(self) -> OptimizerConfig:
        return OptimizerConfig(**core_keywords(self._config.optimizer), params_dtype=DTYPES[self._config.precision])

    def _build_optimizer(self) -> MegatronOptimizer:
        """What is always active steps more often than any block: groups of its own, because fused optimizers count
        steps by group. Where nothing is, the groups are stock's."""
        config = self._optimizer_config()
        if not self.partition.always_active:
            optimizer = get_megatron_optimizer(config, [self.wrapped])
            if config.optimizer_cpu_offload:  # of the two that Megatron Core makes, the first one's hooks hold it
                gc.collect()
                memory.release_cached_memory()
            return optimizer
        for parameter in self.always_active_parameters().values():
            setattr(parameter, _ALWAYS_ACTIVE, True)
        overrides = get_standard_config_overrides(config) | {ParamKey(attr=_ALWAYS_ACTIVE): {_ALWAYS_ACTIVE: True}}
        return get_megatron_optimizer(config, [self.wrapped], config_overrides=overrides)

    def _connect(self) -> None:
        """Hand the phase's wrapper and optimizer to Megatron Core's schedule, as its training loop does."""
        assert self.wrapped is not None and self.optimizer is not None
        model_config = self._model_config
        model_config.grad_scale_func = self.optimizer.scale_loss
        model_config.finalize_model_grads_func = finalize_model_grads
        if self._config.ddp.overlap_grad_reduce:
            model_config.no_sync_func = self.wrapped.no_sync
            if self._model_config.pipeline_model_parallel_size > 1:
                model_config.grad_sync_func = self.wrapped.start_grad_sync

    def pause_parameter_gather(self) -> None:
        """With --overlap-param-gather: finish gathering the weights and gather no more in forward passes, so that they
        are whole."""
        if self.wrapped is not None and self.wrapped.use_forward_hook and self.wrapped.remove_forward_pre_hook_handles:
            self.wrapped.disable_forward_pre_hook(param_sync=True)

    @contextlib.contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Inside, every rank holds all weights of its stage, also with --overlap-param-gather."""
        self.pause_parameter_gather()
        try:
            yield
        finally:
            self.resume_parameter_gather()

    def resume_parameter_gather(self) -> None:
        """The opposite of `pause_parameter_gather`."""
        if (
            self.wrapped is not None
            and self.wrapped.use_forward_hook
            and not self.wrapped.remove_forward_pre_hook_handles
        ):
            self.wrapped.enable_forward_pre_hook()

    @torch.no_grad()
    def step(self, *, skip_non_finite: bool) -> float | None:
        """Clip the gradient and step the optimizer; the gradient's norm before clipping.

        None where the step was skipped, the same on every rank: an overflow in fp16, or, with `skip_non_finite`, a
        norm that is not finite. It is Megatron Core's own step with that check between its shards.
        """
        assert self.optimizer is not None
        if self.optimizer.prepare_grads():
            return None
        norm = float(self.optimizer.get_grad_norm())
        if skip_non_finite and not math.isfinite(norm):
            return None
        for optimizer in self.optimizers():
            if not optimizer.is_stub_optimizer and optimizer.get_parameters() and optimizer.config.clip_grad > 0.0:
                clip_grad_by_total_norm_fp32(
                    optimizer.get_parameters(),
                    max_norm=optimizer.config.clip_grad,
                    total_norm=norm,
                    use_decoupled_grad=optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )
        self.optimizer.step_with_ready_grads()
        return norm

    def zero_grad(self) -> None:
        assert self.wrapped is not None and self.optimizer is not None
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the learning rate of the block's own parameters for the coming step; what is always active keeps
        the global one. The scheduler must have set the rates since the last call (`scheduler.step(0)` sets them)."""
        for group in self._own_groups():
            group["lr"] *= factor

    @torch.no_grad()
    def block_gradient_norm(self) -> float:
        """L2 norm of the gradient of the block's own parameters over all ranks, unscaled and before clipping; the same
        on every rank. To be called after a backward pass and its reductions, in place of a step. A collective.

        As in the norm of a step, tensor-parallel duplicates and the tied copy count once. inf or NaN where the gradient
        is not finite.
        """
        assert self.optimizer is not None
        loss_scaler = self.loss_scaler_state()
        self.optimizer.prepare_grads()
        if loss_scaler is not None:  # no step follows: what was seen must not change the scale
            self.set_loss_scaler_state(loss_scaler)
        squares = 0.0
        for optimizer in self.optimizers():
            gradients = [main_param.grad for main_param in self._counted_once(optimizer) if main_param.grad is not None]
            group = optimizer.get_grad_stats_parallel_group()
            squares += get_grad_norm_fp32(gradients, grad_stats_parallel_group=group) ** 2
        return math.sqrt(squares)

    def num_block_parameters(self) -> int:
        """The block's own parameters over all ranks, counted as `block_gradient_norm` does. A collective."""
        total = 0
        for optimizer in self.optimizers():
            mine = sum(main_param.numel() for main_param in self._counted_once(optimizer))
            count = torch.tensor(mine, dtype=torch.int64, device=device.current())
            torch.distributed.all_reduce(count, group=optimizer.get_grad_stats_parallel_group())
            total += int(count.item())
        return total

    def _counted_once(self, optimizer: Any) -> Iterator[torch.Tensor]:
        """The optimizer's main parameters of the block's own parameters, but for those that another rank counts."""
        for group in [] if optimizer.is_stub_optimizer else optimizer.optimizer.param_groups:
            for main_param in [] if group.get(_ALWAYS_ACTIVE) else group["params"]:
                if param_is_not_shared(main_param) and param_is_not_tensor_parallel_duplicate(
                    main_param, getattr(optimizer, "tp_group", None)
                ):
                    yield main_param

    def loss_scaler_state(self) -> dict[str, float] | None:
        """fp16's dynamic loss scale and its counters; None where there is none."""
        scalers = [getattr(optimizer, "grad_scaler", None) for optimizer in self.optimizers()]
        state = scalers[0].state_dict() if scalers and scalers[0] else None
        return {name: float(value) for name, value in state.items()} if state else None

    def set_loss_scaler_state(self, state: Mapping[str, float]) -> None:
        """Take up what `loss_scaler_state` gave, on every optimizer of the phase."""
        for optimizer in self.optimizers():
            optimizer.grad_scaler.load_state_dict(
                {name: torch.tensor([value]) if name == "scale" else int(value) for name, value in state.items()}
            )

    def remember_loss_scaler(self, state: Mapping[str, float] | None) -> None:
        """Let the next `build` begin with what `loss_scaler_state` gave in another run."""
        self._loss_scaler_state = None if state is None else dict(state)

    def loss_scale(self) -> float:
        assert self.optimizer is not None
        return float(self.optimizer.get_loss_scale().item())

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Every live tensor of this rank's model state: weights, gradients, main parameters, optimizer state."""
        yield from self.model.parameters()
        if self.wrapped is not None:
            yield from (buffer.param_data for buffer in self.wrapped.buffers if buffer.param_data is not None)
        yield from self._gradients()
        yield from self._optimizer_state()

    def model_state_bytes(self) -> int:
        """Bytes of this rank's model state, counted from the storages that are alive (shared ones once)."""
        return storage_bytes(self.state_tensors())

    def gradient_bytes(self) -> int:
        """Of these, the gradient buffers."""
        return storage_bytes(self._gradients())

    def optimizer_state_bytes(self) -> int:
        """Of these, moments and main parameters; in fp32 the weights themselves are the main parameters and don't
        count."""
        weights = {tensor.untyped_storage().data_ptr() for tensor in self.model.parameters()}
        return storage_bytes(
            tensor for tensor in self._optimizer_state() if tensor.untyped_storage().data_ptr() not in weights
        )

    def host_bytes(self) -> int:
        """Bytes of this rank's optimizer state in host memory, no part of the model state: what is kept of frozen
        blocks, and with --optimizer-cpu-offload main parameters, moments and gradients of what is stepped there."""
        offloaded = list(self._optimizer_state(on_host=True))
        gradients = (
            one.main_param.grad for one in self._optimizer_params() if one.on_host and one.main_param.grad is not None
        )
        return self.kept.num_bytes + storage_bytes([*offloaded, *gradients])

    def _gradients(self) -> Iterator[torch.Tensor]:
        for buffer in self.wrapped.buffers if self.wrapped is not None else ():
            if buffer.grad_data is not None:
                yield buffer.grad_data
        for one in self._optimizer_params():
            if not one.on_host and one.main_param.grad is not None:
                yield one.main_param.grad

    def _optimizer_state(self, *, on_host: bool = False) -> Iterator[torch.Tensor]:
        for one in self._optimizer_params():
            if one.on_host == on_host:
                yield one.main_param
                yield from (value for value in one.state.values() if torch.is_tensor(value))

    def check_switch(self) -> str | None:
        """Compare the weights with those at the beginning of the phase, on all ranks together.

        To be called once a phase, after the first step whose learning rate and gradient are not zero. Returns what is
        wrong, the same text on every rank: a stage that holds part of the block but none of whose main parameters
        changed (those of always-active parameters don't count), or a rank whose frozen weights changed. None if all is
        well.
        """
        assert self._watch is not None, "build() comes first"
        mine = {
            "stage": self.stage,
            "has_masters": self._watch.has_main_params,
            "changed": fingerprint(self._own_main_params()) != self._watch.main_params,
            "thawed": fingerprint(self._frozen()) != self._watch.frozen,
        }
        ranks = collectives.gather_objects(mine)
        stages = {rank["stage"] for rank in ranks if rank["has_masters"]}
        idle = sorted(stages - {rank["stage"] for rank in ranks if rank["changed"]})
        thawed = [index for index, rank in enumerate(ranks) if rank["thawed"]]
        if idle or not stages:
            return f"block {self.block} is active, but its weights on pipeline stage(s) {idle} did not change in a step"
        if thawed:
            return f"block {self.block} is active, but frozen weights changed on rank(s) {thawed}"
        return None

    @property
    def is_cut(self) -> bool:
        """Whether the distributed optimizer cuts each parameter's state into shards, one per data-parallel rank."""
        is_distributed = self._config.training.use_distributed_optimizer
        return is_distributed and parallel_state.get_data_parallel_world_size() > 1

    def own_parameters(self, block: int) -> dict[str, torch.nn.Parameter]:
        """This rank's parameters that are active in the block's phases only, by GPTModel's names, in its order."""
        return {
            name: parameter
            for name, parameter in unwrap_model(self.model).named_parameters()
            if (owned := self._ownership(name)).block == block and not owned.is_always_active
        }

    def always_active_parameters(self) -> dict[str, torch.nn.Parameter]:
        """This rank's parameters that are active in every phase."""
        return {
            name: parameter
            for name, parameter in unwrap_model(self.model).named_parameters()
            if self._ownership(name).is_always_active
        }

    def _ownership(self, name: str) -> Ownership:
        return ownership(name, partition=self.partition, stage=self.stage)

    def own_shards(self) -> dict[str, ParamShard]:
        """This rank's optimizer state of the active block's own parameters."""
        assert self.block is not None, "build() comes first"
        return param_shards(self.optimizers(), self.own_parameters(self.block))

    def always_active_shards(self) -> dict[str, ParamShard]:
        """This rank's optimizer state of what is always active."""
        return param_shards(self.optimizers(), self.always_active_parameters())

    def active_parameters(self) -> dict[str, torch.nn.Parameter]:
        """By GPTModel's names, in the model's order."""
        return {name: p for name, p in unwrap_model(self.model).named_parameters() if p.requires_grad}

    def optimizers(self) -> list[Any]:
        """Megatron Core's optimizers of the phase."""
        return list(getattr(self.optimizer, "chained_optimizers", []))

    def _optimizer_params(self) -> Iterator[OptimizerParam]:
        """The tensors that the optimizer steps: in 16-bit precision fp32 copies, this rank's shard of them."""
        for optimizer in self.optimizers():
            if not optimizer.is_stub_optimizer:
                yield from optimizer_params(optimizer.optimizer).values()

    def _own_groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self.optimizers():
            if not optimizer.is_stub_optimizer:
                yield from (group for group in optimizer.optimizer.param_groups if not group.get(_ALWAYS_ACTIVE))

    def _own_main_params(self) -> Iterator[torch.Tensor]:
        """Of the block's own parameters."""
        yield from (one.main_param for one in self._optimizer_params() if not one.group.get(_ALWAYS_ACTIVE))

    def _frozen(self) -> Iterator[torch.Tensor]:
        return (parameter for parameter in self.model.parameters() if not parameter.requires_grad)
