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


def on_rank_0(error: Exception | None) -> Any:
    """The result, or the error's type and text; and how often this rank called the function."""
    calls = []

    def look() -> str:
        calls.append(torch.distributed.get_rank())
        if error is not None:
            raise error
        return f"seen by rank {torch.distributed.get_rank()}"

    with two_ranks():
        try:
            return collectives.on_rank_0(look), calls
        except Exception as raised:
            return type(raised).__name__, str(raised), calls


def test_rank_0_answers_for_all(world2: World) -> None:
    assert world2.run(on_rank_0, None) == [("seen by rank 0", [0]), ("seen by rank 0", [])]


def test_an_error_of_rank_0_is_raised_on_every_rank(world2: World) -> None:
    expected = "FileNotFoundError", "[Errno 2] No such file or directory: '/none'"
    assert world2.run(on_rank_0, FileNotFoundError(2, "No such file or directory", "/none")) == [
        (*expected, [0]),
        (*expected, []),
    ]


def long_on_rank_0(error: Exception | None) -> Any:
    """The result of a function that ends after three meetings of the ranks, or its error; and the meetings."""
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
    """One collective around the conversion of a large model, which ends the run after --distributed-timeout-minutes."""
    assert world2.run(long_on_rank_0, None) == [("done by rank 0", True)] * 2
    assert world2.run(long_on_rank_0, ValueError("no space")) == [("no space", True)] * 2


def first_error(errors: list[str | None]) -> str | None:
    with two_ranks():
        return collectives.first_error(errors[torch.distributed.get_rank()])


def test_the_error_of_the_lowest_rank_wins(world2: World) -> None:
    assert world2.run(first_error, [None, None]) == [None, None]
    assert world2.run(first_error, [None, "disk full"]) == ["disk full"] * 2
    assert world2.run(first_error, ["disk full", "disk gone"]) == ["disk full"] * 2


def gather() -> Any:
    with two_ranks():
        rank = torch.distributed.get_rank()
        return collectives.gather_objects({"rank": rank}), collectives.gather_integers(rank, 2**40 + rank)


def test_every_rank_sees_the_values_of_all_by_rank(world2: World) -> None:
    assert world2.run(gather) == [([{"rank": 0}, {"rank": 1}], [(0, 2**40), (1, 2**40 + 1)])] * 2
