"""Pipeline plans: every plan passes its check, and the check finds what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.bcd.pipeline.actions import TWO_WAY, Action, Kind
from megatron.bcd.pipeline.build import (
    Plan,
    PlanShape,
    bcd_shape,
    build_plan,
    evaluation_shape,
    stage_actions,
    stock_shape,
)
from megatron.bcd.pipeline.validate import PlanError, validate_plan


def bcd(stages: int, microbatches: int, first_trainable: int, *, done: int = 0, ahead: int = 0) -> Plan:
    """BCD's plan, the first trainable stage alone active."""
    shape = bcd_shape(
        num_stages=stages,
        num_microbatches=microbatches,
        first_trainable=first_trainable,
        done_ahead=done,
        run_ahead=ahead,
    )
    return build_plan(shape)


def stock(stages: int, microbatches: int, first_trainable: int = 0, *, all_active: bool = False) -> Plan:
    active = [stage >= first_trainable if all_active else stage == first_trainable for stage in range(stages)]
    shape = bcd_shape(num_stages=stages, num_microbatches=microbatches, first_trainable=first_trainable, active=active)
    return build_plan(stock_shape(shape))


def with_stage(plan: Plan, stage: int, actions: list[Action]) -> Plan:
    """The plan with other actions on one stage."""
    return replace(plan, stages=(*plan.stages[:stage], tuple(actions), *plan.stages[stage + 1 :]))


def sweep(num_stages: int) -> Iterator[PlanShape]:
    """Every training iteration, stock's and BCD's, and evaluation, of up to 16 microbatches."""
    for microbatches in range(1, 17):
        yield evaluation_shape(num_stages=num_stages, num_microbatches=microbatches)
        for first_trainable in range(num_stages):
            active = [stage >= first_trainable and (stage - first_trainable) % 2 == 0 for stage in range(num_stages)]
            shape = bcd_shape(
                num_stages=num_stages, num_microbatches=microbatches, first_trainable=first_trainable, active=active
            )
            yield stock_shape(shape)
            most = min(microbatches, 4) if first_trainable else 0
            for done in range(most + 1):
                for ahead in range(most + 1):
                    yield replace(shape, done_ahead=done, run_ahead=ahead)


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_every_plan_passes(num_stages: int) -> None:
    """A corner (one microbatch, fewer than stages, everything done ahead) in which a plan hangs or loses work."""
    for shape in sweep(num_stages):
        validate_plan(build_plan(shape))
        stage_actions.cache_clear()  # two million actions, kept, would be a gigabyte


@st.composite
def shapes(draw: st.DrawFn) -> PlanShape:
    """Small enough to be read, with at least one message."""
    stages, microbatches = draw(st.integers(2, 5)), draw(st.integers(1, 6))
    first_trainable = draw(st.integers(0, stages))
    if first_trainable == stages:
        return evaluation_shape(num_stages=stages, num_microbatches=microbatches)
    counts = st.integers(0, min(microbatches, 3) if first_trainable else 0)
    shape = bcd_shape(
        num_stages=stages,
        num_microbatches=microbatches,
        first_trainable=first_trainable,
        done_ahead=draw(counts),
        run_ahead=draw(counts),
    )
    return draw(st.sampled_from((shape, stock_shape(shape))))


@st.composite
def places(draw: st.DrawFn) -> tuple[Plan, int, int]:
    """A plan, a stage and the position of one of its actions."""
    plan = build_plan(draw(shapes()))
    stage = draw(st.sampled_from([stage for stage, actions in enumerate(plan.stages) if actions]))
    return plan, stage, draw(st.integers(0, len(plan.stages[stage]) - 1))


def dropped(actions: list[Action], position: int) -> list[Action]:
    return actions[:position] + actions[position + 1 :]


def doubled(actions: list[Action], position: int) -> list[Action]:
    return actions[: position + 1] + actions[position:]


def renumbered(actions: list[Action], position: int) -> list[Action]:
    action = actions[position]
    return [*actions[:position], replace(action, microbatch=action.microbatch + 1), *actions[position + 1 :]]


