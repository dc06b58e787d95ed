"""Wrong pipeline schedules, of which gloo's messages hide most: both checkers of NCCL's rules must see them.

What the strict backend runs and what the checker of the issue order records is this project's schedule with one fault.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from megatron.bcd.pipeline.executor import StageExecutor
from megatron.bcd.pipeline.p2p import OneWayLink


@contextlib.contextmanager
def receive_too_many() -> Iterator[None]:
    """The first trainable stage posts a receive after the last message."""
    original = OneWayLink.receive

    def receive(link: OneWayLink, shape: Any, *, more_follow: bool) -> torch.Tensor:
        return original(link, shape, more_follow=True)

    with mock.patch.object(OneWayLink, "receive", receive):
        yield


@contextlib.contextmanager
def swapped_sends() -> Iterator[None]:
    """A stage of the prefix sends every second message before the first."""
    original, held = OneWayLink.send, dict[OneWayLink, torch.Tensor]()
    finish = OneWayLink.finish_sends

    def send(link: OneWayLink, tensor: torch.Tensor) -> None:
        if link in held:
            original(link, tensor)
            original(link, held.pop(link))
        else:
            held[link] = tensor

    def finish_sends(link: OneWayLink) -> None:
        if link in held:
            original(link, held.pop(link))
        finish(link)

    with mock.patch.object(OneWayLink, "send", send), mock.patch.object(OneWayLink, "finish_sends", finish_sends):
        yield


@contextlib.contextmanager
def sync_before_run_ahead() -> Iterator[None]:
    """A collective of the pipeline ends an iteration, and the stages of the prefix come to it before they send what
    they ran ahead with. The receives of that are posted: with one queue the collective is behind them."""
    send, finish, run = OneWayLink.send, StageExecutor._finish_gradients, StageExecutor.run
    running: list[tuple[StageExecutor, list[torch.Tensor]]] = []

    def sync(executor: StageExecutor) -> None:
        torch.distributed.all_reduce(torch.zeros(1), group=executor._groups.pp)

    def noting_run(executor: StageExecutor) -> list[Any]:
        running.append((executor, []))
        reported = run(executor)
        running.pop()
        return reported

    def sending(link: OneWayLink, tensor: torch.Tensor) -> None:
        executor, sent = running[-1]
        if len(sent) == executor._shape.num_microbatches - executor._shape.done_ahead:
            sync(executor)
        sent.append(tensor)
        send(link, tensor)

    def finishing(executor: StageExecutor) -> None:
        finish(executor)
        _, sent = running[-1]
        if len(sent) <= executor._shape.num_microbatches - executor._shape.done_ahead:
            sync(executor)

    with (
        mock.patch.object(OneWayLink, "send", sending),
        mock.patch.object(StageExecutor, "_finish_gradients", finishing),
        mock.patch.object(StageExecutor, "run", noting_run),
    ):
        yield


MUTANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "receive_too_many": receive_too_many,
    "swapped_sends": swapped_sends,
    "sync_before_run_ahead": sync_before_run_ahead,
}
