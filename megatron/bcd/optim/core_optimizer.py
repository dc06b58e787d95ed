"""Steps the active block and always-active parameters with Megatron Core's DDP and optimizer."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron.bcd.config import RunConfig
from megatron.bcd.model.builder import get_chunks, get_host_layers
from megatron.bcd.optim.block_state import BlockStateStore
from megatron.bcd.optim.param_shard import ParamShard, param_shards
from megatron.bcd.optim.parameters import Parameters, ParametersByBlock
from megatron.bcd.optim.phase_optimizer import build_optimizer, wrap_model
from megatron.bcd.optim.state import ALWAYS, ParamState
from megatron.bcd.runtime import collectives, device, replicas
from megatron.bcd.runtime.compat import megatron_core

_CORE_PARAMETER_ATTRIBUTES = ("main_grad", "main_param", "main_param_sharded", "grad_added_to_main_grad")
"""Attributes that Megatron Core's DDP and optimizer set on parameters."""


class CoreOptimizer:
    """Owns the DDP wrapper, the optimizer and the optimizer state of the active block and of always-active parameters.

    `begin` builds wrapper and optimizer for one phase, `end` frees them. `offloaded` holds the state of frozen blocks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: RunConfig,
        parameters: ParametersByBlock,
    ) -> None:
        self.offloaded = BlockStateStore(config, get_host_layers(model))
        self.block: int | None = None
        self.wrapped: DistributedDataParallel | None = None
        self.block_parameters: Parameters = {}
        """Parameters that only the active block owns, by name."""
        self.shards: dict[str, ParamShard] = {}
        """This rank's optimizer state of `block_parameters` and of always-active parameters, by name."""
        self.num_zeros: int | None = None
        """--log-num-zeros-in-grad: zeros in the gradient of the last step; None if it was skipped."""
        self.next_loss_scaler: Mapping[str, float] | None = None
        """The state of fp16's loss scale with which the next `begin` starts."""
        self._model, self._config, self._parameters = model, config, parameters
        self._optimizer: MegatronOptimizer | None = None

    @property
    def optimizer(self) -> MegatronOptimizer:
        """Megatron Core's optimizer of this phase."""
        assert self._optimizer is not None, "no block is active"
        return self._optimizer

    def optimizers(self) -> list[Any]:
        """Return the optimizers that Megatron Core chains; none between phases."""
        return list(getattr(self._optimizer, "chained_optimizers", []))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of this phase. The scheduler sets their `lr` and `weight_decay`."""
        return list(self.optimizer.param_groups)

    # ---------------------------------------------------------------------------------------------------------- phase

    def begin(self, block: int) -> None:
        """Build DDP and optimizer for the parameters that require a gradient, and restore their state. A collective."""
        self.block = block
        self.wrapped = wrap_model(self._model, self._config)
        always_active = self._parameters.always_active()
        self._optimizer = build_optimizer(self.wrapped, self._config, always_active=always_active.values())
        if self.next_loss_scaler is not None:
            state = {name: int(value) for name, value in self.next_loss_scaler.items()}
            scale = torch.tensor([self.next_loss_scaler["scale"]])
            for each in self.optimizers():
                each.grad_scaler.load_state_dict(state | {"scale": scale})
        self.block_parameters = self._parameters.owned_by(block)
        self.shards = param_shards(self.optimizers(), self.block_parameters | always_active)
        self.offloaded.restore(self.shards, self.block_parameters | always_active)

    def save(self) -> None:
        """Save the state that outlives the phase."""
        self.next_loss_scaler = self.loss_scaler_state()
        self.offloaded.save(self.shards, self._parameters.always_active())

    def end(self) -> None:
        """Free wrapper, optimizer and gradients. The weights stay."""
        assert self.wrapped is not None
        megatron_core.drop_gradient_hooks(self.wrapped)
        for chunk in get_chunks(self._model):
            chunk.set_input_tensor(None)  # holds the last input that was received, and its gradient
        for parameter in self._model.parameters():
            parameter.grad = None
            for name in _CORE_PARAMETER_ATTRIBUTES:
                if hasattr(parameter, name):
                    delattr(parameter, name)
        self.wrapped = self._optimizer = self.block = None
        self.block_parameters, self.shards = {}, {}

    # ------------------------------------------------------------------------------------------------------------ step

    def zero_grad(self) -> None:
        """Set the gradient buffers to zero."""
        assert self.wrapped is not None
        self.wrapped.zero_grad_buffer()
        if self._config.optimizer.optimizer_cpu_offload:
            self.optimizer.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside the context, gradients are not reduced, because more microbatches follow."""
        assert self.wrapped is not None
        return self.wrapped.no_sync()

    def start_reductions(self) -> None:
        """Start to reduce all gradients of this step. A collective."""
        assert self.wrapped is not None
        self.wrapped.start_grad_sync()

    def gradient_norm(self) -> float | None:
        """Prepare the reduced gradients, and return their L2 norm before clipping. The CPU waits for the device.

        None if they overflowed in fp16, so that no step may follow.
        """
        self.num_zeros = None
        return None if self.optimizer.prepare_grads() else float(self.optimizer.get_grad_norm())

    @torch.no_grad()
    def step(self, *, norm: float, gradient_scale: float) -> None:
        """Clip by `norm`, the L2 norm of all clipped gradients, and step. A collective.

        `gradient_scale` has no effect: Megatron Core has scaled the gradients in DDP's buffers.
        """
        for each in self.optimizers():
            if not each.is_stub_optimizer and each.get_parameters() and each.config.clip_grad > 0.0:
                clip_grad_by_total_norm_fp32(
                    each.get_parameters(),
                    max_norm=each.config.clip_grad,
                    total_norm=norm,
                    use_decoupled_grad=each.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )
        if self._config.report.log_num_zeros_in_grad:
            self.num_zeros = int(sum(each.count_zeros() for each in self.optimizers()))
        self.optimizer.step_with_ready_grads()
        if not self._config.optimizer.optimizer_cpu_offload:
            self.optimizer.zero_grad()  # frees fp32 copies of 16-bit gradients

    # ----------------------------------------------------------------------------------------------------------- norms

    @torch.no_grad()
    def params_norm(self) -> float:
        """Return the L2 norm of the weights of the whole model, active and frozen (--log-params-norm). A collective.

        Like stock Megatron-LM, count tensor-parallel duplicates and the tied copy once. For a 16-bit weight that has a
        main parameter now, count that instead. The weights must be current on every rank.
        """
        # --optimizer-cpu-offload: main parameters are on the host, and shards of the weights stand for them
        is_offloaded = self._config.optimizer.optimizer_cpu_offload
        by_weight = {shard.parameter: shard.weight for shard in self.shards.values()} if is_offloaded else None
        whole, sharded = [0.0, 0.0], [0.0, 0.0]  # of experts that expert-parallel ranks divide: second numbers
        for weight in self._model.parameters():
            if not (param_is_not_shared(weight) and param_is_not_tensor_parallel_duplicate(weight)):
                continue
            kind = replicas.is_expert(weight)
            has_main = weight.dtype != torch.float32 and hasattr(weight, "main_param")
            if not has_main:
                whole[kind] += _sum_of_squares(weight)
            elif (shard := weight.main_param if by_weight is None else by_weight.get(weight)) is not None:
                sharded[kind] += _sum_of_squares(shard)
        over_shards = _sum_over(replicas.group(), sharded[False])
        total = _sum_over(parallel_state.get_model_parallel_group(), whole[False] + over_shards)
        if self._config.expert_size > 1:
            over_shards = _sum_over(parallel_state.get_expert_data_parallel_group(), sharded[True])
            model_group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
            total += _sum_over(model_group, whole[True] + over_shards)
        return math.sqrt(total)

    # ------------------------------------------------------------------------------------------------------ loss scale

    def loss_scale(self) -> float:
        """Return the factor of the loss; 1 without a loss scaler."""
        return float(self.optimizer.get_loss_scale().item())

    def loss_scaler_state(self) -> dict[str, float] | None:
        """Return fp16's loss scale and its counters, which continue from phase to phase; None without a loss scaler."""
        scalers = [getattr(each, "grad_scaler", None) for each in self.optimizers()]
        state = scalers[0].state_dict() if scalers and scalers[0] else None
        return {name: float(value) for name, value in state.items()} if state else None

    # ----------------------------------------------------------------------------------------------------------- state

    def state(self, *, joins: bool = False) -> Iterator[ParamState]:
        """Yield the state of all parameters of blocks and of always-active ones, also of those that other owners step.

        With `joins` a collective over the replicas: each reads all that they store in shared memory.
        """
        parameters, offloaded = self._parameters.all(), self.offloaded
        active = self._parameters.always_active() | self.block_parameters
        whole = (
            offloaded.joined({name: parameters[name] for name in parameters.keys() - active.keys()}) if joins else {}
        )
        for index, (name, parameter) in enumerate(parameters.items()):
            owned = self._parameters.ownership(name)
            if owned.block is None and not owned.is_always_active:
                continue
            live = self.shards.get(name)
            shard = live.snapshot() if live else whole.get(name, offloaded.shards.get(name))
            shard = None if name in active and live is None else shard
            weight = parameter.detach().view(-1)
            yield ParamState(
                group=ALWAYS if owned.is_always_active else str(owned.block),
                block=None if owned.is_always_active else owned.block,
                name=name,
                parameter=parameter,
                set=functools.partial(offloaded.set, name, parameter),
                tensors={each: functools.partial(shard.read, each, weight) for each in shard.names()} if shard else {},
                value=(live.main_param,) if live else (),
                start=shard.start if shard else 0,
                num_steps=shard.num_steps if shard else 0,
                is_divided=replicas.size(parameter) > 1 and name not in whole,
                saver=index % replicas.size(parameter),
                is_resting=name not in active,
            )

    def main_param(self, name: str) -> torch.Tensor:
        """Return a whole main parameter, flat, in fp32. A collective over the ranks with the same weights."""
        shard, weight = self.shards.get(name), self._parameters.all()[name]
        if replicas.size(weight) == 1:
            assert shard is not None, f"no optimizer steps {name}"
            return shard.main_param
        mine, start = (None, 0) if shard is None else (shard.main_param, shard.start)
        return collectives.join_shards(mine, start, like=weight, group=replicas.group(weight), rank=None)

    @torch.no_grad()
    def set_main_param(self, name: str, value: torch.Tensor) -> None:
        """Set a weight and its main parameter to a whole flat fp32 value."""
        weight = self._parameters.all()[name].data
        weight.copy_(value.view(weight.shape))
        if (shard := self.shards.get(name)) is not None:
            shard.set_main_param(value[shard.start : shard.end])

    def buffers(self) -> list[Any]:
        """Return DDP's flat buffers of weights and gradients."""
        return [] if self.wrapped is None else [*self.wrapped.buffers, *self.wrapped.expert_parallel_buffers]

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield the gradients on the device."""
        yield from (buffer.grad_data for buffer in self.buffers() if buffer.grad_data is not None)
        yield from self._gradients_to_step(on_host=False)

    def state_tensors(self, *, on_host: bool) -> Iterator[torch.Tensor]:
        """Yield the stored tensors of the state, on the device or in host memory.

        With --optimizer-cpu-offload those in host memory include gradients.
        """
        for shard in self.shards.values():
            if shard.on_host == on_host:
                yield from shard.stored()
        if on_host:
            yield from self._gradients_to_step(on_host=True)
            yield from (tensor for shard in self.offloaded.shards.values() for tensor in shard.stored())

    def _gradients_to_step(self, *, on_host: bool) -> Iterator[torch.Tensor]:
        for shard in self.shards.values():
            if shard.on_host == on_host and shard.stepped.grad is not None:
                yield shard.stepped.grad


def _sum_over(group: torch.distributed.ProcessGroup, value: float) -> float:
    """Return the sum over the ranks of a group, in fp32. A collective over it."""
    total = torch.tensor(value, device=device.current())
    torch.distributed.all_reduce(total, group=group)
    return float(total)


def _sum_of_squares(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) ** 2