def rereceived(actions: list[Action], position: int) -> list[Action]:
    """A two-way message that receives another microbatch, any other action that names a second one."""
    action = actions[position]
    other = 0 if action.received is None else action.received + 1
    return [*actions[:position], replace(action, received=other), *actions[position + 1 :]]


@pytest.mark.parametrize("mutate", [dropped, doubled, renumbered, rereceived])
@given(place=places())
def test_one_wrong_action_is_seen(mutate: Callable[[list[Action], int], list[Action]], place: Any) -> None:
    """A message or a pass that is missing, done twice, or another microbatch's, anywhere: training hangs or lies."""
    plan, stage, position = place
    validate_plan(plan)
    with pytest.raises(PlanError, match=f"stage {stage}|deadlock"):
        validate_plan(with_stage(plan, stage, mutate(list(plan.stages[stage]), position)))


@given(place=places(), data=st.data())
def test_two_swapped_actions_are_seen(place: tuple[Plan, int, int], data: st.DataObject) -> None:
    """Two of one kind in each other's place: a gradient added to, or an input used for, another microbatch."""
    plan, stage, first = place
    actions = list(plan.stages[stage])
    alike = [index for index, action in enumerate(actions) if action.kind is actions[first].kind and index != first]
    if alike:
        second = data.draw(st.sampled_from(alike))
        actions[first], actions[second] = actions[second], actions[first]
        with pytest.raises(PlanError):
            validate_plan(with_stage(plan, stage, actions))


@pytest.mark.parametrize(
    "kinds",
    [
        (Kind.RECEIVE_FORWARD, Kind.FORWARD),
        (Kind.FORWARD, Kind.SEND_FORWARD),
        (Kind.RECEIVE_BACKWARD, Kind.BACKWARD_INPUT),
        (Kind.BACKWARD_INPUT, Kind.SEND_BACKWARD),
    ],
)
def test_an_action_before_what_it_needs_is_seen(kinds: tuple[Kind, Kind]) -> None:
    """A pass on a buffer that has not arrived, or a buffer sent before it is computed: silent garbage."""
    plan = bcd(4, 4, 0)
    actions = list(plan.stages[2])
    index = next(
        i for i, pair in enumerate(zip(actions, actions[1:], strict=False)) if tuple(a.kind for a in pair) == kinds
    )
    actions[index : index + 2] = reversed(actions[index : index + 2])
    with pytest.raises(PlanError, match=f"stage 2, action {index} "):
        validate_plan(with_stage(plan, 2, actions))


def separate(action: Action) -> list[Action]:
    """A two-way message as a send and then a receive."""
    if action.kind not in TWO_WAY:
        return [action]
    assert action.received is not None
    if action.kind is Kind.SEND_FORWARD_RECEIVE_BACKWARD:
        kinds = Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD
    else:
        kinds = Kind.SEND_BACKWARD, Kind.RECEIVE_FORWARD
    return [Action(kinds[0], action.microbatch), Action(kinds[1], action.received)]


@pytest.mark.parametrize("plan", [stock(4, 8), bcd(4, 8, 1), bcd(3, 4, 1, done=1, ahead=1)])
def test_separate_messages_deadlock(plan: Plan) -> None:
    """Two neighbours that both send first wait for ever where sends do; buffers hide it on small tensors."""
    apart = tuple(tuple(part for action in actions for part in separate(action)) for actions in plan.stages)
    with pytest.raises(PlanError, match="deadlock"):
        validate_plan(replace(plan, stages=apart))


def all_forward_first(num_stages: int, num_microbatches: int) -> Plan:
    """GPipe's order: sound, but every stage keeps every microbatch."""
    plan = stock(num_stages, num_microbatches, all_active=True)
    stages = []
    for stage in range(num_stages):
        actions: list[Action] = []
        for microbatch in range(num_microbatches):
            actions += [Action(Kind.RECEIVE_FORWARD, microbatch)] if stage else []
            actions.append(Action(Kind.FORWARD, microbatch))
            actions += [Action(Kind.SEND_FORWARD, microbatch)] if stage < num_stages - 1 else []
        for microbatch in range(num_microbatches):
            actions += [Action(Kind.RECEIVE_BACKWARD, microbatch)] if stage < num_stages - 1 else []
            actions.append(Action(Kind.BACKWARD, microbatch))
            actions += [Action(Kind.SEND_BACKWARD, microbatch)] if stage else []
        stages.append(tuple(actions))
    return replace(plan, stages=tuple(stages))


