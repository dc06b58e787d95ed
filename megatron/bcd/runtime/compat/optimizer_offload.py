"""A workaround for Megatron Core 0.16.1: --optimizer-cpu-offload."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def patch_optimizer_offload() -> None:
    """Make --optimizer-cpu-offload work without Transformer Engine and in fp32. Permanent; once per process.

    OptimizerConfig compares the version of an absent Transformer Engine. HybridDeviceOptimizer gets fp32 weights as
    views, which torch.optim.Optimizer rejects as non-leaf tensors unless they retain their gradient, and it does not
    set the gradient of fp32 weights that stay on the device.
    """
    from megatron.core import utils
    from megatron.core.optimizer import optimizer_config
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    megatron_set_gradients = HybridDeviceOptimizer._set_sub_optimizer_grads

    def is_te_min_version(version: str, check_equality: bool = True) -> bool:
        return utils.get_te_version() is not None and utils.is_te_min_version(version, check_equality)

    def add_param_group(self: Any, group: dict[str, Any]) -> None:
        for weight in group["params"]:
            if not weight.is_leaf:
                weight.retain_grad()
        torch.optim.Optimizer.add_param_group(self, group)

    def set_gradients(self: Any) -> None:
        megatron_set_gradients(self)
        for weight, main_param in self.param_to_inner_param.items():
            if main_param is weight:  # fp32, and not offloaded
                weight.grad = getattr(weight, "decoupled_grad", weight.grad)

    optimizer_config.is_te_min_version = is_te_min_version
    HybridDeviceOptimizer.add_param_group = add_param_group
    HybridDeviceOptimizer._set_sub_optimizer_grads = set_gradients
