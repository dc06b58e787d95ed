"""The tensors that an optimizer steps, also where it is Megatron Core's for offload.

With --optimizer-cpu-offload a HybridDeviceOptimizer stands between: its groups hold the weights on the device, and
optimizers of its own step copies of them, in host memory or, for what is not offloaded, on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer


@dataclass(frozen=True, kw_only=True)
class OptimizerParam:
    """One tensor, and the PyTorch optimizer (or Apex's, or Transformer Engine's) that steps it."""

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    main_param: torch.Tensor
    on_host: bool

    @property
    def state(self) -> dict[str, Any]:
        """As PyTorch keeps it; empty before the first step."""
        return dict(self.optimizer.state.get(self.main_param, {}))


def optimizer_params(optimizer: torch.optim.Optimizer | None) -> dict[torch.Tensor, OptimizerParam]:
    """By the tensor in the optimizer's own groups, in their order. None is the optimizer of a rank that steps
    nothing."""
    if optimizer is None:
        return {}
    if not isinstance(optimizer, HybridDeviceOptimizer):
        return {
            main_param: OptimizerParam(optimizer=optimizer, group=group, main_param=main_param, on_host=False)
            for group in optimizer.param_groups
            for main_param in group["params"]
        }
    inner = {
        id(main_param): (one, group)
        for one in optimizer.sub_optimizers
        for group in one.param_groups
        for main_param in group["params"]
    }
    found = {}
    for group in optimizer.param_groups:
        for weight in group["params"]:
            main_param = optimizer.param_to_inner_param[weight]
            stepper, its_group = inner[id(main_param)]
            found[weight] = OptimizerParam(
                optimizer=stepper,
                group=its_group,
                main_param=main_param,
                on_host=weight in optimizer.gpu_params_map_cpu_copy,
            )
    return found
