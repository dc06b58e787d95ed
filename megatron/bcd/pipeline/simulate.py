"""How long an iteration takes, from the time of every action.

Times in seconds, or in any other unit throughout. A stage does its actions in order. A message begins when both ends
are there and the link's message before it has arrived, and takes `ActionCosts.message`; both ends wait for it. Two
exceptions: a one-way send does not wait, unless MAX_SENDS_IN_FLIGHT have not arrived yet, and RECEIVE_AHEAD never
waits. Microbatches that were done ahead are there at time 0.

Left out, for the caller to add: the optimizer step, the reductions of gradients and loss, and anything else that is
done once per iteration.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.bcd.pipeline.actions import Action, Kind, Message, messages_of, received, sent
from megatron.bcd.pipeline.build import MAX_SENDS_IN_FLIGHT, Plan, PlanShape
from megatron.bcd.pipeline.interleaved import ChunkPlan


@dataclass(frozen=True, kw_only=True)
class ActionCosts:
    """The time of every kind of action on every stage, and of a message."""

    seconds: Mapping[tuple[int, Kind], float]
    """By stage and computing kind."""
    message: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for a cost that is no time."""
        for cost in (*self.seconds.values(), self.message):
            if not (math.isfinite(cost) and cost >= 0):
                raise ValueError(f"cost {cost}: must be a time, at least 0")

    def of(self, stage: int, kind: Kind) -> float:
        """Raises ValueError where no cost was given."""
        cost = self.seconds.get((stage, kind))
        if cost is None:
            raise ValueError(f"stage {stage} has no cost of a {kind}")
        return cost


def action_costs(
    shape: PlanShape,
    *,
    forward: Sequence[float],
    backward: Sequence[float],
    backward_input: Sequence[float],
    message: float = 0.0,
) -> ActionCosts:
    """Costs given by stage; forward-only costs as much as forward. Raises ValueError as ActionCosts.

    In a stock plan a frozen stage 0 receives gradients, but neither a weight nor an input of it wants one: its backward
    costs nothing.
    """
    seconds: dict[tuple[int, Kind], float] = {}
    for stage in range(shape.num_stages):
        seconds[stage, Kind.FORWARD] = seconds[stage, Kind.FORWARD_ONLY] = forward[stage]
        seconds[stage, Kind.BACKWARD] = backward[stage]
        seconds[stage, Kind.BACKWARD_INPUT] = backward_input[stage]
    if shape.is_stock:
        seconds[0, Kind.BACKWARD_INPUT] = 0.0
    return ActionCosts(seconds=seconds, message=message)


