"""Simulate how long an iteration takes, given the time of every pass and of a message. Pure.

Times are in seconds, or in any other unit. A stage runs its passes in order. A pass waits for its input or gradient;
messages from one stage in one direction follow one another. A stage that only runs forward waits before it floods its
receiver (`PlanShape.max_sends`). Microbatches that ran ahead in the previous iteration are available at time 0.

The optimizer step, the reductions of gradients and loss, and all other work done once per iteration are not included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.bcd.pipeline.plan import Action, Kind, Plan, PlanShape

Work = Sequence[tuple[float, float]]
"""The time of a forward and a backward pass of each virtual stage, in any unit."""


@dataclass(frozen=True, slots=True)
class Span:
    """A pass, or what follows passes in breadth-first order and takes no time, with its start and end."""

    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The times of a plan's passes, and statistics of them."""

    plan: Plan
    spans: list[list[Span]]
    """The spans of each stage, in order. Gaps are waiting times."""

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


def simulate(plan: Plan, work: Work = (), *, message: float = 0.0) -> Timeline:
    """Return the start and end of every pass of a plan.

    `work` has the times of a forward and a backward pass of each virtual stage, and `message` is that of a message.
    Without `work` forward, input gradients and weight gradients take 1 each.
    """
    orders = [[action for action in actions if not action.kind.is_message] for actions in plan.stages]
    return Timeline(plan=plan, spans=run_orders(plan.shape, orders, work, message=message))


def run_orders(
    shape: PlanShape, orders: Sequence[Sequence[Action]], work: Work = (), *, message: float = 0.0
) -> list[list[Span]]:
    """Return the passes of each stage in the given orders, with their times; see `simulate`."""
    clock, left = _Clock(shape, work, message), [list(reversed(order)) for order in orders]
    is_moving = True
    while is_moving:
        is_moving = False
        for stage, actions in enumerate(left):
            while actions and clock.try_run(stage, actions[-1]):
                actions.pop()
                is_moving = True
    assert not any(left), "deadlock between stages"
    return clock.stages


class _Clock:
    """Simulated time: when each pass starts and its result arrives, and when the next ones can therefore start."""

    def __init__(self, shape: PlanShape, work: Work, message: float) -> None:
        self._shape, self._work, self._message = shape, work, message
        self.stages: list[list[Span]] = [[] for _ in range(shape.num_stages)]
        self._starts: dict[tuple[bool, int, int], float] = {}
        """By direction (True is backward), virtual stage and microbatch."""
        self._arrivals: dict[tuple[bool, int, int], float] = {}
        """When the results arrive at the next virtual stage."""
        self._last_arrivals: defaultdict[tuple[bool, int], float] = defaultdict(float)
        """The last arrival of a message, by direction and the stage that sends it."""

    def try_run(self, stage: int, action: Action) -> bool:
        """Run the stage's next action, unless its start depends on passes without a time yet."""
        shape, kind, spans = self._shape, action.kind, self.stages[stage]
        virtual = shape.virtual_stage(stage, action.chunk)
        needed = shape.needed_pass(virtual, action)
        arrival = 0.0 if needed is None else self._arrivals.get(needed)
        earliest_send = self._earliest_send(stage, action)
        if arrival is None or earliest_send is None:
            return False
        start = max(spans[-1].end if spans else 0.0, arrival, earliest_send)
        times = self._work[virtual] if self._work else (1.0, 1.0 + (kind is Kind.BACKWARD))
        spans.append(Span(action, start, start + times[kind.is_backward] * kind.computes))
        if kind.is_passed_on:
            key, link = (kind.is_backward, virtual, action.microbatch), (kind.is_backward, stage)
            self._last_arrivals[link] = max(self._last_arrivals[link], spans[-1].end) + self._message
            self._starts[key], self._arrivals[key] = start, self._last_arrivals[link]
        return True

    def _earliest_send(self, stage: int, action: Action) -> float | None:
        """Return when a forward-only stage may start a pass without flooding its receiver.

        The receiver must not store more than `max_sends` inputs besides the one it works on.
        """
        shape = self._shape
        if not shape.is_one_way(stage) or stage == shape.last:
            return 0.0
        due = action.microbatch - shape.max_sends
        if not shape.is_forward_only(stage + 1):  # the next iteration consumes the microbatches that ran ahead
            due = min(due, shape.num_microbatches - 1)
        if due < shape.forward_microbatches(stage + 1).start:
            return 0.0
        return self._starts.get((False, stage + 1, due))
