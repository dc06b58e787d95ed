"""Collectives over Python objects (rank 0 decides, or every rank reports to all) and over shards of tensors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

from megatron.bcd.runtime import device

T = TypeVar("T")


def on_rank_0(function: Callable[[], T]) -> T:
    """Collective. Call `function` on rank 0 and return its result on every rank.

    Use it for values that ranks might compute differently: the content of a shared disk, a sum in another order.

    Raises:
        Exception: what `function` raises on rank 0, on every rank.
    """
    answer: list[Any] = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            answer[0] = function()
        except Exception as error:
            answer[1] = error
    torch.distributed.broadcast_object_list(answer, src=0)
    result, failure = answer
    if failure is not None:
        raise failure
    return result


def long_on_rank_0(function: Callable[[], T], *, pause: float = 20.0) -> T:
    """Collective. Like `on_rank_0`, for a `function` that may take longer than a collective's timeout.

    The function runs in a thread and must not call collectives. Meanwhile all ranks meet every `pause` seconds.
    """
    is_first = torch.distributed.get_rank() == 0
    with ThreadPoolExecutor(max_workers=1) as pool:
        running = pool.submit(function) if is_first else None
        while not on_rank_0(lambda: running is not None and bool(wait([running], timeout=pause).done)):
            pass
        return on_rank_0(lambda: running.result())  # type: ignore[union-attr]


def first_error(error: str | None) -> str | None:
    """Collective. Return the error of the lowest rank that has one, or None."""
    return next((other for other in gather_objects(error) if other is not None), None)


def gather_objects(value: T, group: torch.distributed.ProcessGroup | None = None) -> list[T]:
    """Collective. Return the `value` of every rank of `group` (default: all ranks), by rank."""
    ranks: list[T] = [value] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(ranks, value, group=group)
    return ranks


def gather_integers(*values: int) -> list[tuple[int, ...]]:
    """Collective. Return the 64-bit `values` of every rank, by rank. Cheaper than `gather_objects`."""
    mine = torch.tensor(values, dtype=torch.int64, device=device.current())
    ranks = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(ranks, mine)
    return [tuple(rank.tolist()) for rank in ranks]


def join_shards(
    shard: torch.Tensor | None,
    start: int,
    *,
    like: torch.Tensor,
    group: torch.distributed.ProcessGroup,
    rank: int | None,
) -> torch.Tensor:
    """Collective. Assemble a flat fp32 tensor with as many elements as `like` from the shards of a group's ranks.

    Args:
        shard: this rank's flat shard, or None.
        start: index of the shard's first element.
        rank: the rank of the group that gets the result; None for all. On other ranks the values are undefined.
    """
    flat = torch.zeros(like.numel(), dtype=torch.float32, device=device.current())
    if shard is not None:
        flat[start : start + shard.numel()] = shard
    # Each element is zero on all ranks but one, so a sum over the ranks is a gather. Summed as integers, the bits stay
    # exactly those of the shard: a sum of floats would turn -0.0 into 0.0.
    bits = flat.view(torch.int32)
    if rank is None:
        torch.distributed.all_reduce(bits, group=group)
    else:
        torch.distributed.reduce(bits, dst=torch.distributed.get_global_rank(group, rank), group=group)
    return flat
