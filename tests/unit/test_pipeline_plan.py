"""Pipeline plans: every plan passes its check, the check finds what is wrong, and full training is stock's order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plan_checker import PlanError, validate_plan

from megatron.bcd.blocks.partition import partition
from megatron.bcd.pipeline.build import build_plan
from megatron.bcd.pipeline.plan import (
    Action,
    Kind,
    Plan,
    PlanShape,
    evaluation_shape,
    phase_shape,
    stock_shape,
)
from megatron.bcd.pipeline.simulate import Timeline, simulate


def shape_of(
    stages: int, microbatches: int, first_trainable: int = 0, *, done: int = 0, ahead: int = 0, all_active: bool = False
) -> PlanShape:
    """BCD's; the first trainable stage alone is active, or every stage from it on."""
    return PlanShape(
        num_stages=stages,
        num_microbatches=microbatches,
        first_trainable=first_trainable,
        active=tuple(stage == first_trainable or (all_active and stage > first_trainable) for stage in range(stages)),
        done_ahead=done,
        run_ahead=ahead,
    )


def chunked(stages: int = 4, chunks: int = 3, microbatches: int = 8, *, blocks: int = 3, block: int = 0) -> PlanShape:
    cut = partition(num_layers=stages * chunks, num_stages=stages, num_blocks=blocks, layout="interleaved",
                    num_parts=chunks, tied=False)  # fmt: skip
    return phase_shape(cut, block, num_microbatches=microbatches)


def sweep(stages: Iterable[int], microbatches: Iterable[int]) -> Iterator[PlanShape]:
    """Every training iteration, stock's and BCD's, and evaluation."""
    for num_stages, number in itertools.product(stages, microbatches):
        yield evaluation_shape(num_stages=num_stages, num_microbatches=number)
        for first in range(num_stages):
            shape = shape_of(num_stages, number, first)
            yield from (shape, stock_shape(shape), shape.full_training, replace(shape, is_prefix_cached=True))
            most = min(number, 3) if first else -1
            for done, ahead in itertools.product(range(most + 1), range(most + 1)):
                yield replace(shape, done_ahead=done, run_ahead=ahead)


def sweep_of_chunks(stages: Iterable[int], chunks: Iterable[int], microbatches: Iterable[int]) -> Iterator[PlanShape]:
    for num_stages, num_chunks, number in itertools.product(stages, chunks, microbatches):
        yield evaluation_shape(num_stages=num_stages, num_chunks=num_chunks, num_microbatches=number)
        for blocks in (blocks for blocks in range(1, num_chunks + 1) if num_chunks % blocks == 0):
            for block in range(blocks):
                yield (shape := chunked(num_stages, num_chunks, number, blocks=blocks, block=block))
                yield replace(shape, is_prefix_cached=True)
        # only the head is active
        last = num_stages * num_chunks - 1
        yield (shape := replace(shape, first_trainable=last, active=(*(False,) * last, True)))
        yield replace(shape, is_prefix_cached=True)


def check(shapes: Iterable[PlanShape]) -> None:
    for shape in shapes:
        plan = build_plan(shape)
        validate_plan(plan)
        spans = simulate(plan, message=0.3).spans
        assert [[span.action for span in of_stage] for of_stage in spans] == [*map(passes, plan.stages)]


def test_every_plan_is_valid() -> None:
    """Every plan is valid, also with one microbatch, with fewer than stages, or with everything done ahead."""
    check(sweep(range(1, 5), (1, 2, 5)))
    check(sweep_of_chunks((2, 3, 4), (2, 3), (1, 2, 5, 7)))


# ---- the check finds what is wrong


