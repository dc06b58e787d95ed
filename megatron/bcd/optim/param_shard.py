"""The optimizer state that this rank holds of each active parameter.

Megatron Core's distributed optimizer shards each parameter's flat state over the data-parallel ranks; the ordinary one
holds whole parameters, the same on each of these ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron.bcd.optim import held_state, low_bit_moments
from megatron.bcd.optim.low_bit_adam import LowBitAdam
from megatron.bcd.optim.optimizer_params import OptimizerParam, optimizer_params
from megatron.bcd.runtime.compat import megatron_core

MAIN_PARAM = "master"
"""Name of the main parameter's state in checkpoints."""
_NO_MOMENTS = ("step", "master_param")
"""Entries of an optimizer's state: Adam's counter, and with offload the main parameter."""


@dataclass(frozen=True, kw_only=True)
class ParamShard:
    """Elements `start` to `end` of a flat active parameter, and the optimizer's state of them."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    stepped: torch.Tensor
    """The tensor that the optimizer steps: the main parameter, in fp32 the weight itself; this shard of the bf16 weight
    where the optimizer holds what it lacks (`held_state`)."""

    @property
    def is_held(self) -> bool:
        """Whether the optimizer holds the main parameter itself."""
        return held_state.is_held(self.optimizer)

    @property
    def main_param(self) -> torch.Tensor:
        """Flat, in fp32; a copy if it is held."""
        return held_state.main_param(self.optimizer, self.stepped) if self.is_held else self.stepped.detach().view(-1)

    def set_main_param(self, value: torch.Tensor) -> None:
        """Set the main parameter to a copy of a flat tensor, on any device."""
        if self.is_held:
            held_state.set_main_param(self.optimizer, self.stepped, value)
        else:
            self.stepped.data.view(-1).copy_(value, non_blocking=True)

    @property
    def state(self) -> Mapping[str, Any]:
        """The optimizer's state of what it steps; empty before the first step."""
        return self.optimizer.state.get(self.stepped, {})

    @property
    def has_own_main_param(self) -> bool:
        """Whether the main parameter is a copy of the weight: in 16-bit precision."""
        return self.parameter.dtype != torch.float32

    @property
    def weight(self) -> torch.Tensor:
        """This shard of the weight, flat."""
        return self.parameter.detach().view(-1)[self.start : self.end]

    def moments(self) -> dict[str, torch.Tensor]:
        """Flat, by name, in fp32: Adam's exp_avg and exp_avg_sq, SGD's momentum_buffer; none before the first step."""
        return low_bit_moments.decode(self.stored_moments())

    def stored_moments(self) -> dict[str, torch.Tensor]:
        """The same as the optimizer stores them, in fewer bits if flags say so; those with a scale in fp32."""
        if self.is_held:  # has zeros before the first step where its main parameter was set
            held = held_state.moments(self.optimizer, self.stepped) if self.num_steps else {}
            return {name: value.detach().reshape(-1) for name, value in held.items()}
        return {
            name: value.detach().reshape(-1)
            for name, value in self.state.items()
            if torch.is_tensor(value) and name not in _NO_MOMENTS
        }

    def names(self) -> set[str]:
        """Names of `tensors`."""
        return {*low_bit_moments.names(self.stored_moments()), *([MAIN_PARAM] if self.has_own_main_param else [])}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Moments, and the main parameter unless it is the weight itself; flat."""
        return self.moments() | ({MAIN_PARAM: self.main_param} if self.has_own_main_param else {})

    @property
    def num_steps(self) -> int:
        """Steps since this state was created. PyTorch's Adam counts by parameter, Apex and Transformer Engine count by
        group, SGD does not count: 0."""
        step = self.state.get("step", self.group.get("step", 0))
        return int(step.item()) if torch.is_tensor(step) else int(step)

    def set(self, tensors: Mapping[str, torch.Tensor], *, num_steps: int) -> None:
        """Set the state to copies of flat tensors, on any device, and to the number of steps."""
        moments = {name: tensor for name, tensor in tensors.items() if name != MAIN_PARAM}
        if isinstance(self.optimizer, LowBitAdam):
            moments = {name: tensor.to(self.stepped.device) for name, tensor in moments.items()}
            self.set_stored_moments(low_bit_moments.encode(moments, self.optimizer.dtype), num_steps=num_steps)
        else:
            self.set_stored_moments(moments, num_steps=num_steps)
        if MAIN_PARAM in tensors:
            self.set_main_param(tensors[MAIN_PARAM])

    def set_stored_moments(self, moments: Mapping[str, torch.Tensor], *, num_steps: int) -> None:
        """Set the moments to copies of what `stored_moments` returned, on any device, and the number of steps."""
        for name, tensor in moments.items():
            if self.is_held:
                held_state.set_moment(self.optimizer, self.stepped, name, tensor)
                continue
            copy = tensor.to(self.stepped.device, copy=True, non_blocking=True)
            is_low_bit = isinstance(self.optimizer, LowBitAdam)
            self.optimizer.state[self.stepped][name] = copy if is_low_bit else copy.view_as(self.stepped)
        if not num_steps:  # without a step, Adam must find no state, so that it creates its own
            return
        if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
            where = self.stepped.device if self.group.get("fused") else "cpu"
            self.optimizer.state[self.stepped]["step"] = torch.tensor(
                float(num_steps), dtype=torch.float32, device=where
            )
        else:
            self.group["step"] = num_steps


def param_shards(optimizers: Iterable[Any], parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, ParamShard]:
    """This rank's shards of those `parameters` of which it holds any element, by name, in their order."""
    found: dict[torch.nn.Parameter, ParamShard] = {}
    for optimizer in optimizers:
        if optimizer.is_stub_optimizer:
            continue
        groups, params = optimizer.optimizer.param_groups, optimizer_params(optimizer.optimizer)
        if isinstance(optimizer, DistributedOptimizer):
            for parameter, (group, order) in megatron_core.places_in_groups(optimizer).items():
                one = params[groups[group]["params"][order]]
                found[parameter] = _shard(parameter, one, *megatron_core.held_range(optimizer, parameter))
            continue
        for parameter in parameters.values():
            main_param = getattr(parameter, "main_param", parameter)
            if main_param in params:
                found[parameter] = _shard(parameter, params[main_param], 0, parameter.numel())
    return {name: found[parameter] for name, parameter in parameters.items() if parameter in found}


def _shard(parameter: torch.nn.Parameter, one: OptimizerParam, start: int, end: int) -> ParamShard:
    return ParamShard(
        parameter=parameter, start=start, end=end, optimizer=one.optimizer, group=one.group, stepped=one.main_param
    )
