"""The tensors that a phase's optimizers step, and this rank's state of each active parameter.

Megatron Core's distributed optimizer shards each parameter's flat state over the data-parallel ranks. The ordinary one
stores whole parameters, the same on each of these ranks.

With --optimizer-cpu-offload, the groups of Megatron Core's HybridDeviceOptimizer hold the weights on the device. Inner
optimizers step copies of them: in host memory, or on the device for the share that is not offloaded.

With --use-precision-aware-optimizer, Transformer Engine's Adam steps bf16 weights and stores the rest of their main
parameters itself, in 16 bits: the bits of the main parameter minus the bits of the weight, which are its upper half.
The weight is the main parameter rounded with halves away from zero (`bf16.join`). The moments have a precision of their
own; in fp16 each tensor has a scale. This module uses only what Transformer Engine documents or Megatron Core calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron.bcd.optim import bf16, low_bit_adam
from megatron.bcd.runtime.compat import megatron_core

ALWAYS_ACTIVE = "bcd_always_active"
"""Attribute of always-active parameters (--bcd-always-active), and key of their groups in the optimizer."""
MAIN_PARAM = "master"
"""Name of the main parameter's state in checkpoints."""
_REMAINDER = "master_param"
"""Transformer Engine's name for the low 16 bits. With offload an entry of that name is the main parameter."""


@dataclass(frozen=True, kw_only=True)
class OptimizerParam:
    """One tensor, and the optimizer of PyTorch, Apex or Transformer Engine that steps it."""

    optimizer: Any
    group: dict[str, Any]
    stepped: torch.Tensor
    """The tensor that the optimizer steps: the main parameter, in fp32 the weight itself. If the optimizer
    `stores_low_bits`, this shard of the bf16 weight."""
    on_host: bool

    @property
    def state(self) -> Mapping[str, Any]:
        """The optimizer's state of the tensor; empty before the first step."""
        return self.optimizer.state.get(self.stepped, {})

    @property
    def stores_low_bits(self) -> bool:
        """Whether the optimizer stores the low 16 bits of the main parameter (--use-precision-aware-optimizer)."""
        return bool(getattr(self.optimizer, "store_param_remainders", False))

    @property
    def main_param(self) -> torch.Tensor:
        """The main parameter, flat, in fp32; a copy if the optimizer `stores_low_bits`."""
        flat = self.stepped.detach().view(-1)
        if not self.stores_low_bits:
            return flat
        return bf16.join(flat, self.state[_REMAINDER].view(-1)) if self.state else flat.float()


@dataclass(frozen=True, kw_only=True)
class ParamShard(OptimizerParam):
    """Elements `start` to `end` of a flat active parameter, with their optimizer state."""

    parameter: torch.nn.Parameter
    start: int
    end: int

    @property
    def has_own_main_param(self) -> bool:
        """Whether the main parameter is a copy of the weight: in 16-bit precision."""
        return self.parameter.dtype != torch.float32

    @property
    def weight(self) -> torch.Tensor:
        """This shard of the weight, flat."""
        return self.parameter.detach().view(-1)[self.start : self.end]

    @property
    def num_steps(self) -> int:
        """Number of steps since this state was created.

        PyTorch's Adam counts by parameter, Apex and Transformer Engine count by group. SGD does not count: 0.
        """
        return int(self.state.get("step", self.group.get("step", 0)))

    def moments(self) -> dict[str, torch.Tensor]:
        """Return the moments in fp32, flat, by name; none before the first step.

        Adam's are exp_avg and exp_avg_sq, SGD's is momentum_buffer.
        """
        return low_bit_adam.decode(self.stored_moments())

    def stored_moments(self) -> dict[str, torch.Tensor]:
        """Return the moments in the optimizer's own precision, flat, by name.

        Transformer Engine's fp16 moments, which have a scale, are returned in fp32.
        """
        if self.stores_low_bits and not self.num_steps:  # setting the main parameter has created moments of zeros
            return {}
        moments = {}
        for name, value in self.state.items():
            if torch.is_tensor(value) and name not in ("step", _REMAINDER):
                has_scale = self.stores_low_bits and value.dtype not in (torch.float32, torch.bfloat16)
                stored = self.optimizer.get_unscaled_state(self.stepped, name) if has_scale else value
                moments[name] = stored.detach().reshape(-1)
        return moments

    def names(self) -> set[str]:
        """Return the names of `tensors`."""
        names = low_bit_adam.names(self.stored_moments())
        return {*names, *([MAIN_PARAM] if self.has_own_main_param else [])}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the moments, and the main parameter unless it is the weight itself, flat, by name."""
        return self.moments() | ({MAIN_PARAM: self.main_param} if self.has_own_main_param else {})

    def set(self, tensors: Mapping[str, torch.Tensor], *, num_steps: int) -> None:
        """Set the state to copies of flat `tensors` on any device, and the number of steps."""
        moments = {name: tensor for name, tensor in tensors.items() if name != MAIN_PARAM}
        if isinstance(self.optimizer, low_bit_adam.LowBitAdam):
            moments = {name: tensor.to(self.stepped.device) for name, tensor in moments.items()}
            moments = low_bit_adam.encode(moments, self.optimizer.dtype)
        self.set_stored_moments(moments, num_steps=num_steps)
        if MAIN_PARAM in tensors:
            self.set_main_param(tensors[MAIN_PARAM])

    @torch.no_grad()
    def set_main_param(self, value: torch.Tensor) -> None:
        """Set the main parameter to a copy of a flat tensor on any device.

        If the optimizer `stores_low_bits`, the weight must be the rounded value. A value halfway between two weights
        becomes one fp32 step less, if another run rounded it to the lower, even weight.
        """
        if not self.stores_low_bits:
            self.stepped.data.view(-1).copy_(value, non_blocking=True)
            return
        bits = value.to(self.stepped.device).contiguous().view(torch.int32)
        upper = self.stepped.detach().reshape(-1).view(torch.int16).to(torch.int32) << 16
        remainder = (bits - upper).clamp_(-0x8000, 0x7FFF).to(torch.int16)
        self._set_state(_REMAINDER, remainder)

    def set_stored_moments(self, moments: Mapping[str, torch.Tensor], *, num_steps: int) -> None:
        """Set the moments to copies of `stored_moments` on any device, and the number of steps."""
        if not num_steps and "exp_avg" in moments:  # Adam must find no state, so that it creates its own
            return
        for name, tensor in moments.items():
            if self.stores_low_bits:
                self._set_state(name, tensor.to(self.stepped.device, torch.float32, copy=True))
                continue
            copy = tensor.to(self.stepped.device, copy=True, non_blocking=True)
            is_low_bit = isinstance(self.optimizer, low_bit_adam.LowBitAdam)
            self.optimizer.state[self.stepped][name] = copy if is_low_bit else copy.view_as(self.stepped)
        if not num_steps:
            return
        if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
            where = self.stepped.device if self.group.get("fused") else "cpu"
            step = torch.tensor(float(num_steps), dtype=torch.float32, device=where)
            self.optimizer.state[self.stepped]["step"] = step
        else:
            self.group["step"] = num_steps

    def _set_state(self, name: str, value: torch.Tensor) -> None:
        """Set an entry of Transformer Engine's state."""
        if not self.state:  # its first step does not create missing entries where there is any state
            self.optimizer.initialize_state(self.stepped, True)
        self.optimizer.set_scaled_state(self.stepped, name, value.view_as(self.stepped))


