"""Builds plans: the order of every stage's passes, and where its messages stand. Pure.

From the first trainable stage on the order is Megatron Core's (1F1B, or with several chunks interleaved 1F1B), as if
that stage were the first. Virtual stages before it run forward without a graph; their backward passes are left out.

With several chunks passes may come earlier than in Megatron Core's order, which the missing backward passes allow. A
stage has up to three rows of passes: backward, forward with a graph, forward only. Inside a row the order is Megatron
Core's; of the rows' next passes the stage takes the one that can begin first. A few policies for ties and short waits
are tried on a timeline of all stages, and the one that ends first is taken.

Messages stand where they could be sent on that timeline, so all stages follow one order of passes and messages: where
every message waited for its other end, nothing would hang. The executor waits less than that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from megatron.bcd.pipeline.plan import Action, Kind, Plan, PlanShape


@dataclass(frozen=True, kw_only=True)
class _Policy:
    """How a stage chooses between its rows."""

    forward_delay: float = 0.0
    """A backward pass that begins at most this much later than a forward pass comes first; in mean forward passes."""
    lead: int = 2
    """Groups of microbatches by which forward-only passes may be ahead of those with a graph."""
    keeps_least: bool = False
    """Keep activations of no more microbatches than Megatron Core's order without the passes that are left out."""


_POLICIES = (
    None,  # Megatron Core's order
    _Policy(),
    _Policy(keeps_least=True),
    _Policy(forward_delay=0.5),
    _Policy(forward_delay=0.5, lead=1),
    _Policy(forward_delay=1.0, lead=1),
)
_CHOSEN_ON = 3
"""Microbatches per stage on which policies are compared."""


class _Done(NamedTuple):
    """A pass with its times."""

    action: Action
    start: float
    end: float


_Timeline = list[list[_Done]]
"""By stage, in order."""


@lru_cache(maxsize=64)
def build_plan(shape: PlanShape) -> Plan:
    """The plan of every stage."""
    return Plan(shape=shape, stages=_with_messages(shape, _timeline(shape, _best_policy(shape))))


@lru_cache(maxsize=1024)
def max_graphs(shape: PlanShape, stage: int) -> int:
    """Bound on the microbatches whose activations the stage keeps at once, chunks counted separately: what full
    training keeps in Megatron Core's order."""
    if not shape.is_training or shape.is_one_way(stage):
        return 0
    return most_graphs(stock_order(shape.full_training, stage))


def most_graphs(actions: Iterable[Action]) -> int:
    """Most microbatches whose activations are kept at once."""
    kept = most = 0
    for action in actions:
        kept += (action.kind is Kind.FORWARD) - action.kind.is_backward
        most = max(most, kept)
    return most


def stock_order(shape: PlanShape, stage: int) -> tuple[Action, ...]:
    """The stage's passes in Megatron Core's order: warm-up, one forward and one backward in turn, cool-down."""
    if shape.is_one_way(stage):
        kind = shape.forward_kind(stage)
        return tuple(Action(kind, microbatch) for microbatch in shape.forward_microbatches(stage)) if kind else ()
    forward, backward = _passes(shape, stage, is_backward=False), _passes(shape, stage, is_backward=True)
    num_warm_up = shape.num_stages - stage - 1
    if shape.num_chunks > 1:
        num_warm_up = 2 * num_warm_up + (shape.num_chunks - 1) * shape.num_stages
    order = forward[:num_warm_up]
    for step, one in enumerate(backward):
        order += [*forward[num_warm_up + step : num_warm_up + step + 1], one]
    return tuple(action for action in order if action is not None)


def _passes(shape: PlanShape, stage: int, *, is_backward: bool) -> list[Action | None]:
    """The stage's forward or backward passes; None in place of one that is left out.

    As Megatron Core's schedule table: microbatches in groups of as many as there are stages, a group through one chunk
    after the other, backward with the chunks in reverse. The last group is as large as the others, also where that many
    microbatches do not exist: an order from which microbatches are left out on all stages is as free of deadlock as the
    whole one.
    """
    chunks, passes = range(shape.num_chunks), list[Action | None]()
    for first in range(0, shape.num_microbatches, shape.num_stages):
        for chunk in reversed(chunks) if is_backward else chunks:
            virtual = shape.virtual_stage(stage, chunk)
            kind = shape.backward_kind(virtual) if is_backward else shape.forward_kind(virtual)
            for microbatch in range(first, first + shape.num_stages):
                is_there = kind is not None and microbatch < shape.num_microbatches
                passes.append(Action(kind, microbatch, chunk) if is_there and kind else None)
    return passes


