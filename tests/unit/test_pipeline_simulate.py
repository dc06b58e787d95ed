"""Pipeline plans: the times of their actions, and the grid drawn from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.unit_costs import unit_costs

from megatron.bcd.pipeline.actions import Action, Kind
from megatron.bcd.pipeline.build import (
    MAX_SENDS_IN_FLIGHT,
    Plan,
    PlanShape,
    bcd_shape,
    build_plan,
    default_run_ahead,
    evaluation_shape,
    stock_shape,
)
from megatron.bcd.pipeline.render import backward_messages, kept_activations
from megatron.bcd.pipeline.simulate import ActionCosts, Timeline, action_costs, simulate


def shape_of(
    stages: int, microbatches: int, first_trainable: int = 0, *, ahead: int = 0, all_active: bool = False
) -> PlanShape:
    """BCD's shape in the middle of a phase; the first trainable stage alone is active, or every stage from it on."""
    active = [stage == first_trainable or (all_active and stage > first_trainable) for stage in range(stages)]
    return bcd_shape(
        num_stages=stages,
        num_microbatches=microbatches,
        first_trainable=first_trainable,
        active=active,
        done_ahead=ahead,
        run_ahead=ahead,
    )


def times(shape: PlanShape, *, message: float = 0.0) -> Timeline:
    """With unit costs."""
    return simulate(build_plan(shape), ActionCosts(seconds=unit_costs(shape).seconds, message=message))


def computed(timeline: Timeline, stage: int) -> str:
    """What the stage computes: its labels' kind and microbatch, each with start and end."""
    spans = (span for span in timeline.spans[stage] if span.action.kind.computes)
    return " ".join(f"{span.action.kind.name[0]}{span.action.microbatch}:{span.start:g}-{span.end:g}" for span in spans)


def ends_from(timeline: Timeline, first_stage: int) -> float:
    return max(spans[-1].end for spans in timeline.spans[first_stage:])


@pytest.mark.parametrize("num_stages", range(1, 7))
@pytest.mark.parametrize("num_microbatches", (1, 2, 5, 8, 13))
def test_full_training_has_the_textbook_time(num_stages: int, num_microbatches: int) -> None:
    """1F1B with F = 1 and B = 2 takes (m + S - 1) x 3, with a bubble of (S - 1) / (m + S - 1)."""
    timeline = times(stock_shape(shape_of(num_stages, num_microbatches, all_active=True)))
    rounds = num_microbatches + num_stages - 1
    assert timeline.iteration_time == 3 * rounds
    assert timeline.busy_times == (3.0 * num_microbatches,) * num_stages
    assert timeline.bubble == pytest.approx((num_stages - 1) / rounds)


def test_two_stages_by_hand() -> None:
    """A rendezvous that does not wait, a wait that is too long, a message that costs nothing or twice."""
    one = times(stock_shape(shape_of(2, 1, all_active=True)), message=0.5)
    assert [computed(one, stage) for stage in (0, 1)] == ["F0:0-1 B0:5-7", "F0:1.5-2.5 B0:2.5-4.5"]
    two = times(stock_shape(shape_of(2, 2, all_active=True)))
    assert [computed(two, stage) for stage in (0, 1)] == ["F0:0-1 F1:1-2 B0:4-6 B1:7-9", "F0:1-2 B0:2-4 F1:4-5 B1:5-7"]
    # stage 0 sends without waiting; stage 1 begins to receive when it needs the input
    prefix = times(shape_of(2, 2, 1), message=0.5)
    assert [computed(prefix, stage) for stage in (0, 1)] == ["F0:0-1 F1:1-2", "F0:1.5-2.5 B0:2.5-4.5 F1:5-6 B1:6-8"]
    # with one microbatch done ahead stage 1 begins at once, and the next iteration's message delays nobody
    ahead = times(shape_of(2, 2, 1, ahead=1), message=0.5)
    assert [computed(ahead, stage) for stage in (0, 1)] == ["F1:0-1 F2:1-2", "F0:0-1 B0:1-3 F1:3.5-4.5 B1:4.5-6.5"]


def test_at_most_two_sends_are_in_flight() -> None:
    """A prefix that fills the memory of the machine with outputs that nobody has taken."""
    assert MAX_SENDS_IN_FLIGHT == 2
    timeline = times(shape_of(2, 6, 1))
    # stage 1 takes inputs at 1, 4, 7, ...: output 2 may leave at 3, output 3 when input 1 is taken at 4
    assert computed(timeline, 0) == "F0:0-1 F1:1-2 F2:2-3 F3:3-4 F4:4-5 F5:7-8"
    slow = {(0, Kind.FORWARD_ONLY): 0.0, (1, Kind.FORWARD): 10.0, (1, Kind.BACKWARD): 0.0}
    sends = simulate(build_plan(shape_of(2, 6, 1)), ActionCosts(seconds=slow)).spans[0]
    assert [span.end for span in sends if span.action.kind is Kind.SEND_FORWARD] == [0, 0, 0, 10, 20, 30]


def test_receive_ahead_does_not_wait_and_frees_the_sender() -> None:
    """A first trainable stage that waits for the next iteration's inputs before its own last forward."""
    shape = shape_of(2, 1, 1, ahead=1)
    costs = ActionCosts(seconds={(0, Kind.FORWARD_ONLY): 9, (1, Kind.FORWARD): 1, (1, Kind.BACKWARD): 2})
    timeline = simulate(build_plan(shape), costs)
    assert (ends_from(timeline, 1), timeline.iteration_time) == (3, 9)
    assert [span.action.kind for span in timeline.critical_path] == [Kind.FORWARD_ONLY, Kind.SEND_FORWARD]


