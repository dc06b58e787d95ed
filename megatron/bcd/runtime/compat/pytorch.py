"""PyTorch's private APIs: gloo's devices, operations on lists of tensors, autograd, DDP's reducer."""

from __future__ import annotations

import copy
import datetime
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch


@functools.cache
def _gloo_devices(networks: str | None) -> list[Any]:
    from torch.distributed import ProcessGroupGloo

    if not networks:
        return [ProcessGroupGloo.create_default_device()]
    return [ProcessGroupGloo.create_device(interface=name) for name in networks.split(",")]


@functools.cache
def share_gloo_device() -> None:
    """Make all gloo groups of this process share one device, or one per network in GLOO_SOCKET_IFNAME.

    Permanent. Call it once per process, before its first group. Each device has a thread that wakes up 100 times a
    second. Megatron Core creates about twenty groups, so each rank would take 2 % of a core for them.
    """
    from torch.distributed import ProcessGroupGloo

    original = ProcessGroupGloo.__init__

    default = datetime.timedelta(minutes=30)

    def init(group: Any, store: Any, rank: int, size: int, timeout: Any = default, **others: Any) -> None:
        options = timeout
        if isinstance(timeout, datetime.timedelta):
            options, devices = ProcessGroupGloo._Options(), _gloo_devices(os.environ.get("GLOO_SOCKET_IFNAME"))
            options._timeout, options._devices = timeout, devices
            options._threads = 2 * len(devices)  # PyTorch's default
            for name, value in others.items():  # since PyTorch 2.14: enable_reconfigure
                setattr(options, name, value)
        original(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = init


@functools.cache
def compiled(function: Callable[..., Any], *, has_dynamic_shapes: bool = False) -> Callable[..., Any]:
    """Return a compiled function: one for all shapes, or by default one for each combination of shapes.

    Where torch.compile is off, or after 64 combinations, it runs eager.
    """
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # a model has some ten shapes
    return torch.compile(function, dynamic=has_dynamic_shapes)


def compile_seconds() -> float:
    """Return how long this process has compiled functions."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not imported for this
    return dynamo.calculate_time_spent().get("entire_frame_compile", 0.0) if dynamo else 0.0


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target of equal shape and dtype, in one kernel."""
    torch._foreach_copy_(list(targets), list(sources))


def add_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Add each source to its target of equal shape, in one kernel if all have one dtype."""
    torch._foreach_add_(list(targets), list(sources))


def zero_each(tensors: Sequence[torch.Tensor]) -> None:
    """Fill all tensors with zeros, in one kernel."""
    if tensors:
        torch._foreach_zero_(list(tensors))


def rebuild_reducer() -> bool:
    """Rebuild the reducer of the running DistributedDataParallel for the parameters that require a gradient now.

    Call it during its forward pass. Its constructor registers the parameters that required a gradient then, and the
    reducer waits for all of them. These are the calls by which DistributedDataParallel's unpickling rebuilds it.

    Returns:
        Whether a DistributedDataParallel is running its forward pass.
    """
    ddp: Any = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if ddp is None:
        return False
    parameters, is_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, is_sparse, names, ddp.static_graph)
    if ddp.static_graph:
        ddp.static_graph = False
        ddp._set_static_graph()
    hooks, ddp._comm_hooks = ddp._comm_hooks, []
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
    return True


def with_modules(module: torch.nn.Module, modules: dict[str, torch.nn.Module]) -> torch.nn.Module:
    """Return a shallow copy of a module with other submodules of some names. The module keeps its own."""
    other = copy.copy(module)
    other._modules = {**module._modules, **modules}
    return other


def write_result(index: Any, file: str, start: int, size: int) -> Any:
    """Return what PyTorch's checkpoint index stores about an entry: its file, first byte and number of bytes."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    return WriteResult(index=index, size_in_bytes=size, storage_data=_StorageInfo(file, start, size))
