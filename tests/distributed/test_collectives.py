"""Collectives over Python objects: results and errors are the same on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from support import worlds
from support.dist import World

from megatron.bcd.runtime import collectives


def two_ranks() -> AbstractContextManager[None]:
    return worlds.parallel(worlds.run_config(mock_data=True, split=None, world_size=2))


def long_on_rank_0(error: Exception | None) -> Any:
    """Return the result or error of a function that ends after three meetings of the ranks, and the meetings."""
    meetings = 0
    may_end = threading.Event()
    meet = collectives.on_rank_0

    def counted(function: Callable[[], Any]) -> Any:
        nonlocal meetings
        answer = meet(function)
        meetings += 1
        if meetings == 3:
            may_end.set()
        return answer

    def work() -> str:
        may_end.wait()
        if error is not None:
            raise error
        return f"done by rank {torch.distributed.get_rank()}"

    with two_ranks(), mock.patch.object(collectives, "on_rank_0", counted):
        try:
            answer = collectives.long_on_rank_0(work, pause=0.01)
        except Exception as raised:
            answer = str(raised)
        return answer, meetings > 3


def test_ranks_meet_while_rank_0_works(world2: World) -> None:
    """The ranks keep meeting while rank 0 works, and all get its result or its error."""
    assert world2.run(long_on_rank_0, None) == [("done by rank 0", True)] * 2
    assert world2.run(long_on_rank_0, ValueError("no space")) == [("no space", True)] * 2
