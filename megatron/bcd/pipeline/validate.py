"""Whether a plan does its work once, in a possible order, and never hangs.

Nothing here knows how a plan is built. Each stage's actions are followed one by one: what an action needs must be
there, and what it makes must be used. Then every link is read from both ends, and at last the stages run against each
other with every message as a rendezvous: a send ends only where its receive has begun. The executor waits less than
that (messages of the prefix are sent without waiting, RECEIVE_AHEAD is awaited an iteration later), and whoever waits
less cannot hang where this does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from megatron.bcd.pipeline.actions import TWO_WAY, Action, Kind, Message, received, sent
from megatron.bcd.pipeline.build import Plan, PlanShape


class PlanError(ValueError):
    """A plan that would hang, lose work or do it twice; one line that names stage, action and microbatch."""


class _Place(NamedTuple):
    """An action where it stands, with its messages; `str` names it in errors."""

    stage: int
    position: int
    action: Action
    outgoing: Message | None
    incoming: Message | None

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(message for message in (self.outgoing, self.incoming) if message is not None)

    def __str__(self) -> str:
        action = self.action
        which = f"microbatch {action.microbatch}"
        if action.received is not None:
            which = f"microbatches {action.microbatch} and {action.received}"
        return f"stage {self.stage}, action {self.position} ({action.kind} of {which})"


def validate_plan(plan: Plan) -> None:
    """Raises PlanError where the plan is not one iteration of its shape."""
    shape = plan.shape
    if len(plan.stages) != shape.num_stages:
        raise PlanError(f"actions of {len(plan.stages)} stages for {shape.num_stages} stages")
    stages = [_places(stage, actions) for stage, actions in enumerate(plan.stages)]
    for stage, places in enumerate(stages):
        _check_kinds(shape, stage, places)
        _check_microbatches(shape, stage, places)
        _Stage(shape, stage).follow(places)
    _check_links(stages)
    _check_no_deadlock(stages)


def _places(stage: int, actions: Sequence[Action]) -> list[_Place]:
    for index, action in enumerate(actions):
        if (action.received is not None) != (action.kind in TWO_WAY):
            which = f"{action.kind} of microbatch {action.microbatch}"
            raise PlanError(f"stage {stage}, action {index} ({which}): a two-way message, and no other, names two")
    return [
        _Place(stage, index, action, sent(stage, action), received(stage, action))
        for index, action in enumerate(actions)
    ]


def _check_kinds(shape: PlanShape, stage: int, places: Sequence[_Place]) -> None:
    """Every action may stand on this stage, and its messages have somebody at the other end."""
    allowed = _kinds_of(shape, stage)
    is_first, is_last, takes_gradients = stage == 0, stage == shape.last, _passes_gradients(shape, stage)
    for place in places:
        if place.action.kind not in allowed:
            raise PlanError(f"{place}: {_why_not(shape, stage)}")
        for message in place.messages:
            is_upstream = message.is_backward == (message.source == stage)
            if is_first if is_upstream else is_last:
                raise PlanError(f"{place}: there is no stage {message.source + message.target - stage}")
            if message.is_backward and is_upstream and not takes_gradients:
                raise PlanError(f"{place}: stage {stage - 1} is forward-only and takes no gradient")


def _kinds_of(shape: PlanShape, stage: int) -> frozenset[Kind]:
    if shape.is_forward_only(stage):
        return frozenset((Kind.FORWARD_ONLY, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD))
    never = {Kind.FORWARD_ONLY, Kind.BACKWARD_INPUT if shape.active[stage] else Kind.BACKWARD}
    if not _follows_prefix(shape, stage):
        never.add(Kind.RECEIVE_AHEAD)
    return frozenset(Kind) - never


def _why_not(shape: PlanShape, stage: int) -> str:
    if shape.is_forward_only(stage):
        return "not on a forward-only stage"
    kind = "an active" if shape.active[stage] else "a frozen"
    return f"not on {kind} stage with first trainable stage {shape.first_trainable}"


def _follows_prefix(shape: PlanShape, stage: int) -> bool:
    return stage > 0 and shape.is_forward_only(stage - 1) and not shape.is_forward_only(stage)


def _passes_gradients(shape: PlanShape, stage: int) -> bool:
    return stage > 0 and not shape.is_forward_only(stage - 1)


def _check_microbatches(shape: PlanShape, stage: int, places: Sequence[_Place]) -> None:
    """Forward and backward of exactly the microbatches that are due, in order: data and dropout follow it."""
    is_forward_only = shape.is_forward_only(stage)
    total = shape.num_microbatches
    forward = range(shape.done_ahead, total + shape.run_ahead) if is_forward_only else range(total)
    backward = range(0) if is_forward_only else range(total)
    _check_order("forward", forward, stage, places, (Kind.FORWARD, Kind.FORWARD_ONLY))
    _check_order("backward", backward, stage, places, (Kind.BACKWARD, Kind.BACKWARD_INPUT))


def _check_order(what: str, due: range, stage: int, places: Sequence[_Place], kinds: tuple[Kind, ...]) -> None:
    check_each_once(due, (place for place in places if place.action.kind in kinds), f"stage {stage}: no {what}")


def check_each_once(due: range, done: Iterable[Any], missing: str, where: str = "") -> None:
    """Passes of each due microbatch, once and ascending. `done` are places of actions; `missing` and `where` stand in
    the error before and behind the microbatch that is not among them."""
    for microbatch, place in zip_longest(due, done):
        if place is None:
            raise PlanError(f"{missing} of microbatch {microbatch}{where}")
        if place.action.microbatch != microbatch:
            expected = "none is due any more" if microbatch is None else f"microbatch {microbatch} is due"
            raise PlanError(f"{place}: {expected}")


class Things:
    """What is on one stage while its actions are followed: every thing is made once and used once.

    A thing is its name, its microbatch, and what else tells it from others.
    """

    def __init__(self, present: Iterable[tuple[Any, ...]] = ()) -> None:
        self.present = set(present)
        self._made = set(self.present)

    def make(self, thing: tuple[Any, ...], place: object) -> None:
        if thing in self._made:
            raise PlanError(f"{place}: the {thing[0]} of microbatch {thing[1]} comes a second time")
        self._made.add(thing)
        self.present.add(thing)

    def use(self, thing: tuple[Any, ...], place: object) -> None:
        if thing not in self.present:
            reason = "has been used already" if thing in self._made else "is not there yet"
            raise PlanError(f"{place}: the {thing[0]} of microbatch {thing[1]} {reason}")
        self.present.remove(thing)


class _Stage:
    """Follows the actions of one stage."""

    def __init__(self, shape: PlanShape, stage: int) -> None:
        self.shape = shape
        self.stage = stage
        self.is_first, self.is_last = stage == 0, stage == shape.last
        self.passes_gradients = _passes_gradients(shape, stage)
        self.follows_prefix = _follows_prefix(shape, stage)
        done = range(shape.done_ahead) if self.follows_prefix else range(0)
        self.things = Things(("input", microbatch) for microbatch in done)
        self.num_graphs = 0

    def follow(self, places: Sequence[_Place]) -> None:
        """Raises PlanError at the first action that lacks something, or for what is left at the end."""
        for place in places:
            if place.action.kind.computes:
                self._compute(place)
            else:
                self._communicate(place)
        self._check_left_over()

    def _compute(self, place: _Place) -> None:
        kind, microbatch = place.action.kind, place.action.microbatch
        if kind in (Kind.FORWARD, Kind.FORWARD_ONLY):
            if not self.is_first:
                self.things.use(("input", microbatch), place)
            if not self.is_last:
                self.things.make(("output", microbatch), place)
            if kind is Kind.FORWARD:
                self.things.make(("activations", microbatch), place)
                self._check_bound(place)
        else:
            self.things.use(("activations", microbatch), place)
            self.num_graphs -= 1
            if not self.is_last:
                self.things.use(("output gradient", microbatch), place)
            if self.passes_gradients:
                self.things.make(("input gradient", microbatch), place)

    def _communicate(self, place: _Place) -> None:
        outgoing, incoming = place.outgoing, place.incoming
        if outgoing is not None:
            self.things.use(("input gradient" if outgoing.is_backward else "output", outgoing.microbatch), place)
        if incoming is not None:
            self.things.make(("output gradient" if incoming.is_backward else "input", incoming.microbatch), place)
            is_ahead = incoming.microbatch >= self.shape.num_microbatches and self.follows_prefix
            if is_ahead != (place.action.kind is Kind.RECEIVE_AHEAD):
                whose = "the next iteration's" if is_ahead else "this iteration's"
                raise PlanError(f"{place}: microbatch {incoming.microbatch} is {whose}")

    def _check_bound(self, place: _Place) -> None:
        self.num_graphs += 1
        bound = self.shape.max_graphs(self.stage)
        if self.num_graphs > bound:
            raise PlanError(f"{place}: activations of {self.num_graphs} microbatches are kept, at most {bound} may be")

    def _check_left_over(self) -> None:
        total, run_ahead = self.shape.num_microbatches, self.shape.run_ahead
        ahead = range(total, total + run_ahead) if self.follows_prefix else range(0)
        due = {("input", microbatch) for microbatch in ahead}
        for what, microbatch in sorted(due - self.things.present):
            raise PlanError(f"stage {self.stage}: the {what} of microbatch {microbatch} is not received ahead")
        for what, microbatch in sorted(self.things.present - due):
            raise PlanError(f"stage {self.stage}: the {what} of microbatch {microbatch} is never used")


def _check_links(stages: Sequence[Sequence[_Place]]) -> None:
    """Both ends of every link and direction name the same microbatches in the same order."""
    sends: defaultdict[tuple[int, int], list[_Place]] = defaultdict(list)
    receives: defaultdict[tuple[int, int], list[_Place]] = defaultdict(list)
    for place in chain.from_iterable(stages):
        if place.outgoing is not None:
            sends[place.outgoing[:2]].append(place)
        if place.incoming is not None:
            receives[place.incoming[:2]].append(place)
    for link in sorted(sends.keys() | receives.keys()):
        for sender, receiver in zip_longest(sends[link], receives[link]):
            if sender is None:
                raise PlanError(f"{receiver}: stage {link[0]} sends nothing for it")
            if receiver is None:
                raise PlanError(f"{sender}: stage {link[1]} does not receive it")
            if sender.outgoing != receiver.incoming:
                raise PlanError(f"{sender}: meets {receiver}, another microbatch")


class _Progress:
    """How far one stage has come: the message action that it is at, and which of its halves have no partner yet."""

    def __init__(self, places: Sequence[_Place]) -> None:
        self._places: Iterator[_Place] = (place for place in places if not place.action.kind.computes)
        self.place: _Place | None = None
        self.waits_for: set[Message] = set()
        self.advance()

    def advance(self) -> None:
        """To the next message action; `place` is None after the last one."""
        self.place = next(self._places, None)
        self.waits_for = set() if self.place is None else set(self.place.messages)


def _check_no_deadlock(places: Sequence[Sequence[_Place]]) -> None:
    """Runs the stages with every message as a rendezvous.

    The order in which pairs are taken changes nothing: a pair that is ready stays ready until both ends take it.
    """
    stages = [_Progress(one_stage) for one_stage in places]
    to_look_at = list(range(len(stages)))
    while to_look_at:
        stage = to_look_at.pop()
        mine = stages[stage]
        for message in tuple(mine.waits_for):
            other = message.source + message.target - stage
            if message in stages[other].waits_for:
                mine.waits_for.remove(message)
                stages[other].waits_for.remove(message)
                if not stages[other].waits_for:
                    stages[other].advance()
                    to_look_at.append(other)
        if mine.place is not None and not mine.waits_for:
            mine.advance()
            to_look_at.append(stage)
    waiting = [_describe_wait(progress.place, progress.waits_for) for progress in stages if progress.place is not None]
    if waiting:
        raise PlanError(f"deadlock: {'; '.join(waiting)}")


def _describe_wait(place: _Place, messages: Iterable[Message]) -> str:
    others = sorted({message.source + message.target - place.stage for message in messages})
    return f"{place} waits for stage {' and '.join(map(str, others))}"
