"""The tensors and groups that a phase's optimizers step.

With --optimizer-cpu-offload, Megatron Core's HybridDeviceOptimizer holds the weights on the device in its groups, and
inner optimizers step copies of them: in host memory, or on the device for the share that is not offloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megatron.bcd.optim import held_state

ALWAYS_ACTIVE = "bcd_always_active"
"""Attribute of always-active parameters (--bcd-always-active), and key of the optimizer's groups of them."""


@dataclass(frozen=True, kw_only=True)
class OptimizerParam:
    """One tensor, and the optimizer of PyTorch, Apex or Transformer Engine that steps it."""

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    main_param: torch.Tensor
    on_host: bool

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state of this tensor; empty before the first step."""
        return dict(self.optimizer.state.get(self.main_param, {}))


def chained_optimizers(optimizer: MegatronOptimizer | None) -> list[Any]:
    """The optimizers that Megatron Core chains for a phase; none between phases."""
    return list(getattr(optimizer, "chained_optimizers", []))


def param_groups(optimizer: MegatronOptimizer | None) -> Iterator[dict[str, Any]]:
    """The groups of all chained optimizers that step something on this rank."""
    for each in chained_optimizers(optimizer):
        if not each.is_stub_optimizer:
            yield from each.optimizer.param_groups


def all_optimizer_params(optimizer: MegatronOptimizer | None) -> Iterator[OptimizerParam]:
    """The tensors that all chained optimizers step: in 16-bit precision this rank's shard of fp32 copies."""
    for each in chained_optimizers(optimizer):
        if not each.is_stub_optimizer:
            yield from optimizer_params(each.optimizer).values()


def own_main_params(optimizer: MegatronOptimizer | None) -> list[torch.Tensor]:
    """Main parameters on this rank of the active block's own parameters, so without always-active ones."""
    own = [one for one in all_optimizer_params(optimizer) if not one.group.get(ALWAYS_ACTIVE)]
    return [
        held_state.main_param(one.optimizer, one.main_param) if held_state.is_held(one.optimizer) else one.main_param
        for one in own
    ]


def optimizer_params(optimizer: torch.optim.Optimizer | None) -> dict[torch.Tensor, OptimizerParam]:
    """By the tensor in the optimizer's own groups, in their order; empty on a rank that steps nothing (None)."""
    if optimizer is None:
        return {}
    if not isinstance(optimizer, HybridDeviceOptimizer):
        return {
            main_param: OptimizerParam(optimizer=optimizer, group=group, main_param=main_param, on_host=False)
            for group in optimizer.param_groups
            for main_param in group["params"]
        }
    inner = {
        id(main_param): (inner_optimizer, group)
        for inner_optimizer in optimizer.sub_optimizers
        for group in inner_optimizer.param_groups
        for main_param in group["params"]
    }
    found = {}
    for outer_group in optimizer.param_groups:
        for weight in outer_group["params"]:
            main_param = optimizer.param_to_inner_param[weight]
            inner_optimizer, group = inner[id(main_param)]
            found[weight] = OptimizerParam(
                optimizer=inner_optimizer,
                group=group,
                main_param=main_param,
                on_host=weight in optimizer.gpu_params_map_cpu_copy,
            )
    return found
