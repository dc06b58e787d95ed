"""PyTorch 2.13: one device for gloo, operations on lists of tensors, the autograd engine, and DistributedDataParallel's
reducer."""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Sequence
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
    """Give all gloo groups of this process one device (one per network in GLOO_SOCKET_IFNAME, of the time when a group
    is made). Permanent; once per process, before its first group.

    Each device has a thread that wakes up 100 times a second. Megatron Core creates about twenty groups: idle ranks
    would take a tenth of a core from those that compute.
    """
    from torch.distributed import ProcessGroupGloo

    original = ProcessGroupGloo.__init__

    def init(group: Any, store: Any, rank: int, size: int, timeout: Any = datetime.timedelta(minutes=30)) -> None:
        options = timeout
        if isinstance(timeout, datetime.timedelta):
            options, devices = ProcessGroupGloo._Options(), _gloo_devices(os.environ.get("GLOO_SOCKET_IFNAME"))
            options._timeout, options._devices = timeout, devices
            options._threads = 2 * len(devices)  # the default without options
        original(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = init


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Write each source into its target, of the same shape and dtype, in one kernel."""
    torch._foreach_copy_(list(targets), list(sources))


def scale_each(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply in place, in one kernel."""
    if tensors:  # on a CPU a number would be rounded to 16 bits where the tensors are
        torch._foreach_mul_(list(tensors), torch.full((), factor, device=tensors[0].device))


def is_in_backward() -> bool:
    """Whether a backward pass calls this: what runs forward now is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def rebuild_reducer() -> bool:
    """Let the DistributedDataParallel whose forward pass this is average what requires a gradient now, and no more.

    Returns whether there is one. Its constructor has taken what required a gradient then, and waits for all of it;
    unpickling it builds its reducer anew, by the same calls.
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
