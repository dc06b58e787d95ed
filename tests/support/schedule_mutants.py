"""Faulty pipeline schedules that gloo mostly hides and the checker of the issue order must detect."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from megatron.bcd.pipeline import build, execute
from megatron.bcd.pipeline.execute import Iteration
from megatron.bcd.pipeline.plan import Action, Kind, Plan, PlanShape

Actions = Sequence[Action]


@contextlib.contextmanager
def _changed_stage(offset: int, change: Callable[[PlanShape, Actions], Actions]) -> Iterator[None]:
    """Replace the actions of a stage, counted from the first trainable one."""

    def changed(shape: PlanShape) -> Plan:
        plan, stage = build.build_plan(shape), shape.first_trainable + offset
        stages = [change(shape, actions) if at == stage else actions for at, actions in enumerate(plan.stages)]
        return replace(plan, stages=tuple(map(tuple, stages)))

    with mock.patch.object(execute, "build_plan", changed):
        yield


def swapped_sends() -> contextlib.AbstractContextManager[None]:
    """Let a prefix stage swap every two messages."""

    def change(shape: PlanShape, actions: Actions) -> Actions:
        others = [action for action in actions if action.kind is not Kind.SEND_FORWARD]
        sends = [action for action in actions if action.kind is Kind.SEND_FORWARD]
        for first, second in zip(sends[::2], sends[1::2], strict=False):
            at = next(i for i, action in enumerate(others) if action.microbatch == second.microbatch
                      and action.kind is Kind.FORWARD_ONLY)  # fmt: skip
            others[at + 1 : at + 1] = [second, first]
        return [*others, *(sends[-1:] if len(sends) % 2 else ())]

    return _changed_stage(-1, change)


@contextlib.contextmanager
def sync_before_run_ahead() -> Iterator[None]:
    """End an iteration with a collective that prefix stages reach before they send their run-ahead messages.

    The receives of these messages are already posted; with one queue the collective waits behind them.
    """
    send, finish = Iteration._send_forward, Iteration._finish_gradients
    synced = set[Iteration]()

    def sync(iteration: Iteration) -> None:
        if iteration not in synced:
            synced.add(iteration)
            torch.distributed.all_reduce(torch.zeros(1), group=iteration._groups.pp)

    def sending(iteration: Iteration, action: Action, place: Any) -> None:
        if action.microbatch >= iteration._shape.num_microbatches:
            sync(iteration)
        send(iteration, action, place)

    def finishing(iteration: Iteration) -> None:
        finish(iteration)
        sync(iteration)

    with (
        mock.patch.object(Iteration, "_send_forward", sending),
        mock.patch.object(Iteration, "_finish_gradients", finishing),
    ):
        yield


MUTANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "swapped_sends": swapped_sends,
    "sync_before_run_ahead": sync_before_run_ahead,
}
