"""The optimizer state that this rank holds of each active parameter.

Megatron Core's distributed optimizer cuts each parameter's state into flat shards, one per data-parallel rank; the
ordinary one holds whole parameters, the same on each of these ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron.bcd.optim.optimizer_params import OptimizerParam, optimizer_params

MAIN_PARAM = "master"
_NO_MOMENTS = ("step", "master_param")
"""Of an optimizer's state: Adam's counter; with offload the main parameter itself."""


@dataclass(frozen=True, kw_only=True)
class ParamShard:
    """Elements `start` to `end` of a flat active parameter, and what the optimizer has for them."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    main_param: torch.Tensor
    """What the optimizer steps; in fp32 it is the weight itself."""

    @property
    def state(self) -> Mapping[str, Any]:
        """As PyTorch keeps it; empty before the first step."""
        return self.optimizer.state.get(self.main_param, {})

    @property
    def has_own_main_param(self) -> bool:
        """In 16-bit precision the main parameter is a copy."""
        return self.parameter.dtype != torch.float32

    @property
    def weight(self) -> torch.Tensor:
        """The weights of this shard, flat."""
        return self.parameter.detach().view(-1)[self.start : self.end]

    def moments(self) -> dict[str, torch.Tensor]:
        """By name, flat: Adam's exp_avg and exp_avg_sq, SGD's momentum_buffer; none before the first step."""
        return {
            name: value.detach().reshape(-1)
            for name, value in self.state.items()
            if torch.is_tensor(value) and name not in _NO_MOMENTS
        }

    def names(self) -> set[str]:
        """Of `tensors`."""
        return {*self.moments(), *([MAIN_PARAM] if self.has_own_main_param else [])}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The moments, and the main parameter where it is not the weight itself."""
        return self.moments() | ({MAIN_PARAM: self.main_param.detach().reshape(-1)} if self.has_own_main_param else {})

    def num_steps(self) -> int:
        """Steps that this state has seen; PyTorch's Adam counts by parameter, Apex and Transformer Engine by group,
        SGD not at all."""
        step = self.state.get("step", self.group.get("step", 0))
        return int(step.item()) if torch.is_tensor(step) else int(step)

    def set(self, tensors: Mapping[str, torch.Tensor], *, num_steps: int) -> None:
        """Take copies of flat tensors of this shard, from whatever device, and the number of steps."""
        for name, tensor in tensors.items():
            if name == MAIN_PARAM:
                self.main_param.data.copy_(tensor.view_as(self.main_param), non_blocking=True)
            else:
                copy = tensor.to(self.main_param.device, copy=True, non_blocking=True)
                self.optimizer.state[self.main_param][name] = copy.view_as(self.main_param)
        if not num_steps:  # main parameters only, of a phase before its first step: Adam sets up where it finds nothing
            return
        if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
            where = self.main_param.device if self.group.get("fused") else "cpu"
            self.optimizer.state[self.main_param]["step"] = torch.tensor(
                float(num_steps), dtype=torch.float32, device=where
            )
        else:
            self.group["step"] = num_steps


def param_shards(optimizers: Iterable[Any], parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, ParamShard]:
    """By name in the order of `parameters`: this rank's shard of each of which it holds some."""
    found: dict[torch.nn.Parameter, ParamShard] = {}
    for optimizer in optimizers:
        if optimizer.is_stub_optimizer:
            continue
        groups, steps = optimizer.optimizer.param_groups, optimizer_params(optimizer.optimizer)
        if isinstance(optimizer, DistributedOptimizer):
            for parameter, (group, order) in optimizer.model_param_group_index_map.items():
                where = optimizer._get_model_param_range_map(parameter)["param"]
                found[parameter] = _shard(parameter, steps[groups[group]["params"][order]], where.start, where.end)
            continue
        for parameter in parameters.values():
            main_param = getattr(parameter, "main_param", parameter)
            if main_param in steps:
                found[parameter] = _shard(parameter, steps[main_param], 0, parameter.numel())
    return {name: found[parameter] for name, parameter in parameters.items() if parameter in found}


def _shard(parameter: torch.nn.Parameter, one: OptimizerParam, start: int, end: int) -> ParamShard:
    return ParamShard(
        parameter=parameter, start=start, end=end, optimizer=one.optimizer, group=one.group, main_param=one.main_param
    )
