"""What a phase reads and sets inside Megatron Core's DDP and optimizers, which have no functions for it."""

from __future__ import annotations

from typing import Any

import torch


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
