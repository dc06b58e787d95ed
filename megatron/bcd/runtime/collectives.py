"""Collectives over Python objects, where rank 0 decides for all or every rank reports to all; and over shards."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

from megatron.bcd.runtime import device

T = TypeVar("T")


def on_rank_0(function: Callable[[], T]) -> T:
    """Call `function` on rank 0 and return its result on every rank. A collective over all ranks.

    For what the ranks could see differently: a shared disk, a sum in another order.

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
    """As `on_rank_0`, for a `function` that may take longer than a collective's timeout.

    It runs in a thread, which must not call collectives. Every `pause` seconds the ranks meet until it has ended.
    """
    is_first = torch.distributed.get_rank() == 0
    with ThreadPoolExecutor(max_workers=1) as pool:
        running = pool.submit(function) if is_first else None
        while not on_rank_0(lambda: running is not None and bool(wait([running], timeout=pause).done)):
            pass
        return on_rank_0(lambda: running.result())  # type: ignore[union-attr]


def first_error(error: str | None) -> str | None:
    """The error of the lowest rank that has one, on every rank; None if no rank has one. A collective."""
    return next((one for one in gather_objects(error) if one is not None), None)


def gather_objects(value: T, group: torch.distributed.ProcessGroup | None = None) -> list[T]:
    """Every rank's `value`, by rank; of `group`, or of all ranks. A collective."""
    ranks: list[T] = [value] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(ranks, value, group=group)
    return ranks


def gather_integers(*values: int) -> list[tuple[int, ...]]:
    """Every rank's `values` (64 bits each), by rank; cheaper than `gather_objects`. A collective over all ranks."""
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
    """A flat fp32 tensor with as many elements as `like`, on the device; each element is in the shard of one rank.

    `shard`: this rank's, flat, which begins at element `start`; None where it has none. The result is whole on `rank`
    of the group, or with None on every rank; elsewhere its values mean nothing. A collective over the group.
    """
    flat = torch.zeros(like.numel(), dtype=torch.float32, device=device.current())
    if shard is not None:
        flat[start : start + shard.numel()] = shard
    bits = flat.view(torch.int32)  # all addends of an element but one are 0: a sum of integers keeps even -0.0
    if rank is None:
        torch.distributed.all_reduce(bits, group=group)
    else:
        torch.distributed.reduce(bits, dst=torch.distributed.get_global_rank(group, rank), group=group)
    return flat
