"""NCCL can run what the pipeline issues: no hang in any layout and order of events, and every message reaches its
user."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.issue_order import Case, Event, OrderError, Rank, record, simulate
from support.schedule_mutants import MUTANTS

MORE_THAN_ALL = 9  # microbatches


def events_of(blocks: Iterator[int] | list[int]) -> tuple[Event, ...]:
    """Return for every block: a phase of five iterations with an evaluation and a checkpoint in it, a fill, and a phase
    that reads the prefix cache."""
    events: list[Event] = []
    for block in blocks:
        train = Event("train", block)
        events += [train] * 3 + [Event("evaluate")] + [train] * 2 + [Event("checkpoint")]
        events += [Event("fill", block)] + [Event("train", block, is_served=True)] * 2 if block else []
    return tuple(events)


def check(case: Case) -> list[Rank]:
    ranks = record(case)
    for one_queue in (False, True):
        simulate(ranks, one_queue=one_queue)
    return ranks


def cases(num_stages: int, numbers: tuple[int, ...], aheads: tuple[int | None, ...]) -> Iterator[Case]:
    """Return all first trainable stages one after the other, upwards and downwards."""
    upwards = list(range(num_stages))
    for num_microbatches in numbers:
        for run_ahead in aheads:
            for blocks in (upwards, upwards[::-1]):
                yield Case(
                    num_stages=num_stages,
                    num_microbatches=num_microbatches,
                    run_ahead=run_ahead,
                    events=events_of(blocks),
                    frozen_suffix=num_microbatches % 2 == 0,
                )


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_nothing_hangs(num_stages: int) -> None:
    """No two ranks wait for each other, and every message reaches the microbatch that needs it."""
    for case in cases(num_stages, (1, 4), (None, MORE_THAN_ALL)):
        check(case)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_with_tensor_and_data_parallel_collectives(num_stages: int) -> None:
    """Nothing hangs if tensor- and data-parallel collectives lie between the messages."""
    events = events_of([0, num_stages - 1])
    case = Case(num_stages=num_stages, num_microbatches=3, events=events, tensor_size=2, data_size=2)
    for overlaps_reduction in (False, True):
        ranks = check(replace(case, overlaps_reduction=overlaps_reduction))
        assert len(ranks) == 4 * num_stages
        groups = {str(step.communicator[0]) for rank in ranks for step in rank.steps if hasattr(step, "communicator")}
        assert groups == {"pp", "tp", "dp", "norm", "embd", "world"}


@pytest.mark.parametrize("num_stages", [2, 3])
def test_interleaved_plans(num_stages: int) -> None:
    """Nothing hangs in interleaved plans, and every chunk computes on its own inputs."""
    train = [[Event("train", block)] * 2 for block in (0, 2, 1)]
    served = (Event("fill", 2), *[Event("train", 2, is_served=True)] * 2)
    events = (*train[0], Event("evaluate"), *train[1], Event("checkpoint"), *served, *train[2])
    for num_microbatches in (1, 4, 5):
        case = Case(num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=3, events=events)
        check(case)
    check(replace(case, data_size=2, tensor_size=2, overlaps_reduction=True))


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_breadth_first_plans(num_stages: int) -> None:
    """Nothing hangs in breadth-first plans, whose losses and updates lie between messages."""
    events = (Event("train"), Event("train"), Event("evaluate"), Event("train"))
    for num_chunks, num_microbatches in itertools.product((1, 2, 3), (1, 4, 12)):
        case = Case(num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks, events=events,
                    is_breadth_first=True)  # fmt: skip
        check(case)
    check(replace(case, data_size=2, tensor_size=2, overlaps_reduction=True))


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("num_stages, first_trainable", [(2, 1), (4, 2)])
def test_wrong_schedules_are_seen(name: str, num_stages: int, first_trainable: int) -> None:
    """The checker accepts the right schedule and refuses each wrong one."""
    case = Case(num_stages=num_stages, num_microbatches=4, events=(Event("train", first_trainable),) * 3)
    check(case)
    with MUTANTS[name](), pytest.raises(OrderError):
        check(case)