@pytest.mark.parametrize("num_stages", range(2, 8))
def test_run_ahead_hides_the_filling(num_stages: int) -> None:
    """Run-ahead that starts too late: the first trainable stage must go as if it were the first stage of a shorter
    pipeline."""
    for first_trainable in range(1, num_stages):
        for num_microbatches in range(1, 11):
            alone = times(shape_of(num_stages - first_trainable, num_microbatches)).iteration_time
            ahead = times(
                shape_of(num_stages, num_microbatches, first_trainable, ahead=min(first_trainable, num_microbatches))
            )
            assert ends_from(ahead, first_trainable) == alone
            assert (
                ends_from(times(shape_of(num_stages, num_microbatches, first_trainable)), first_trainable)
                == alone + first_trainable
            )


def test_default_run_ahead_is_as_good_as_any() -> None:
    """A default that leaves part of the filling, or that stages behind the others have to wait for."""
    for num_stages in range(2, 8):
        for first_trainable in range(1, num_stages):
            for num_microbatches in (1, 2, 4, 8):
                default = default_run_ahead(num_stages=num_stages, first_trainable=first_trainable)
                assert 1 <= default <= first_trainable
                all_times = [
                    times(shape_of(num_stages, num_microbatches, first_trainable, ahead=ahead)).iteration_time
                    for ahead in range(num_microbatches + 1)
                ]
                assert all_times[min(default, num_microbatches)] == min(all_times)


def test_bcd_is_never_slower_than_stock() -> None:
    """A schedule that gives away with waiting what it saves in work."""
    for num_stages in range(2, 8):
        for first_trainable in range(num_stages):
            for num_microbatches in range(1, 11):
                shape = shape_of(
                    num_stages, num_microbatches, first_trainable, ahead=min(first_trainable, num_microbatches)
                )
                assert times(shape).iteration_time <= times(stock_shape(shape)).iteration_time


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """A plan with whole costs, so that sums are exact; messages take no time."""
    stages, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    first_trainable = draw(st.integers(0, stages))
    if first_trainable == stages:
        shape = evaluation_shape(num_stages=stages, num_microbatches=microbatches)
    else:
        shape = shape_of(
            stages, microbatches, first_trainable, ahead=draw(st.integers(0, microbatches if first_trainable else 0))
        )
        shape = draw(st.sampled_from((shape, stock_shape(shape))))
    costs = st.lists(st.integers(0, 5), min_size=stages, max_size=stages)
    given = action_costs(shape, forward=draw(costs), backward=draw(costs), backward_input=draw(costs))
    return simulate(build_plan(shape), given)


@given(timelines())
def test_critical_path_explains_the_end(timeline: Timeline) -> None:
    """A chain with a hole in it: with free messages, what it computes takes exactly as long as the iteration."""
    path = timeline.critical_path
    assert sum(span.duration for span in path if span.action.kind.computes) == timeline.iteration_time
    assert all(span in timeline.spans[span.stage] for span in path)
    for before, after in zip(path, path[1:], strict=False):
        assert before.start <= after.end
        assert abs(before.stage - after.stage) <= 1


@given(timelines())
def test_a_stage_does_one_thing_after_the_other(timeline: Timeline) -> None:
    """Actions that overlap, or a time that is lost between two of them."""
    for actions, spans in zip(timeline.plan.stages, timeline.spans, strict=True):
        assert tuple(span.action for span in spans) == actions
        assert [span.start for span in spans] == [0, *(span.end for span in spans)][: len(spans)]
        assert all(span.duration >= 0 for span in spans)


def test_bad_costs_and_plans() -> None:
    """A time that is no number spreads through the whole timeline; a missing one must not be 0."""
    shape = shape_of(2, 2)
    for cost in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="time"):
            ActionCosts(seconds={(0, Kind.FORWARD): cost})
        with pytest.raises(ValueError, match="time"):
            ActionCosts(seconds={}, message=cost)
    with pytest.raises(ValueError, match="stage 0"):
        simulate(build_plan(shape), ActionCosts(seconds={}))
    alone = Plan(shape=shape, stages=((Action(Kind.RECEIVE_BACKWARD, 1),), ()))
    with pytest.raises(ValueError, match="stage 0"):
        simulate(alone, unit_costs(shape))


def test_frozen_first_stage_of_stock_has_no_backward_work() -> None:
    """Stock would look slower than it is: a backward with nothing to compute returns at once."""
    shape = shape_of(3, 4, 1)
    assert unit_costs(stock_shape(shape)).of(0, Kind.BACKWARD_INPUT) == 0
    assert times(stock_shape(shape)).busy_times == (4, 12, 8)
    assert unit_costs(shape).of(2, Kind.BACKWARD_INPUT) == 1


def test_counts_by_stage() -> None:
    """Figures of the saving that do not follow from the plan."""
    shape = shape_of(4, 8, 2, ahead=2)
    for plan, kept, messages in (
        (build_plan(stock_shape(shape)), [4, 3, 2, 1], [0, 8, 8, 8]),
        (build_plan(shape), [0, 0, 2, 1], [0, 0, 0, 8]),
    ):
        assert [kept_activations(actions) for actions in plan.stages] == kept
        assert [backward_messages(stage, actions) for stage, actions in enumerate(plan.stages)] == messages