def chained_optimizers(optimizer: MegatronOptimizer | None) -> list[Any]:
    """Return the optimizers that Megatron Core chains for a phase; none between phases."""
    return list(getattr(optimizer, "chained_optimizers", []))


def all_optimizer_params(optimizer: MegatronOptimizer | None) -> Iterator[OptimizerParam]:
    """Yield the tensors that all chained optimizers step: in 16-bit precision this rank's shards of fp32 copies."""
    for each in chained_optimizers(optimizer):
        if not each.is_stub_optimizer:
            yield from optimizer_params(each.optimizer).values()


def optimizer_params(optimizer: torch.optim.Optimizer | None) -> dict[torch.Tensor, OptimizerParam]:
    """Return the tensors that an optimizer steps, keyed by the tensors in its groups, in their order.

    Empty on a rank that steps nothing (None).
    """
    if optimizer is None:
        return {}
    if not isinstance(optimizer, HybridDeviceOptimizer):
        return {
            main_param: OptimizerParam(optimizer=optimizer, group=group, stepped=main_param, on_host=False)
            for group in optimizer.param_groups
            for main_param in group["params"]
        }
    inner = {
        id(main_param): (inner_optimizer, group)
        for inner_optimizer in optimizer.sub_optimizers
        for group in inner_optimizer.param_groups
        for main_param in group["params"]
    }
    params = {}
    for outer_group in optimizer.param_groups:
        for weight in outer_group["params"]:
            main_param = optimizer.param_to_inner_param[weight]
            inner_optimizer, group = inner[id(main_param)]
            params[weight] = OptimizerParam(
                optimizer=inner_optimizer,
                group=group,
                stepped=main_param,
                on_host=weight in optimizer.gpu_params_map_cpu_copy,
            )
    return params


def param_shards(optimizers: Iterable[Any], parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, ParamShard]:
    """Return this rank's shards by name, in the order of `parameters`. Some parameters may have no shard here."""
    shards: dict[torch.nn.Parameter, ParamShard] = {}
    for optimizer in optimizers:
        if optimizer.is_stub_optimizer:
            continue
        groups, params = optimizer.optimizer.param_groups, optimizer_params(optimizer.optimizer)
        if isinstance(optimizer, DistributedOptimizer):
            for parameter, (group, order) in megatron_core.group_positions(optimizer).items():
                start, end = megatron_core.shard_range(optimizer, parameter)
                param = params[groups[group]["params"][order]]
                shards[parameter] = ParamShard(**vars(param), parameter=parameter, start=start, end=end)
            continue
        for parameter in parameters.values():
            main_param = getattr(parameter, "main_param", parameter)
            if main_param in params:
                param = params[main_param]
                shards[parameter] = ParamShard(**vars(param), parameter=parameter, start=0, end=parameter.numel())
    return {name: shards[parameter] for name, parameter in parameters.items() if parameter in shards}