@dataclass(frozen=True, slots=True)
class Span:
    """An action and its time; a message's includes the wait for the other end."""

    stage: int
    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The times of a plan's actions, and what follows from them."""

    plan: Plan | ChunkPlan
    spans: tuple[tuple[Span, ...], ...]
    """By stage, in the order of its actions, one after the other without a gap; in an interleaved plan with gaps where
    a pass waits."""
    critical_path: tuple[Span, ...]
    """In order of time, the actions that decide the end: each waits for the one before it, on its stage or another's.

    To shorten the iteration, one of them must become shorter or wait for something else.
    """

    @property
    def iteration_time(self) -> float:
        """The latest end on any stage, run-ahead work included."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @property
    def busy_times(self) -> tuple[float, ...]:
        """By stage, the time in which it computes."""
        return tuple(sum(span.duration for span in spans if span.action.kind.computes) for spans in self.spans)

    @property
    def bubble_fractions(self) -> tuple[float, ...]:
        """By stage, the part of the iteration in which it does not compute; 0 in an iteration that takes no time."""
        total = self.iteration_time
        return tuple(1 - busy / total if total else 0.0 for busy in self.busy_times)

    @property
    def bubble(self) -> float:
        """The same over all stages."""
        return sum(self.bubble_fractions) / len(self.spans)


def simulate(plan: Plan, costs: ActionCosts) -> Timeline:
    """When every action of a plan begins and ends.

    Raises ValueError where a cost is missing, and for a plan in which stages wait for each other for ever
    (`validate_plan` says why).
    """
    ends = _Simulation(plan, costs).run()
    spans = tuple(
        tuple(
            Span(stage, action, before.time, end.time)
            for action, before, end in zip(actions, [_START, *ends[stage]], ends[stage], strict=False)
        )
        for stage, actions in enumerate(plan.stages)
    )
    last = max((stage_ends[-1] for stage_ends in ends if stage_ends), key=lambda event: event.time, default=_START)
    path = [spans[stage][position] for stage, position in _places_towards(last)]
    return Timeline(plan=plan, spans=spans, critical_path=tuple(reversed(path)))


@dataclass(frozen=True, slots=True)
class _Event:
    """A point in time, and the earlier one that decided it."""

    time: float
    because: _Event | None
    place: tuple[int, int] | None = None
    """Stage and position of the action whose beginning or end it is; None where a message arrives."""


_START = _Event(0.0, None)


def _places_towards(event: _Event | None) -> Iterator[tuple[int, int]]:
    """The actions that decided when `event` is, the last one first."""
    newest = None
    while event is not None:
        if event.place is not None and event.place != newest:
            newest = event.place
            yield newest
        event = event.because


def _latest(*events: _Event) -> _Event:
    return max(events, key=lambda event: event.time)


class _Simulation:
    """All stages, each as far as it gets until a message that it waits for has not begun."""

    def __init__(self, plan: Plan, costs: ActionCosts) -> None:
        self._plan = plan
        self._costs = costs
        self._ends: list[list[_Event]] = [[] for _ in plan.stages]
        self._sent: dict[Message, _Event] = {}
        self._received: dict[Message, _Event] = {}
        self._arrived: dict[Message, _Event] = {}
        self._link_free: dict[tuple[int, int], _Event] = {}
        """By source and target, the arrival of the link's newest message."""
        self._in_flight: list[deque[Message]] = [deque(maxlen=MAX_SENDS_IN_FLIGHT) for _ in plan.stages]
        """By stage, its newest one-way sends; the oldest of a full queue must have arrived before the next."""

    def run(self) -> list[list[_Event]]:
        """The ends of all actions, by stage."""
        stages = self._plan.stages
        is_moving = True
        while is_moving:
            moved = [self._advance(stage) for stage in range(len(stages))]
            is_moving = any(moved)
        for stage, actions in enumerate(stages):
            if len(self._ends[stage]) < len(actions):
                action = actions[len(self._ends[stage])]
                raise ValueError(f"stage {stage} waits for ever in {action.kind} of microbatch {action.microbatch}")
        return self._ends

    def _advance(self, stage: int) -> bool:
        """Whether at least one action of the stage has ended."""
        actions, ends = self._plan.stages[stage], self._ends[stage]
        num_before = len(ends)
        while len(ends) < len(actions):
            end = self._end_of(stage, actions[len(ends)], ends[-1] if ends else _START)
            if end is None:
                break
            ends.append(end)
        return len(ends) > num_before

    def _end_of(self, stage: int, action: Action, before: _Event) -> _Event | None:
        """The end of the stage's next action, None while that is not known."""
        place = (stage, len(self._ends[stage]))
        if action.kind.computes:
            return _Event(before.time + self._costs.of(stage, action.kind), before, place)
        if action.kind is Kind.SEND_FORWARD and self._plan.shape.is_one_way(stage):
            return self._one_way_send(stage, action, before, place)
        begin = _Event(before.time, before, place)
        outgoing, incoming = sent(stage, action), received(stage, action)
        if outgoing is not None:
            self._sent.setdefault(outgoing, begin)
        if incoming is not None:
            self._received.setdefault(incoming, begin)
        if action.kind is Kind.RECEIVE_AHEAD:
            return begin
        arrivals = [self._arrival(message) for message in messages_of(stage, action)]
        known = [arrival for arrival in arrivals if arrival is not None]
        if len(known) < len(arrivals):
            return None
        latest = _latest(*known)
        return _Event(latest.time, latest, place)

    def _one_way_send(self, stage: int, action: Action, before: _Event, place: tuple[int, int]) -> _Event | None:
        in_flight = self._in_flight[stage]
        if len(in_flight) == MAX_SENDS_IN_FLIGHT:
            oldest = self._arrival(in_flight[0])
            if oldest is None:
                return None
            before = _latest(before, oldest)
        end = _Event(before.time, before, place)
        message = sent(stage, action)
        assert message is not None
        in_flight.append(message)
        self._sent[message] = end
        return end

    def _arrival(self, message: Message) -> _Event | None:
        """When the message has arrived, None while one end has not begun. Messages of a link are asked for in order."""
        if message in self._arrived:
            return self._arrived[message]
        if message not in self._sent or message not in self._received:
            return None
        link = message[:2]
        begin = _latest(self._sent[message], self._received[message], self._link_free.get(link, _START))
        arrival = _Event(begin.time + self._costs.message, begin)
        self._arrived[message] = self._link_free[link] = arrival
        return arrival