def test_too_many_activations_are_seen() -> None:
    """A schedule that needs more memory than 1F1B."""
    validate_plan(all_forward_first(1, 1))
    with pytest.raises(PlanError, match="stage 1, action 3 "):
        validate_plan(all_forward_first(2, 2))


def test_backward_across_the_pivot_link_is_seen() -> None:
    """Stock's order under BCD's shape: gradients to stages that must not hold any (invariant 6)."""
    shape = bcd(3, 2, 1).shape
    as_stock = replace(stock(3, 2, 1), shape=shape)
    with pytest.raises(PlanError, match="stage 0, action 0 "):
        validate_plan(as_stock)
    with pytest.raises(PlanError, match="stage 1, action 7 "):
        validate_plan(replace(as_stock, stages=(build_plan(shape).stages[0], *as_stock.stages[1:])))


def test_other_wrong_plans_are_seen() -> None:
    """The wrong kind of backward, an input of the next iteration taken for this one's, a message into the void."""
    plan = bcd(3, 2, 1, ahead=1)

    def changed(stage: int, old: Kind, new: Kind) -> Plan:
        return with_stage(plan, stage, [replace(a, kind=new) if a.kind is old else a for a in plan.stages[stage]])

    with pytest.raises(PlanError, match="stage 1, "):
        validate_plan(changed(1, Kind.BACKWARD, Kind.BACKWARD_INPUT))
    with pytest.raises(PlanError, match="stage 2, "):
        validate_plan(changed(2, Kind.BACKWARD_INPUT, Kind.BACKWARD))
    with pytest.raises(PlanError, match="microbatch 2"):
        validate_plan(changed(1, Kind.RECEIVE_AHEAD, Kind.RECEIVE_FORWARD))
    with pytest.raises(PlanError, match="stage 3"):
        validate_plan(with_stage(plan, 2, [*plan.stages[2], Action(Kind.SEND_FORWARD, 0)]))
    with pytest.raises(PlanError, match="stages"):
        validate_plan(replace(plan, stages=plan.stages[:2]))
    evaluation = build_plan(evaluation_shape(num_stages=2, num_microbatches=2))
    early = [evaluation.stages[1][index] for index in (2, 0, 1, 3)]
    with pytest.raises(PlanError, match="microbatch 0"):
        validate_plan(with_stage(evaluation, 1, early))
    twice = [*plan.stages[2][:1], *plan.stages[2]]
    with pytest.raises(PlanError, match="stage 2, action 1 "):
        validate_plan(with_stage(plan, 2, twice))
    both_ends = with_stage(plan, 0, list(plan.stages[0][:-1]))
    both_ends = with_stage(both_ends, 1, [a for a in plan.stages[1] if a.kind is not Kind.RECEIVE_AHEAD])
    with pytest.raises(PlanError, match="stage 0"):
        validate_plan(both_ends)


@pytest.mark.parametrize("plan", [stock(3, 4), bcd(3, 4, 1), bcd(3, 4, 0)])
def test_a_microbatch_that_nobody_does_is_seen(plan: Plan) -> None:
    """A last batch that all stages leave out alike: every message still has both its ends."""
    with pytest.raises(PlanError, match="microbatch 4"):
        validate_plan(replace(plan, shape=replace(plan.shape, num_microbatches=5)))
    with pytest.raises(PlanError, match="microbatch 3"):
        validate_plan(replace(plan, shape=replace(plan.shape, num_microbatches=3)))


