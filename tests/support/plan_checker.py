"""Check that a plan does all work once, in a possible order, and never hangs. Pure.

It does not know how a plan is built. First it follows each stage's actions: an action's inputs must exist, and its
outputs must be used. Then it runs the stages against each other with every message as a rendezvous: a send ends only
after its receive has begun. Messages between two stages have the same order at both ends, because a pair of stages may
share one communicator. The executor waits less than that, so it cannot hang if this does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from megatron.bcd.pipeline.build import max_graphs
from megatron.bcd.pipeline.plan import Action, Kind, Plan, PlanShape


class PlanError(ValueError):
    """A plan that would hang, lose work or do it twice. One line names stage, action and microbatch."""


class Message(NamedTuple):
    """The output or the input gradient of one microbatch, or the loss, between two virtual stages."""

    source: int
    target: int
    microbatch: int

    @property
    def is_backward(self) -> bool:
        return self.target < self.source


def action_message(virtual: int, action: Action) -> Message | None:
    """The message that a virtual stage sends or receives in this action; None if it computes."""
    verb, _, what = action.kind.partition(" ")
    if verb not in ("send", "receive"):
        return None
    source = virtual if verb == "send" else virtual - (1 if what == "forward" else -1)
    return Message(source, source + (1 if what == "forward" else -1), action.microbatch)


class _Place(NamedTuple):
    """An action and its position; `str` names it in errors."""

    stage: int
    position: int
    action: Action
    virtual: int

    @property
    def message(self) -> Message | None:
        return action_message(self.virtual, self.action)

    @property
    def is_send(self) -> bool:
        return self.action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD, Kind.SEND_LOSS)

    def __str__(self) -> str:
        action = self.action
        which = f"{action.kind} of microbatch {action.microbatch}, chunk {action.chunk}"
        return f"stage {self.stage}, action {self.position} ({which})"


_Places = Sequence[Sequence[_Place]]
"""Positions by stage, in order."""


def validate_plan(plan: Plan) -> None:
    """Raise PlanError unless the plan is exactly one iteration of its shape."""
    shape = plan.shape
    if len(plan.stages) != shape.num_stages:
        raise PlanError(f"actions of {len(plan.stages)} stages for {shape.num_stages} stages")
    for stage, places in enumerate(_places(plan)):
        _follow(shape, stage, places)
        _check_order(shape, stage, places)
    check_no_deadlock(plan)


def _places(plan: Plan) -> _Places:
    return [
        [
            _Place(stage, position, action, plan.shape.virtual_stage(stage, action.chunk))
            for position, action in enumerate(actions)
        ]
        for stage, actions in enumerate(plan.stages)
    ]


def _check_order(shape: PlanShape, stage: int, places: Sequence[_Place]) -> None:
    """Check that every chunk runs its microbatches once and in order, as data, dropout and sums depend on it."""
    for virtual in range(stage, shape.num_virtual, shape.num_stages):
        forward, backward = shape.forward_kind(virtual), shape.backward_kind(virtual)
        for kind, microbatches in (
            (forward, shape.forward_microbatches(virtual)),
            (backward, range(shape.num_microbatches)),
        ):
            due = microbatches if kind is not None else ()
            done = (place for place in places if place.virtual == virtual and place.action.kind is kind)
            for microbatch, place in zip_longest(due, done):
                if place is None:
                    raise PlanError(f"stage {stage}: no {kind} of microbatch {microbatch}, virtual stage {virtual}")
                if place.action.microbatch != microbatch:
                    expected = "none is due any more" if microbatch is None else f"microbatch {microbatch} is due"
                    raise PlanError(f"{place}: {expected}")


_Thing = tuple[str, int, int]
"""An object on a stage: its name, microbatch and virtual stage."""


def _follow(shape: PlanShape, stage: int, places: Sequence[_Place]) -> None:
    """Check that every object is created once and used once, and that not too many activations are kept."""
    is_after_prefix = shape.stage_of(shape.first_trainable) == stage and shape.is_training

    def inputs(microbatches: range) -> set[_Thing]:
        return {("input", microbatch, shape.first_trainable) for microbatch in microbatches if is_after_prefix}

    present = inputs(range(shape.done_ahead))
    produced, num_graphs, bound = set(present), 0, max_graphs(shape, stage)
    for place in places:
        kind, microbatch, virtual = place.action.kind, place.action.microbatch, place.virtual
        if place.action.chunk >= shape.num_chunks:
            raise PlanError(f"{place}: there are {shape.num_chunks} chunks")
        if kind.computes and kind not in (shape.forward_kind(virtual), shape.backward_kind(virtual)):
            raise PlanError(f"{place}: not on virtual stage {virtual}, first trainable {shape.first_trainable}")
        for what in _needs(shape, place):
            thing = what, microbatch, virtual
            if thing not in present:
                reason = "has been used already" if thing in produced else "is not there yet"
                raise PlanError(f"{place}: the {what} of microbatch {microbatch} {reason}")
            present.remove(thing)
        for what in _makes(shape, place):
            thing = what, microbatch, virtual
            if thing in produced:
                raise PlanError(f"{place}: the {what} of microbatch {microbatch} comes a second time")
            produced.add(thing)
            present.add(thing)
        num_graphs += (kind is Kind.FORWARD) - kind.is_backward
        if num_graphs > bound:
            raise PlanError(f"{place}: activations of {num_graphs} microbatches are kept, at most {bound} may be")
    ahead = inputs(range(shape.num_microbatches, shape.num_microbatches + shape.run_ahead))
    for what, microbatch, virtual in sorted(ahead ^ present):
        raise PlanError(f"stage {stage}: the {what} of microbatch {microbatch}, virtual stage {virtual}, is left over")


def _needs(shape: PlanShape, place: _Place) -> Iterator[str]:
    kind, virtual = place.action.kind, place.virtual
    if kind.is_forward and shape.needs_input(virtual):
        yield "input"
    elif kind.is_backward:
        yield "activations"
        if virtual < shape.last:
            yield "output gradient"
    elif kind is Kind.SEND_FORWARD:
        yield "output"
    elif kind is Kind.SEND_BACKWARD:
        yield "input gradient"


def _makes(shape: PlanShape, place: _Place) -> Iterator[str]:
    kind, virtual = place.action.kind, place.virtual
    if kind.is_forward:
        if virtual < shape.last:
            yield "output"
        if kind is Kind.FORWARD:
            yield "activations"
    elif kind.is_backward and shape.needs_input_gradient(virtual):
        yield "input gradient"
    elif kind is Kind.RECEIVE_FORWARD:
        yield "input"
    elif kind is Kind.RECEIVE_BACKWARD:
        yield "output gradient"


def _other(shape: PlanShape, place: _Place) -> int:
    """Return the stage at the other end of a message."""
    message = place.message
    assert message is not None
    return shape.stage_of(message.source + message.target - place.virtual)


def check_no_deadlock(plan: Plan) -> None:
    """Run the stages with every message as a rendezvous. Raises PlanError."""
    shape = plan.shape
    left = [[place for place in places if place.message is not None][::-1] for places in _places(plan)]
    to_look_at = list(range(len(left)))
    while to_look_at:
        stage = to_look_at.pop()
        while left[stage]:
            here = left[stage][-1]
            other = _other(shape, here)
            there = left[other][-1] if left[other] else None
            if there is None or there.message != here.message or there.is_send == here.is_send:
                break
            left[stage].pop()
            left[other].pop()
            to_look_at.append(other)
    waiting = [f"{places[-1]} waits for stage {_other(shape, places[-1])}" for places in left if places]
    if waiting:
        raise PlanError(f"deadlock: {'; '.join(waiting)}")
