"""The optimizer state that this rank holds of each active parameter.

Megatron Core's distributed optimizer cuts each parameter's state into flat parts, one per data-parallel rank; the
ordinary one holds whole parameters, the same on each of these ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron.bcd.kept_state.stepped import Stepped, stepped

MASTER = "master"
_NO_MOMENTS = ("step", "master_param")
"""Of an optimizer's state: Adam's counter; with offload the master itself."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Elements `start` to `end` of a flat active parameter, and what the optimizer has for them."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    master: torch.Tensor
    """What the optimizer steps; in fp32 it is the weight itself."""

    @property
    def state(self) -> Mapping[str, Any]:
        """As PyTorch keeps it; empty before the first step."""
        return self.optimizer.state.get(self.master, {})

    @property
    def has_own_master(self) -> bool:
        """In 16-bit precision the master is a copy."""
        return self.parameter.dtype != torch.float32

    @property
    def weight(self) -> torch.Tensor:
        """The weights of this part, flat."""
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
        return {*self.moments(), *([MASTER] if self.has_own_master else [])}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The moments, and the master where it is not the weight itself."""
        return self.moments() | ({MASTER: self.master.detach().reshape(-1)} if self.has_own_master else {})

    def num_steps(self) -> int:
        """Steps that this state has seen; PyTorch's Adam counts by parameter, Apex and Transformer Engine by group,
        SGD not at all."""
        step = self.state.get("step", self.group.get("step", 0))
        return int(step.item()) if torch.is_tensor(step) else int(step)

    def set(self, tensors: Mapping[str, torch.Tensor], *, num_steps: int) -> None:
        """Take copies of flat tensors of this part, from whatever device, and the number of steps."""
        for name, tensor in tensors.items():
            if name == MASTER:
                self.master.data.copy_(tensor.view_as(self.master), non_blocking=True)
            else:
                copy = tensor.to(self.master.device, copy=True, non_blocking=True)
                self.optimizer.state[self.master][name] = copy.view_as(self.master)
        if not num_steps:  # masters only, of a phase before its first step: Adam sets up where it finds nothing
            return
        if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
            where = self.master.device if self.group.get("fused") else "cpu"
            self.optimizer.state[self.master]["step"] = torch.tensor(
                float(num_steps), dtype=torch.float32, device=where
            )
        else:
            self.group["step"] = num_steps


def parts(optimizers: Iterable[Any], parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, Part]:
    """By name in the order of `parameters`: this rank's part of each of which it holds some."""
    found: dict[torch.nn.Parameter, Part] = {}
    for optimizer in optimizers:
        if optimizer.is_stub_optimizer:
            continue
        groups, steps = optimizer.optimizer.param_groups, stepped(optimizer.optimizer)
        if isinstance(optimizer, DistributedOptimizer):
            for parameter, (group, order) in optimizer.model_param_group_index_map.items():
                where = optimizer._get_model_param_range_map(parameter)["param"]
                found[parameter] = _part(parameter, steps[groups[group]["params"][order]], where.start, where.end)
            continue
        for parameter in parameters.values():
            master = getattr(parameter, "main_param", parameter)
            if master in steps:
                found[parameter] = _part(parameter, steps[master], 0, parameter.numel())
    return {name: found[parameter] for name, parameter in parameters.items() if parameter in found}


def _part(parameter: torch.nn.Parameter, one: Stepped, start: int, end: int) -> Part:
    return Part(parameter=parameter, start=start, end=end, optimizer=one.optimizer, group=one.group, master=one.master)
