"""Megatron Core 0.16.1: workarounds, and what a phase reads and sets inside its DDP and optimizers.

Each `patch_` function is permanent, and does its work once per process.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron.bcd.runtime.compat import pytorch


@functools.cache
def patch_norm_recomputation() -> None:
    """Make --recompute-modules layernorm work without Transformer Engine.

    CheckpointWithoutOutput takes its own default, False, for a wish for fp8, and calls Transformer Engine.
    """
    from megatron.core.tensor_parallel import random

    if not hasattr(random, "FP8GlobalStateManager"):
        random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


@functools.cache
def patch_optimizer_offload() -> None:
    """Make --optimizer-cpu-offload work without Transformer Engine and in fp32.

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


@functools.cache
def patch_grad_norm() -> None:
    """Without Transformer Engine and Apex: compute the gradient norm on the device, and clip all gradients at once.

    Megatron Core's own form makes a tensor of one norm per gradient, as numbers of the host: the CPU waits for the
    device once per gradient. Its clipping scales and copies each gradient by itself.
    """
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale_in_place


def l2_norm(_chunk_size: int, _noop_flag: Any, tensor_lists: Any, *_: Any) -> tuple[torch.Tensor, None]:
    """As `local_multi_tensor_l2_norm`, bit for bit: the norm of all tensors' elements, fp32, of shape [1]."""
    [tensors] = tensor_lists
    return torch.nn.utils.get_total_norm(tensors).float().view(1), None


def scale_in_place(_chunk_size: int, _noop_flag: Any, tensor_lists: Any, scale: float) -> None:
    """As `local_multi_tensor_scale`, bit for bit, where both lists hold the same tensors."""
    pytorch.scale_each(tensor_lists[1], scale)


@functools.cache
def patch_adam() -> None:
    """Let PyTorch's Adam, which Megatron Core takes without Transformer Engine and Apex, be the fused one.

    Megatron Core asks PyTorch for that with --optimizer-cpu-offload only. The results differ by rounding.
    """
    from megatron.core import optimizer

    of_groups = "_get_megatron_optimizer_based_on_param_groups"
    build = getattr(optimizer, of_groups)

    @functools.wraps(build)
    def build_fused(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        take_fused_adam(built.optimizer)
        return built

    setattr(optimizer, of_groups, build_fused)


def take_fused_adam(optimizer: torch.optim.Optimizer | None) -> None:
    """Before the first step; other optimizers are left alone."""
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        for group in optimizer.param_groups:
            group["fused"] = True


def gather_parameters(wrapped: Any) -> None:
    """--overlap-param-gather: gather what is outstanding of DDP's parameters, and gather no more in forward passes."""
    if wrapped.use_forward_hook and wrapped.remove_forward_pre_hook_handles:
        wrapped.disable_forward_pre_hook(param_sync=True)


def gather_in_forward(wrapped: Any) -> None:
    """The opposite of `gather_parameters`."""
    if wrapped.use_forward_hook and not wrapped.remove_forward_pre_hook_handles:
        wrapped.enable_forward_pre_hook()


def drop_gradient_hooks(wrapped: Any) -> None:
    """Let go of the nodes of the autograd graph that hold DDP's hooks, and with them its buffers."""
    wrapped.grad_accs.clear()


def places_in_groups(optimizer: Any) -> dict[torch.nn.Parameter, tuple[int, int]]:
    """Of a DistributedOptimizer: for each parameter of which this rank holds a part, its group's index and its index
    in the group."""
    return optimizer.model_param_group_index_map


def held_range(optimizer: Any, parameter: torch.nn.Parameter) -> tuple[int, int]:
    """Of a DistributedOptimizer: the elements of the flat parameter that this rank holds, as start and end."""
    held = optimizer._get_model_param_range_map(parameter)["param"]
    return held.start, held.end