def _best_policy(shape: PlanShape) -> _Policy | None:
    # what a policy weighs are passes with and without a graph; a head alone leaves most stages without the first
    has_graphs = shape.is_training and shape.stage_of(shape.first_trainable) == 0
    if shape.num_chunks == 1 or all(shape.active) or not has_graphs:
        return None
    few = replace(shape, num_microbatches=min(shape.num_microbatches, _CHOSEN_ON * shape.num_stages))
    return min(_POLICIES, key=lambda policy: max(done[-1].end for done in _timeline(few, policy)))


def _timeline(shape: PlanShape, policy: _Policy | None) -> _Timeline:
    """All passes with their times. Messages take no time and never block here."""
    orders = [stock_order(shape, stage) for stage in range(shape.num_stages)]
    if policy is None:
        return _follow(shape, orders)
    if policy.keeps_least:
        bounds = [most_graphs(order) for order in orders]
    else:
        bounds = [max_graphs(shape, stage) for stage in range(shape.num_stages)]
    return _Arrangement(shape, policy, bounds).run()


class _Clock:
    """When passes end, and when others can begin therefore."""

    def __init__(self, shape: PlanShape) -> None:
        self.shape = shape
        self.stages: _Timeline = [[] for _ in range(shape.num_stages)]
        self._done: dict[tuple[bool, int, int], _Done] = {}
        """By whether it is backward, virtual stage and microbatch."""

    def start_of(self, stage: int, action: Action) -> float | None:
        """When the pass can begin as the stage's next one; None while that is not known."""
        shape, microbatch = self.shape, action.microbatch
        virtual = shape.virtual_stage(stage, action.chunk)
        start = self.stages[stage][-1].end if self.stages[stage] else 0.0
        needed = shape.needed_message(virtual, action)
        if needed is None and action.kind.is_backward:
            needed_pass = (False, virtual, microbatch)
        elif needed is None:
            return start
        else:
            needed_pass = (needed.is_backward, needed.source, microbatch)
        before = self._done.get(needed_pass)
        return None if before is None else max(start, before.end)

    def may_send(self, stage: int, action: Action) -> float | None:
        """When a forward-only stage may begin a pass, so that its receiver need not keep more inputs than `max_sends`
        beside the one that it works on."""
        shape = self.shape
        if not shape.is_one_way(stage) or stage == shape.last:
            return 0.0
        due = action.microbatch - shape.max_sends
        if not shape.is_forward_only(stage + 1):  # what it has run ahead with is taken in the next iteration
            due = min(due, shape.num_microbatches - 1)
        if due < shape.forward_microbatches(stage + 1).start:
            return 0.0
        taken = self._done.get((False, stage + 1, due))
        return None if taken is None else taken.start

    def do(self, stage: int, action: Action, start: float) -> None:
        virtual = self.shape.virtual_stage(stage, action.chunk)
        done = _Done(action, start, start + self.shape.duration(virtual, action.kind))
        self._done[action.kind.is_backward, virtual, action.microbatch] = done
        self.stages[stage].append(done)


def _follow(shape: PlanShape, orders: Sequence[Sequence[Action]]) -> _Timeline:
    """The passes in these orders with their times."""
    clock, left = _Clock(shape), [list(reversed(order)) for order in orders]
    is_moving = True
    while is_moving:
        is_moving = False
        for stage, actions in enumerate(left):
            while actions:
                starts = clock.start_of(stage, actions[-1]), clock.may_send(stage, actions[-1])
                if None in starts:
                    break
                clock.do(stage, actions.pop(), max(start for start in starts if start is not None))
                is_moving = True
    assert not any(left), "the stages wait for each other for ever"
    return clock.stages