@st.composite
def places(draw: st.DrawFn) -> tuple[Plan, int, int]:
    """A plan that is small enough to be read, a stage and the position of one of its actions."""
    stages, microbatches = draw(st.integers(2, 5)), draw(st.integers(1, 6))
    first = draw(st.integers(0, stages - 1))
    counts = st.integers(0, min(microbatches, 3) if first else 0)
    shape = shape_of(stages, microbatches, first, done=draw(counts), ahead=draw(counts))
    others = [shape, stock_shape(shape), evaluation_shape(num_stages=stages, num_microbatches=microbatches)]
    shape = draw(st.sampled_from([*others, chunked(stages, 2, microbatches, blocks=2, block=draw(st.integers(0, 1)))]))
    plan = build_plan(shape)
    stage = draw(st.sampled_from([stage for stage, actions in enumerate(plan.stages) if actions]))
    return plan, stage, draw(st.integers(0, len(plan.stages[stage]) - 1))


MUTATIONS: dict[str, Callable[[Action], list[Action]]] = {
    "dropped": lambda one: [],
    "doubled": lambda one: [one, one],
    "another microbatch": lambda one: [replace(one, microbatch=one.microbatch + 1)],
    "another chunk": lambda one: [replace(one, chunk=one.chunk + 1)],
    "the other kind": lambda one: [replace(one, kind=list(Kind)[list(Kind).index(one.kind) ^ 1])],
}


def with_stage(plan: Plan, stage: int, actions: Iterable[Action]) -> Plan:
    return replace(plan, stages=(*plan.stages[:stage], tuple(actions), *plan.stages[stage + 1 :]))


@pytest.mark.parametrize("mutation", MUTATIONS)
@settings(max_examples=40)
@given(place=places())
def test_one_wrong_action_is_seen(mutation: str, place: tuple[Plan, int, int]) -> None:
    """One wrong action anywhere is refused, with its stage or as a deadlock."""
    plan, stage, at = place
    validate_plan(plan)
    actions = plan.stages[stage]
    with pytest.raises(PlanError, match=f"stage {stage}|deadlock"):
        validate_plan(with_stage(plan, stage, (*actions[:at], *MUTATIONS[mutation](actions[at]), *actions[at + 1 :])))


def test_backward_across_the_pivot_link_is_seen() -> None:
    """Stock's order is refused under BCD's shape, because stages before the first trainable one get no gradients
    (invariant 6)."""
    shape = shape_of(3, 2, 1)
    as_stock = replace(build_plan(stock_shape(shape)), shape=shape)
    with pytest.raises(PlanError, match="stage 0, action 0 "):
        validate_plan(as_stock)
    with pytest.raises(PlanError, match="stage 1, action .*backward"):
        validate_plan(replace(as_stock, stages=(build_plan(shape).stages[0], *as_stock.stages[1:])))


# ---- stock's order


def passes(actions: Iterable[Action]) -> list[Action]:
    return [action for action in actions if action.kind.computes]


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(2, 2, 4), (4, 3, 8), (3, 6, 9), (8, 2, 16)])
def test_interleaved_full_training_is_stocks_order(stages: int, chunks: int, microbatches: int) -> None:
    """Interleaved full training has Megatron Core's warm-up and order of chunks."""
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    table = schedules.get_schedule_table(microbatches, chunks, stages)
    plan = build_plan(chunked(stages, chunks, microbatches, blocks=1))
    for stage in range(stages):
        group = SimpleNamespace(rank=lambda stage=stage: stage, size=lambda: stages)
        *_, num_warm_up, _ = schedules.get_pp_rank_microbatches(
            microbatches, chunks, stages, p2p_communicator=SimpleNamespace(
                pp_group=group, virtual_pipeline_model_parallel_size=chunks, config=None
            )
        )  # fmt: skip
        done = passes(plan.stages[stage])
        assert [(entry.microbatch, entry.chunk) for entry in done if entry.kind is Kind.FORWARD] == list(table)
        assert [
            (element.microbatch, chunks - 1 - element.chunk) for element in done if element.kind is Kind.BACKWARD
        ] == list(table)
        kinds = [item.kind for item in done]
        assert kinds.index(Kind.BACKWARD) == min(num_warm_up + 1, len(table))
        steady = kinds[num_warm_up : 2 * len(table) - num_warm_up]
        assert steady == [Kind.FORWARD, Kind.BACKWARD] * (len(steady) // 2)


# ---- work, memory and times


def times(shape: PlanShape, *, message: float = 0.0) -> Timeline:
    """In forward passes: forward, input gradients and weight gradients take 1 each, on every virtual stage."""
    return simulate(build_plan(shape), message=message)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (2, 5), (4, 2), (5, 13), (6, 8)])
