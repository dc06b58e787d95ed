"""Whether an interleaved plan does its work once, in a possible order, and never hangs.

Nothing here knows how a plan is built. Each stage's actions are followed one by one; then the messages between each two
stages are read from both ends, in both directions together, because a pair of stages may share one communicator; at
last the stages run against each other with every message as a rendezvous. The executor waits less than that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from megatron.bcd.pipeline.actions import Action, Kind, Message, messages_of, received, sent
from megatron.bcd.pipeline.chunk_shape import ChunkShape
from megatron.bcd.pipeline.interleaved import ChunkPlan
from megatron.bcd.pipeline.validate import PlanError, Things, check_each_once

_MESSAGES = frozenset((Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD))


class _Place(NamedTuple):
    """An action where it stands; `str` names it in errors."""

    stage: int
    position: int
    action: Action
    virtual: int

    @property
    def message(self) -> Message | None:
        found = messages_of(self.virtual, self.action)
        return found[0] if found else None

    def __str__(self) -> str:
        action = self.action
        which = f"{action.kind} of microbatch {action.microbatch}, chunk {action.chunk}"
        return f"stage {self.stage}, action {self.position} ({which})"


def validate_chunk_plan(plan: ChunkPlan) -> None:
    """Raises PlanError where the plan is not one iteration of its shape."""
    shape = plan.shape
    if len(plan.stages) != shape.num_stages:
        raise PlanError(f"actions of {len(plan.stages)} stages for {shape.num_stages} stages")
    stages = [_places(shape, stage, actions) for stage, actions in enumerate(plan.stages)]
    for stage, places in enumerate(stages):
        for place in places:
            _check_kind(shape, place)
        _check_order(shape, stage, places)
        _Stage(shape, stage).follow(places)
    _check_pairs(shape, stages)
    _check_no_deadlock(shape, stages)


def _places(shape: ChunkShape, stage: int, actions: Sequence[Action]) -> list[_Place]:
    places = []
    for position, action in enumerate(actions):
        place = _Place(stage, position, action, shape.virtual_stage(stage, action.chunk))
        if not 0 <= action.chunk < shape.num_chunks:
            raise PlanError(f"{place}: there are {shape.num_chunks} chunks")
        places.append(place)
    return places


def _check_kind(shape: ChunkShape, place: _Place) -> None:
    """The chunk may do this in its phase, and a message has somebody at the other end."""
    kind, virtual = place.action.kind, place.virtual
    if kind.computes:
        if kind not in (shape.forward_kind(virtual), shape.backward_kind(virtual)):
            raise PlanError(f"{place}: not on virtual stage {virtual}, first trainable {shape.first_trainable}")
        return
    if kind not in _MESSAGES:
        raise PlanError(f"{place}: not in an interleaved plan")
    message = place.message
    assert message is not None
    other = message.source + message.target - virtual
    if not 0 <= other < shape.num_virtual:
        raise PlanError(f"{place}: there is no virtual stage {other}")
    if message.is_backward and not shape.needs_input_gradient(message.source):
        raise PlanError(f"{place}: virtual stage {message.target} is forward-only and takes no gradient")
    if not message.is_backward and not shape.needs_input(message.target):
        raise PlanError(f"{place}: virtual stage {message.target} has its input from the prefix cache")


def _check_order(shape: ChunkShape, stage: int, places: Sequence[_Place]) -> None:
    """Every chunk's microbatches once and ascending, forward and backward: data, dropout and sums follow it."""
    for chunk in range(shape.num_chunks):
        virtual = shape.virtual_stage(stage, chunk)
        for what, kind in (("forward", shape.forward_kind(virtual)), ("backward", shape.backward_kind(virtual))):
            due = range(0 if kind is None else shape.num_microbatches)
            done = (place for place in places if place.action.chunk == chunk and place.action.kind is kind)
            check_each_once(due, done, f"stage {stage}: no {what}", f", chunk {chunk}")