class Recorder:
    """Stands for Megatron Core's communicator, forward and backward step of one stage; notes what is asked of it."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self.pp_group = SimpleNamespace(rank=lambda: stage, size=lambda: num_stages)
        self.config = SimpleNamespace(
            overlap_p2p_comm=False, finalize_model_grads_func=None, timers=None, no_sync_func=None, grad_sync_func=None,
            num_microbatches_with_partial_activation_checkpoints=None, deallocate_pipeline_outputs=False,
            fine_grained_activation_offloading=False,
        )  # fmt: skip
        self.actions: list[Action] = []
        self.inputs, self.gradients = iter(range(99)), iter(range(99))

    def forward(self, *_: Any, current_microbatch: int, **others: Any) -> tuple[list[int], int]:
        self.actions.append(Action(Kind.FORWARD, current_microbatch))
        return [current_microbatch], 0

    def backward(self, _: Any, output: list[int], *others: Any) -> list[int]:
        self.actions.append(Action(Kind.BACKWARD, output[0]))
        return output

    def recv_forward(self, shapes: Any, is_first: bool) -> None:
        if not is_first:
            self.actions.append(Action(Kind.RECEIVE_FORWARD, next(self.inputs)))

    def recv_backward(self, shapes: Any, is_last: bool) -> None:
        if not is_last:
            self.actions.append(Action(Kind.RECEIVE_BACKWARD, next(self.gradients)))

    def send_forward(self, output: list[int], is_last: bool) -> None:
        if not is_last:
            self.actions.append(Action(Kind.SEND_FORWARD, output[0]))

    def send_backward(self, gradient: list[int], is_first: bool) -> None:
        if not is_first:
            self.actions.append(Action(Kind.SEND_BACKWARD, gradient[0]))

    def send_forward_recv_backward(self, output: list[int], shapes: Any, is_last: bool) -> None:
        if not is_last:
            kind = Kind.SEND_FORWARD_RECEIVE_BACKWARD
            self.actions.append(Action(kind, output[0], next(self.gradients)))

    def send_backward_recv_forward(self, gradient: list[int], shapes: Any, is_first: bool) -> None:
        if not is_first:
            kind = Kind.SEND_BACKWARD_RECEIVE_FORWARD
            self.actions.append(Action(kind, gradient[0], next(self.inputs)))


def test_stock_plan_is_what_megatron_core_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison with something that is not stock; Megatron Core's own schedule runs here, all but its tensors."""
    from megatron.core.pipeline_parallel import schedules

    group = SimpleNamespace(size=lambda: 1)
    groups = SimpleNamespace(tp=group, cp=group, embd=None, pos_embd=None, pp=group, dp_cp=group)
    monkeypatch.setattr(schedules, "is_pp_first_stage", lambda group: group.rank() == 0)
    monkeypatch.setattr(schedules, "is_pp_last_stage", lambda group: group.rank() == group.size() - 1)
    monkeypatch.setattr(schedules, "torch", SimpleNamespace(zeros=lambda *_, **others: 0, int=int))
    for name in ("get_tensor_shapes", "get_model_type", "deallocate_output_tensor"):
        monkeypatch.setattr(schedules, name, lambda *_, **others: None)
    for num_stages in range(2, 7):
        for num_microbatches in range(1, 10):
            plan = stock(num_stages, num_microbatches, all_active=True)
            for stage, actions in enumerate(plan.stages):
                recorder = Recorder(stage, num_stages)
                monkeypatch.setattr(schedules, "get_model_config", lambda _, recorder=recorder: recorder.config)
                monkeypatch.setattr(schedules, "forward_step", recorder.forward)
                monkeypatch.setattr(schedules, "backward_step", recorder.backward)
                schedules.forward_backward_pipelining_without_interleaving(
                    forward_step_func=None, data_iterator=None, model=None, num_microbatches=num_microbatches,
                    seq_length=1, micro_batch_size=1, p2p_communicator=recorder, pg_collection=groups,
                )  # fmt: skip
                assert tuple(recorder.actions) == actions
                num_warm_up = [action.kind for action in actions if action.kind.computes].index(Kind.BACKWARD) - 1
                assert num_warm_up == min(num_stages - 1 - stage, num_microbatches - 1)