class _Arrangement:
    """The passes in an order of a policy's.

    ``bounds`` limit the microbatches whose activations a stage keeps. With those of Megatron Core's order, or more,
    this can't get stuck: whatever that order does next is possible here too.
    """

    def __init__(self, shape: PlanShape, policy: _Policy, bounds: Sequence[int]) -> None:
        self._shape, self._bounds = shape, bounds
        self._clock = _Clock(shape)
        self._rows = [list(_rows(shape, stage)) for stage in range(shape.num_stages)]
        forward = [shape.duration(virtual, Kind.FORWARD) for virtual in range(shape.num_virtual)]
        self._forward_delay = sum(forward) / len(forward) * policy.forward_delay
        self._lead = policy.lead * shape.num_stages
        self._num_graphs = [0] * shape.num_stages
        self._num_begun = [0] * shape.num_stages
        """Microbatches that have come through the stage's first chunk with a graph."""

    def run(self) -> _Timeline:
        stages = range(self._shape.num_stages)
        options = [self._option(stage) for stage in stages]
        while any(any(rows) for rows in self._rows):
            start, stage = min((option[1], stage) for stage, option in enumerate(options) if option is not None)
            option = options[stage]
            assert option is not None
            self._take(stage, row=option[0][1], start=start)
            for changed in {stage, (stage + 1) % len(stages), (stage - 1) % len(stages)}:
                options[changed] = self._option(changed)
        return self._clock.stages

    def _option(self, stage: int) -> tuple[tuple[float, int], float] | None:
        """The stage's next pass: what it is chosen by (beginning with the row's delay, and the row), its beginning."""
        best: tuple[tuple[float, int], float] | None = None
        for row, left in enumerate(self._rows[stage]):
            if not left or self._must_wait(stage, left[-1]):
                continue
            start = self._clock.start_of(stage, left[-1])
            if start is None:
                continue
            rank = (start + self._forward_delay * (left[-1].kind is Kind.FORWARD), row)
            if best is None or rank < best[0]:
                best = rank, start
        return best

    def _must_wait(self, stage: int, action: Action) -> bool:
        if action.kind is Kind.FORWARD:
            return self._num_graphs[stage] >= self._bounds[stage]
        return action.kind is Kind.FORWARD_ONLY and action.microbatch >= self._num_begun[stage] + self._lead

    def _take(self, stage: int, *, row: int, start: float) -> None:
        action = self._rows[stage][row].pop()
        self._num_graphs[stage] += (action.kind is Kind.FORWARD) - action.kind.is_backward
        first = self._shape.chunk_of(self._shape.first_trainable)
        self._num_begun[stage] += action.kind is Kind.FORWARD and action.chunk == first
        self._clock.do(stage, action, start)


def _rows(shape: PlanShape, stage: int) -> Iterator[list[Action]]:
    """Backward, forward with a graph, forward only; the next pass last."""
    passes = [*_passes(shape, stage, is_backward=True), *_passes(shape, stage, is_backward=False)][::-1]
    for kinds in ((Kind.BACKWARD, Kind.BACKWARD_INPUT), (Kind.FORWARD,), (Kind.FORWARD_ONLY,)):
        yield [action for action in passes if action is not None and action.kind in kinds]


def _with_messages(shape: PlanShape, timeline: _Timeline) -> tuple[tuple[Action, ...], ...]:
    """Every stage's passes, and between them its messages: each after the passes that began before it could be sent, at
    both ends."""
    events: defaultdict[int, list[tuple[float, int, int, Action]]] = defaultdict(list)
    for stage, passes in enumerate(timeline):
        for action, start, end in passes:
            virtual, microbatch = shape.virtual_stage(stage, action.chunk), action.microbatch
            events[stage].append((start, shape.num_virtual, microbatch, action))
            is_backward = action.kind.is_backward
            if virtual == shape.last if not is_backward else not shape.needs_input_gradient(virtual):
                continue
            target = virtual - 1 if is_backward else virtual + 1
            for at, kinds in (
                (virtual, (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)),
                (target, (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)),
            ):
                message = Action(kinds[is_backward], microbatch, shape.chunk_of(at))
                # of messages of one moment, that of the lowest sender comes first; all before passes that begin then
                events[shape.stage_of(at)].append((end, virtual, microbatch, message))
    return tuple(
        tuple(event[-1] for event in sorted(events[stage], key=lambda event: event[:3]))
        for stage in range(shape.num_stages)
    )
