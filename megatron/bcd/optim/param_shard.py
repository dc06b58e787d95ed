"""This rank's state of each active parameter, in Megatron Core's optimizers.

Megatron Core's distributed optimizer shards each parameter's flat state over the data-parallel ranks.

With --optimizer-cpu-offload, the groups of Megatron Core's HybridDeviceOptimizer hold the weights on the device. Inner
optimizers step copies of them: in host memory, or on the device for the share that is not offloaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megatron.bcd.optim import low_bit_adam
from megatron.bcd.optim.bf16 import Bf16Residual
from megatron.bcd.optim.state import MAIN_PARAM
from megatron.bcd.runtime.compat import megatron_core

ALWAYS_ACTIVE = "bcd_always_active"
"""Attribute of always-active parameters (--bcd-always-active), and key of their groups in the optimizer."""
_MAIN_PARAM_OF_OFFLOAD = "master_param"
"""An entry of the state with --optimizer-cpu-offload, which is the main parameter."""


@dataclass(frozen=True, kw_only=True)
class OffloadedShard:
    """The state of elements `start` to `end` of a parameter, independent of an optimizer. All tensors are flat."""

    start: int
    end: int
    num_steps: int
    moments: dict[str, torch.Tensor]
    """Moments as `ParamShard.stored_moments` returns them."""
    residual: Bf16Residual | None = None
    """In bf16: the difference between the main parameter and the weight."""
    main_param: torch.Tensor | None = None
    """Otherwise, in 16-bit precision: the main parameter."""

    def names(self) -> list[str]:
        """Return the names of the state's tensors: the moments, and the main parameter unless it is the weight itself.

        Adam's moments are exp_avg and exp_avg_sq; there are none before the first step.
        """
        has_main_param = self.residual is not None or self.main_param is not None
        return [*low_bit_adam.names(self.moments), *([MAIN_PARAM] if has_main_param else [])]

    def read(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the state in fp32, flat, given the flat weight."""
        if name != MAIN_PARAM:
            return low_bit_adam.read(self.moments, name)
        if self.residual is None:
            assert self.main_param is not None
            return self.main_param
        main_param = torch.empty(self.end - self.start, dtype=torch.float32)
        self.residual.restore(weight[self.start : self.end].cpu(), main_param=main_param)
        return main_param

    def stored(self) -> list[torch.Tensor]:
        """Return the tensors in memory."""
        residual = [] if self.residual is None else [*vars(self.residual).values()]
        return [*self.moments.values(), *([] if self.main_param is None else [self.main_param]), *residual]


@dataclass(frozen=True, kw_only=True)
class ParamShard:
    """Elements `start` to `end` of a flat active parameter, and the optimizer that steps them."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    optimizer: Any
    """An optimizer of PyTorch, Apex or Transformer Engine."""
    group: dict[str, Any]
    stepped: torch.Tensor
    """The tensor that the optimizer steps: the main parameter, in fp32 the weight itself."""
    on_host: bool

    @property
    def state(self) -> Mapping[str, Any]:
        """The optimizer's state of the tensor; empty before the first step."""
        return self.optimizer.state.get(self.stepped, {})

    @property
    def main_param(self) -> torch.Tensor:
        """The main parameter, flat, in fp32."""
        return self.stepped.detach().view(-1)

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

        PyTorch's Adam counts by parameter, Apex and Transformer Engine count by group.
        """
        return int(self.state.get("step", self.group.get("step", 0)))

    def stored_moments(self) -> dict[str, torch.Tensor]:
        """Return the moments in the optimizer's own precision, flat, by name."""
        return {
            name: value.detach().reshape(-1)
            for name, value in self.state.items()
            if torch.is_tensor(value) and name not in ("step", _MAIN_PARAM_OF_OFFLOAD)
        }

    def stored(self) -> list[torch.Tensor]:
        """Return the tensors in memory."""
        return [self.stepped, *(value for value in self.state.values() if torch.is_tensor(value))]

    def snapshot(self) -> OffloadedShard:
        """Return the state where it is, without a copy."""
        return OffloadedShard(
            start=self.start,
            end=self.end,
            num_steps=self.num_steps,
            moments=self.stored_moments(),
            main_param=self.main_param if self.has_own_main_param else None,
        )

    def restore(self, offloaded: OffloadedShard) -> None:
        """Set the state to a copy of that of the same shard, on any device, with moments as stored or in fp32."""
        assert (offloaded.start, offloaded.end) == (self.start, self.end), "the parameter was sharded differently"
        if offloaded.residual is not None:
            offloaded.residual.restore(self.weight, main_param=self.main_param)
        elif offloaded.main_param is not None:
            self.set_main_param(offloaded.main_param)
        moments, num_steps = offloaded.moments, offloaded.num_steps
        if not num_steps:  # Adam must find no state, so that it creates its own
            return
        is_low_bit = isinstance(self.optimizer, low_bit_adam.LowBitAdam)
        if is_low_bit and moments and moments["exp_avg"].dtype == torch.float32:
            moments = {name: moment.to(self.stepped.device) for name, moment in moments.items()}
            moments = low_bit_adam.encode(moments)
        for name, moment in moments.items():
            copy = moment.to(self.stepped.device, copy=True, non_blocking=True)
            self.optimizer.state[self.stepped][name] = copy if is_low_bit else copy.view_as(self.stepped)
        if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
            where = self.stepped.device if self.group.get("fused") else "cpu"
            step = torch.tensor(float(num_steps), dtype=torch.float32, device=where)
            self.optimizer.state[self.stepped]["step"] = step
        else:
            self.group["step"] = num_steps

    def set_main_param(self, value: torch.Tensor) -> None:
        """Set the main parameter to a copy of a flat tensor on any device."""
        self.stepped.data.view(-1).copy_(value, non_blocking=True)


def param_shards(optimizers: Iterable[Any], parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, ParamShard]:
    """Return this rank's shards by name, in the order of `parameters`. Some parameters may have no shard here."""
    shards: dict[torch.nn.Parameter, ParamShard] = {}
    for optimizer in optimizers:
        if optimizer.is_stub_optimizer:
            continue
        groups, stepped = optimizer.optimizer.param_groups, _stepped(optimizer.optimizer)
        for parameter, (group, order) in megatron_core.group_positions(optimizer).items():
            start, end = megatron_core.shard_range(optimizer, parameter)
            entry = stepped[groups[group]["params"][order]]
            shards[parameter] = ParamShard(parameter=parameter, start=start, end=end, **entry)
    return {name: shards[parameter] for name, parameter in parameters.items() if parameter in shards}


def _stepped(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """Return, by the tensors in an optimizer's groups, what steps them: the other fields of `ParamShard`."""
    if not isinstance(optimizer, HybridDeviceOptimizer):
        return {
            tensor: {"optimizer": optimizer, "group": group, "stepped": tensor, "on_host": False}
            for group in optimizer.param_groups
            for tensor in group["params"]
        }
    inner = {
        id(tensor): {"optimizer": each, "group": group, "stepped": tensor}
        for each in optimizer.sub_optimizers
        for group in each.param_groups
        for tensor in group["params"]
    }
    return {
        weight: inner[id(optimizer.param_to_inner_param[weight])]
        | {"on_host": weight in optimizer.gpu_params_map_cpu_copy}
        for group in optimizer.param_groups
        for weight in group["params"]
    }