class _Stage:
    """Follows the actions of one stage."""

    def __init__(self, shape: ChunkShape, stage: int) -> None:
        self._shape = shape
        self._bound = shape.max_graphs(stage)
        self._num_graphs = 0
        self._things = Things()

    def follow(self, places: Sequence[_Place]) -> None:
        """Raises PlanError at the first action that lacks something, or for what is left at the end."""
        for place in places:
            for what in self._needs(place):
                self._things.use((what, place.action.microbatch, place.virtual), place)
            for what in self._makes(place):
                self._things.make((what, place.action.microbatch, place.virtual), place)
            if self._num_graphs > self._bound:
                raise PlanError(f"{place}: activations of {self._num_graphs} microbatches are kept, at most "
                                f"{self._bound} may be")  # fmt: skip
        for what, microbatch, virtual in sorted(self._things.present):
            raise PlanError(f"virtual stage {virtual}: the {what} of microbatch {microbatch} is never used")

    def _needs(self, place: _Place) -> Iterator[str]:
        shape, virtual, kind = self._shape, place.virtual, place.action.kind
        if kind in (Kind.FORWARD, Kind.FORWARD_ONLY) and shape.needs_input(virtual):
            yield "input"
        elif kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            self._num_graphs -= 1
            yield "activations"
            if virtual < shape.last:
                yield "output gradient"
        elif kind is Kind.SEND_FORWARD:
            yield "output"
        elif kind is Kind.SEND_BACKWARD:
            yield "input gradient"

    def _makes(self, place: _Place) -> Iterator[str]:
        shape, virtual, kind = self._shape, place.virtual, place.action.kind
        if kind in (Kind.FORWARD, Kind.FORWARD_ONLY):
            if virtual < shape.last:
                yield "output"
            if kind is Kind.FORWARD:
                self._num_graphs += 1
                yield "activations"
        elif kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and shape.needs_input_gradient(virtual):
            yield "input gradient"
        elif kind is Kind.RECEIVE_FORWARD:
            yield "input"
        elif kind is Kind.RECEIVE_BACKWARD:
            yield "output gradient"


def _check_pairs(shape: ChunkShape, stages: Sequence[Sequence[_Place]]) -> None:
    """Both stages of every pair exchange the same messages in the same order."""
    by_end: defaultdict[tuple[int, int], list[_Place]] = defaultdict(list)
    for place in (place for places in stages for place in places):
        if place.message is not None:
            by_end[place.stage, _other(shape, place)].append(place)
    for here, there in sorted({(min(ends), max(ends)) for ends in by_end}):
        for one, two in zip_longest(by_end[here, there], by_end[there, here]):
            if one is None or two is None:
                raise PlanError(f"{one or two}: has no other end")
            messages = (sent(one.virtual, one.action), received(two.virtual, two.action))
            if None in messages:
                messages = (sent(two.virtual, two.action), received(one.virtual, one.action))
            if messages[0] is None or messages[0] != messages[1]:
                raise PlanError(f"{one}: meets {two}, another message")


def _other(shape: ChunkShape, place: _Place) -> int:
    """The stage at the other end of a message."""
    message = place.message
    assert message is not None
    return shape.stage_of(message.source + message.target - place.virtual)


def _check_no_deadlock(shape: ChunkShape, stages: Sequence[Sequence[_Place]]) -> None:
    """Runs the stages with every message as a rendezvous."""
    left = [[place for place in places if place.message is not None][::-1] for places in stages]
    to_look_at = list(range(len(left)))
    while to_look_at:
        stage = to_look_at.pop()
        while left[stage]:
            other = _other(shape, left[stage][-1])
            if not left[other] or left[other][-1].message != left[stage][-1].message:
                break
            left[stage].pop()
            left[other].pop()
            to_look_at.append(other)
    waiting = [f"{places[-1]} waits for stage {_other(shape, places[-1])}" for places in left if places]
    if waiting:
        raise PlanError(f"deadlock: {'; '.join(waiting)}")
