"""Simulate how long an iteration takes, given the time of every pass and of a message. Pure.

Times are in seconds, or in any other unit. A stage runs its actions in order. A send does not block, unless
`PlanShape.max_sends` messages of the stage are in flight. The pass that needs a received message waits for it. Two
stages exchange messages one after the other, in both directions together. Microbatches that ran ahead in the previous
iteration are available at time 0.

The optimizer step, the reductions of gradients and loss, and all other work done once per iteration are not included.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.bcd.pipeline.plan import Action, Kind, Message, Plan, action_message


@dataclass(frozen=True, kw_only=True)
class ActionCosts:
    """The time of every kind of pass, by virtual stage, and of a message."""

    forward: Sequence[float]
    """Passes with and without a graph."""
    backward: Sequence[float]
    backward_input: Sequence[float]
    message: float = 0.0

    def duration(self, virtual: int, kind: Kind) -> float:
        """Return the time of a pass of this kind."""
        if kind.is_forward:
            return self.forward[virtual]
        if kind is Kind.BACKWARD:
            return self.backward[virtual]
        # in a stock plan a frozen stage 0 receives gradients, but it has no weight and no input that requires one
        return self.backward_input[virtual] if virtual else 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """An action with its start and end. A message starts and ends at the same time."""

    stage: int
    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The times of a plan's actions, and statistics of them."""

    plan: Plan
    spans: tuple[tuple[Span, ...], ...]
    """The spans of each stage, in the order of its actions. Gaps are waiting times."""

    @property
    def iteration_time(self) -> float:
        """The latest end on any stage, including run-ahead work."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @property
    def busy_times(self) -> tuple[float, ...]:
        """The time that each stage spends computing."""
        return tuple(sum(span.duration for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> float:
        """The idle fraction of all stages' time; 0 if the iteration takes no time."""
        total = self.iteration_time * len(self.spans)
        return 1 - sum(self.busy_times) / total if total else 0.0


def simulate(plan: Plan, costs: ActionCosts) -> Timeline:
    """Return the start and end of every action of a plan."""
    return Timeline(plan=plan, spans=_Simulation(plan, costs).run())


class _Simulation:
    """Advances every stage until it waits for a message whose arrival is not known yet."""

    def __init__(self, plan: Plan, costs: ActionCosts) -> None:
        self._plan, self._shape, self._costs = plan, plan.shape, costs
        self._spans: list[list[Span]] = [[] for _ in plan.stages]
        self._in_flight: list[deque[Message]] = [deque(maxlen=plan.shape.max_sends) for _ in plan.stages]
        self._end_times: defaultdict[Message, list[float]] = defaultdict(list)
        """The start times of a message's two ends."""
        self._arrived: dict[Message, float] = {}
        self._pending: defaultdict[tuple[int, ...], deque[Message]] = defaultdict(deque)
        """Messages between two stages, in order. The order is the same at both ends."""
        self._free: defaultdict[tuple[int, ...], float] = defaultdict(float)
        """The arrival time of the last message between two stages."""
        for stage, actions in enumerate(plan.stages):
            for action in actions:
                message = action_message(self._shape.virtual_stage(stage, action.chunk), action)
                if message is not None and stage == self._ends(message)[0]:
                    self._pending[self._ends(message)].append(message)

    def run(self) -> tuple[tuple[Span, ...], ...]:
        """Return the spans of all stages."""
        stages = range(len(self._plan.stages))
        is_moving = True
        while is_moving:
            moved = [self._advance(stage) for stage in stages]
            is_moving = any(moved)
        done = zip(self._spans, self._plan.stages, strict=True)
        assert all(len(spans) == len(actions) for spans, actions in done), "deadlock between stages"
        return tuple(map(tuple, self._spans))

    def _ends(self, message: Message) -> tuple[int, ...]:
        """Return the two stages of a message, the lower one first."""
        return tuple(sorted(map(self._shape.stage_of, message[:2])))

    def _advance(self, stage: int) -> bool:
        """Run the stage's next actions. Return whether at least one was completed."""
        actions, spans = self._plan.stages[stage], self._spans[stage]
        num_before = len(spans)
        while len(spans) < len(actions):
            action = actions[len(spans)]
            virtual = self._shape.virtual_stage(stage, action.chunk)
            start = self._start_time(stage, virtual, action, spans[-1].end if spans else 0.0)
            if start is None:
                break
            duration = self._costs.duration(virtual, action.kind) if action.kind.computes else 0.0
            spans.append(Span(stage, action, start, start + duration))
        return len(spans) > num_before

    def _start_time(self, stage: int, virtual: int, action: Action, free: float) -> float | None:
        """Return when the stage's next action starts, or None if that is not known yet."""
        message = action_message(virtual, action)
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
        """Record the start of one end of a message, and deliver all messages that can now arrive."""
        self._end_times[message].append(time)
        ends = self._ends(message)
        pending = self._pending[ends]
        while pending and len(self._end_times[pending[0]]) == 2:
            arriving = pending.popleft()
            self._free[ends] = max(*self._end_times[arriving], self._free[ends]) + self._costs.message
            self._arrived[arriving] = self._free[ends]