def test_full_training_has_the_textbook_time(num_stages: int, num_microbatches: int) -> None:
    """1F1B with F = 1 and B = 2 takes (m + S - 1) x 3, with a bubble of (S - 1) / (m + S - 1)."""
    timeline = times(shape_of(num_stages, num_microbatches).full_training)
    rounds = num_microbatches + num_stages - 1
    assert timeline.iteration_time == 3 * rounds
    assert timeline.busy_times == (3.0 * num_microbatches,) * num_stages
    assert timeline.bubble == pytest.approx((num_stages - 1) / rounds)


def computed(timeline: Timeline) -> list[str]:
    """What each stage computes: kind and microbatch, each with start and end."""
    return [
        " ".join(f"{span.action.kind.name[0]}{span.action.microbatch}:{span.start:g}-{span.end:g}" for span in spans
                 if span.action.kind.computes)
        for spans in timeline.spans
    ]  # fmt: skip


def test_two_stages_by_hand() -> None:
    """Two stages take the times counted by hand; a message delays its receiver, and no other stage."""
    timeline = times(shape_of(2, 1).full_training, message=0.5)
    assert computed(timeline) == ["F0:0-1 B0:5-7", "F0:1.5-2.5 B0:2.5-4.5"]
    two = times(shape_of(2, 2).full_training)
    assert computed(two) == ["F0:0-1 F1:1-2 B0:4-6 B1:7-9", "F0:1-2 B0:2-4 F1:4-5 B1:5-7"]
    prefix = times(shape_of(2, 2, 1), message=0.5)
    assert computed(prefix) == ["F0:0-1 F1:1-2", "F0:1.5-2.5 B0:2.5-4.5 F1:4.5-5.5 B1:5.5-7.5"]
    # with one microbatch done ahead stage 1 begins at once, and the next iteration's message delays no stage
    ahead = times(shape_of(2, 2, 1, done=1, ahead=1), message=0.5)
    assert computed(ahead) == ["F1:0-1 F2:1-2", "F0:0-1 B0:1-3 F1:3-4 B1:4-6"]


def ends_from(timeline: Timeline, first_stage: int) -> float:
    return max(spans[-1].end for spans in timeline.spans[first_stage:])


def test_run_ahead() -> None:
    """With full run-ahead the first trainable stage goes like the first of a shorter pipeline, and the default is as
    fast as any."""
    for stages, number in itertools.product(range(2, 6), (1, 2, 4, 8)):
        for first in range(1, stages):
            alone = times(shape_of(stages - first, number)).iteration_time
            most = min(first, number)
            ahead = times(shape_of(stages, number, first, done=most, ahead=most))
            assert ends_from(ahead, first) == alone
            assert ends_from(times(shape_of(stages, number, first)), first) == alone + first
            assert ahead.iteration_time <= times(stock_shape(shape_of(stages, number, first))).iteration_time
            default = shape_of(stages, number, first).microbatches_ahead
            assert 1 <= default <= first
            of_all = [times(shape_of(stages, number, first, done=k, ahead=k)).iteration_time for k in range(number + 1)]
            assert of_all[min(default, number)] == min(of_all)


def test_times_of_chunks() -> None:
    """Plans of chunks take the known times, and messages of 0.1 add less than 6 %."""
    assert (
        times(chunked(blocks=1)).iteration_time == (8 * 3 + 3) * 3
    )  # stock's: the bubble is one of a third of a stage
    assert [times(chunked(block=block)).iteration_time for block in range(3)] == [65, 59, 53]
    assert times(chunked(block=1), message=0.1).iteration_time < 1.06 * 59
