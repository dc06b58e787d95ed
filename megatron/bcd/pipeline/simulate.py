"""How long an iteration takes, from the time of every pass and of a message. Pure.

Times in seconds, or in any other unit throughout. A stage does its actions in order. A send does not wait, unless
`PlanShape.max_sends` of the stage have not arrived yet; a receive is awaited by the pass that needs it. The messages
between two stages travel one after the other, in both directions together. What was done ahead is there at time 0.

Left out, for the caller to add: the optimizer step, the reductions of gradients and loss, and anything else that is
done once per iteration.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.bcd.pipeline.plan import Action, Kind, Message, Plan, message_of


@dataclass(frozen=True, kw_only=True)
class ActionCosts:
    """The time of every kind of pass, by virtual stage, and of a message."""

    forward: Sequence[float]
    """With a graph or without."""
    backward: Sequence[float]
    backward_input: Sequence[float]
    message: float = 0.0

    def of(self, virtual: int, kind: Kind) -> float:
        if kind.is_forward:
            return self.forward[virtual]
        if kind is Kind.BACKWARD:
            return self.backward[virtual]
        # in a stock plan a frozen stage 0 receives gradients, but neither a weight nor an input of it wants one
        return self.backward_input[virtual] if virtual else 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """An action and its time; a message's is the moment of its start."""

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

    plan: Plan
    spans: tuple[tuple[Span, ...], ...]
    """By stage, in the order of its actions, with gaps where it waits."""

    @property
    def iteration_time(self) -> float:
        """The latest end on any stage, run-ahead work included."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @property
    def busy_times(self) -> tuple[float, ...]:
        """By stage, the time in which it computes."""
        return tuple(sum(span.duration for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> float:
        """The part of the stages' time in which they do not compute; 0 in an iteration that takes no time."""
        total = self.iteration_time * len(self.spans)
        return 1 - sum(self.busy_times) / total if total else 0.0


def simulate(plan: Plan, costs: ActionCosts) -> Timeline:
    """When every action of a plan begins and ends."""
    return Timeline(plan=plan, spans=_Simulation(plan, costs).run())


class _Simulation:
    """All stages, each as far as it gets until something that it waits for is not known."""

    def __init__(self, plan: Plan, costs: ActionCosts) -> None:
        self._plan, self._shape, self._costs = plan, plan.shape, costs
        self._spans: list[list[Span]] = [[] for _ in plan.stages]
        self._in_flight: list[deque[Message]] = [deque(maxlen=plan.shape.max_sends) for _ in plan.stages]
        self._begun: defaultdict[Message, list[float]] = defaultdict(list)
        """When the ends of a message have begun."""
        self._arrived: dict[Message, float] = {}
        self._to_come: defaultdict[tuple[int, ...], deque[Message]] = defaultdict(deque)
        """Messages between two stages, in their order, which is the same at both ends."""
        self._free: defaultdict[tuple[int, ...], float] = defaultdict(float)
        """When the last one between two stages has arrived."""
        for stage, actions in enumerate(plan.stages):
            for action in actions:
                message = message_of(self._shape.virtual_stage(stage, action.chunk), action)
                if message is not None and stage == self._ends(message)[0]:
                    self._to_come[self._ends(message)].append(message)

    def run(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of all stages."""
        stages = range(len(self._plan.stages))
        is_moving = True
        while is_moving:
            moved = [self._advance(stage) for stage in stages]
            is_moving = any(moved)
        done = zip(self._spans, self._plan.stages, strict=True)
        assert all(len(spans) == len(actions) for spans, actions in done), "stages wait for each other for ever"
        return tuple(map(tuple, self._spans))

    def _ends(self, message: Message) -> tuple[int, ...]:
        """The two stages, the lower one first."""
        return tuple(sorted(map(self._shape.stage_of, message[:2])))

    def _advance(self, stage: int) -> bool:
        """Whether at least one action of the stage has ended."""
        actions, spans = self._plan.stages[stage], self._spans[stage]
        num_before = len(spans)
        while len(spans) < len(actions):
            action = actions[len(spans)]
            virtual = self._shape.virtual_stage(stage, action.chunk)
            start = self._start_of(stage, virtual, action, spans[-1].end if spans else 0.0)
            if start is None:
                break
            duration = self._costs.of(virtual, action.kind) if action.kind.computes else 0.0
            spans.append(Span(stage, action, start, start + duration))
        return len(spans) > num_before

    def _start_of(self, stage: int, virtual: int, action: Action, free: float) -> float | None:
        """When the stage's next action begins, None while that is not known."""
        message = message_of(virtual, action)
        if message is None:
            needed = self._shape.needed_message(virtual, action)
            arrived = free if needed is None else self._arrived.get(needed)
            return None if arrived is None else max(free, arrived)
        in_flight = self._in_flight[stage]
        if message.source == virtual:
            if len(in_flight) == in_flight.maxlen:
                oldest = self._arrived.get(in_flight[0])
                if oldest is None:
                    return None
                free = max(free, oldest)
            in_flight.append(message)
        self._begin(message, free)
        return free

    def _begin(self, message: Message, time: float) -> None:
        """One end of the message begins; what can arrive now does."""
        self._begun[message].append(time)
        ends = self._ends(message)
        to_come = self._to_come[ends]
        while to_come and len(self._begun[to_come[0]]) == 2:
            arriving = to_come.popleft()
            self._free[ends] = max(*self._begun[arriving], self._free[ends]) + self._costs.message
            self._arrived[arriving] = self._free[ends]
