"""Several processes: DistributedDataParallel for the active block, and parameters that FSDP2 has sharded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def mean_of_ranks(value: float, device: torch.device) -> float:
    """On ``device``, as NCCL has no other."""
    if num_ranks() == 1:
        return value
    total = torch.tensor(value, device=device)
    dist.all_reduce(total)
    return float(total) / num_ranks()


def is_sharded(p: torch.Tensor) -> bool:
    return hasattr(p, "full_tensor")


def sharded_like(p: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """``full``, which every rank has whole, cut as ``p`` is."""
    if not is_sharded(p):
        return full
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = p
    return distribute_tensor(full, sharded.device_mesh, sharded.placements, src_data_rank=None)


def local(value: Any) -> Any:
    """This rank's part of a sharded tensor; anything else as it is."""
    return value.to_local() if is_sharded(value) else value


def unwrapped(model: nn.Module) -> nn.Module:
    """What ``model`` wraps if it is a DistributedDataParallel."""
    return model.module if isinstance(model, DistributedDataParallel) else model
