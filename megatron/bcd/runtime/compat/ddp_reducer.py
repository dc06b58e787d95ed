"""The gradient reducer of PyTorch's DistributedDataParallel, which is made once for all that required a gradient."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel


def rebuild_reducer() -> bool:
    """Let the DistributedDataParallel whose forward pass this is average what requires a gradient now, and no more.

    Returns whether there is one. Its constructor has taken what required a gradient then, and waits for all of it;
    unpickling it builds its reducer anew, by the same calls.
    """
    ddp: Any = DistributedDataParallel._get_active_ddp_module()
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
