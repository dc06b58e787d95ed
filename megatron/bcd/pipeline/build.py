"""Build pipeline plans: the order of each stage's passes, with its messages between them. Pure.

From the first trainable stage on, the order is Megatron Core's (1F1B, or interleaved 1F1B with several chunks), as if
that stage were the first one. Virtual stages before it run forward without a graph and have no backward passes. With
several chunks, a pass may start earlier than in Megatron Core's order, because backward passes are missing.

Each stage has three queues: backward, forward with a graph, and forward only. Within a queue the order is Megatron
Core's. The stage always runs the queue whose next pass can start first, except that it waits a little for a backward
pass. This order is used if its simulated iteration is shorter than that of Megatron Core's.

A message is placed where it can first be sent in that simulation. All stages therefore agree on one order of passes and
messages. Such a plan cannot deadlock, even if every message blocked until its other end is ready; the executor blocks
less than that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache

from megatron.bcd.pipeline.plan import Action, Kind, Plan, PlanShape
from megatron.bcd.pipeline.simulate import Span

_FORWARD_DELAY = 0.5
"""A stage prefers a backward pass to a forward pass if it starts at most this much later, in mean forward passes."""
_LEAD = 2
"""Maximum lead of forward-only passes over those with a graph, in groups of `num_stages` microbatches."""


_Timeline = list[list[Span]]
"""The passes of each stage, in order."""


@lru_cache(maxsize=64)
def build_plan(shape: PlanShape) -> Plan:
    """Return the plan of all stages."""
    order = breadth_first_order if shape.is_breadth_first else stock_order
    orders = tuple(order(shape, stage) for stage in range(shape.num_stages))
    if shape.is_breadth_first and len(orders) == 1:
        return Plan(shape=shape, stages=orders)
    timeline = _follow(shape, orders)
    # queues trade passes with a graph against passes without; if only the head is active, most stages lack the former
    has_graphs = shape.is_training and shape.stage_of(shape.first_trainable) == 0
    if has_graphs and shape.num_chunks > 1 and not shape.is_breadth_first and not all(shape.active):
        timeline = min(timeline, _Queues(shape).run(), key=lambda passes: max(done[-1].end for done in passes))
    return Plan(shape=shape, stages=_insert_messages(shape, timeline))


def breadth_first_order(shape: PlanShape, stage: int) -> tuple[Action, ...]:
    """Return the passes of a stage if all microbatches pass through a chunk before the next one (arXiv 2211.05953).

    The last chunk of the model, which has the head, runs forward and backward in turn, so that the logits of one
    microbatch exist at a time. Others repeat their forward pass before the backward pass, unless its activations are
    kept. Updates that clip are a separate pass.
    """
    order: list[Action] = []
    microbatches, last = range(shape.num_microbatches), shape.last if shape.is_training else shape.num_virtual
    by_chunk = [(chunk, shape.virtual_stage(stage, chunk)) for chunk in range(shape.num_chunks)]
    kept = set(kept_passes(shape)[: shape.num_kept])
    for chunk, virtual in by_chunk:
        for microbatch in microbatches if virtual != last else ():
            is_kept = (chunk, microbatch) in kept
            order.append(Action(Kind.FORWARD_AHEAD if is_kept else Kind.FORWARD_ONLY, microbatch, chunk))
    for chunk, virtual in reversed(by_chunk):
        if (backward := shape.backward_kind(virtual)) is None:
            continue
        for microbatch in microbatches:
            forward = Kind.FORWARD if virtual == last else Kind.RECOMPUTE
            order += [Action(forward, microbatch, chunk)] if (chunk, microbatch) not in kept else []
            order.append(Action(backward, microbatch, chunk))
        order += [Action(Kind.LOSS, 0, chunk)] if virtual == last else []
        if shape.updated[virtual]:
            order.append(Action(Kind.KEEP if shape.clips_by_chunk else Kind.UPDATE, 0, chunk))
    if shape.clips_by_chunk:
        order.append(Action(Kind.NORM, 0))
        order += [Action(Kind.UPDATE, 0, chunk) for chunk, virtual in by_chunk if shape.updated[virtual]]
    return tuple(order)


def kept_passes(shape: PlanShape) -> list[tuple[int, int]]:
    """Return the chunks and microbatches of breadth-first order on one stage that can be kept, the first to keep first.

    These are the passes that would be repeated. Backward passes free the last chunk's first.
    """
    if shape.num_stages > 1:
        return []
    chunks = range(shape.last - 1, shape.first_trainable - 1, -1)
    return [(chunk, microbatch) for chunk in chunks for microbatch in range(shape.num_microbatches)]


@lru_cache(maxsize=1024)
def max_graphs(shape: PlanShape, stage: int) -> int:
    """Return the maximum number of microbatches whose activations a stage keeps at once. Chunks count separately.

    The bound is what full training keeps in Megatron Core's order.
    """
    if not shape.is_training or shape.is_one_way(stage):
        return 0
    return peak_graphs(stock_order(shape.full_training, stage))


def peak_graphs(actions: Iterable[Action]) -> int:
    """Return the peak number of microbatches whose activations are kept."""
    live = peak = 0
    for action in actions:
        live += action.kind.keeps_graph - action.kind.is_backward
        peak = max(peak, live)
    return peak


def stock_order(shape: PlanShape, stage: int) -> tuple[Action, ...]:
    """Return the stage's passes in Megatron Core's order: warm-up, alternating forward and backward, cool-down."""
    if shape.is_one_way(stage):
        kind = shape.forward_kind(stage)
        return tuple(Action(kind, microbatch) for microbatch in shape.forward_microbatches(stage)) if kind else ()
    forward, backward = _passes(shape, stage, is_backward=False), _passes(shape, stage, is_backward=True)
    num_warm_up = shape.num_stages - stage - 1
    if shape.num_chunks > 1:
        num_warm_up = 2 * num_warm_up + (shape.num_chunks - 1) * shape.num_stages
    order = forward[:num_warm_up]
    for step, backward_pass in enumerate(backward):
        order += [*forward[num_warm_up + step : num_warm_up + step + 1], backward_pass]
    return tuple(action for action in order if action is not None)


def _passes(shape: PlanShape, stage: int, *, is_backward: bool) -> list[Action | None]:
    """Return the stage's forward or backward passes, with None for each pass that this phase omits.

    The order is that of Megatron Core's schedule table. Microbatches form groups of `num_stages`. Each group runs
    through all chunks in turn; backward passes take the chunks in reverse. The last group is padded to full size with
    None: removing the same microbatches on all stages cannot introduce a deadlock.
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


class _Clock:
    """Simulated time: when each pass ends, and when the next ones can therefore start."""

    def __init__(self, shape: PlanShape) -> None:
        self.shape = shape
        self.stages: _Timeline = [[] for _ in range(shape.num_stages)]
        self._passes_run: dict[tuple[bool, int, int], Span] = {}
        """By direction (True is backward), virtual stage and microbatch."""

    def earliest_start(self, stage: int, action: Action) -> float | None:
        """Return when the stage can start this action next, or None if that depends on passes without a time yet."""
        shape, microbatch = self.shape, action.microbatch
        virtual = shape.virtual_stage(stage, action.chunk)
        start = self.stages[stage][-1].end if self.stages[stage] else 0.0
        if not action.kind.computes:  # the loss arrives before the gradients of lower chunks
            return start
        needed = shape.needed_message(virtual, action)
        if needed is None and action.kind.is_backward:
            needed_pass = (False, virtual, microbatch)
        elif needed is None:
            return start
        else:
            needed_pass = (needed.is_backward, needed.source, microbatch)
        needed_run = self._passes_run.get(needed_pass)
        return None if needed_run is None else max(start, needed_run.end)

    def earliest_send(self, stage: int, action: Action) -> float | None:
        """Return when a forward-only stage may start a pass without flooding its receiver.

        The receiver must not store more than `max_sends` inputs besides the one it works on.
        """
        shape = self.shape
        if not shape.is_one_way(stage) or stage == shape.last:
            return 0.0
        due = action.microbatch - shape.max_sends
        if not shape.is_forward_only(stage + 1):  # the next iteration consumes the microbatches that ran ahead
            due = min(due, shape.num_microbatches - 1)
        if due < shape.forward_microbatches(stage + 1).start:
            return 0.0
        taken = self._passes_run.get((False, stage + 1, due))
        return None if taken is None else taken.start

    def run(self, stage: int, action: Action, start: float) -> None:
        virtual = self.shape.virtual_stage(stage, action.chunk)
        done = Span(stage, action, start, start + self.shape.duration(virtual, action.kind))
        if action.kind.is_passed_on:
            self._passes_run[action.kind.is_backward, virtual, action.microbatch] = done
        self.stages[stage].append(done)


def _follow(shape: PlanShape, orders: Sequence[Sequence[Action]]) -> _Timeline:
    """Return the passes in the given orders, with their times."""
    clock, left = _Clock(shape), [list(reversed(order)) for order in orders]
    is_moving = True
    while is_moving:
        is_moving = False
        for stage, actions in enumerate(left):
            while actions:
                starts = clock.earliest_start(stage, actions[-1]), clock.earliest_send(stage, actions[-1])
                if None in starts:
                    break
                clock.run(stage, actions.pop(), max(start for start in starts if start is not None))
                is_moving = True
    assert not any(left), "deadlock between stages"
    return clock.stages


class _Queues:
    """The queues of all stages, which run the stage whose next pass can start first.

    A stage keeps activations of at most as many microbatches as in full training. This cannot deadlock: the next pass
    of Megatron Core's order is always allowed here too.
    """

    def __init__(self, shape: PlanShape) -> None:
        self._shape, self._clock = shape, _Clock(shape)
        self._bounds = [max_graphs(shape, stage) for stage in range(shape.num_stages)]
        self._queues = [self._passes_by_queue(stage) for stage in range(shape.num_stages)]
        forward = [shape.duration(virtual, Kind.FORWARD) for virtual in range(shape.num_virtual)]
        self._forward_delay = sum(forward) / len(forward) * _FORWARD_DELAY
        self._num_graphs = [0] * shape.num_stages
        self._num_started = [0] * shape.num_stages
        """Number of microbatches that have passed the stage's first chunk with a graph."""

    def run(self) -> _Timeline:
        stages = range(self._shape.num_stages)
        options = [self._option(stage) for stage in stages]
        while any(any(queues) for queues in self._queues):
            start, stage = min((option[1], stage) for stage, option in enumerate(options) if option is not None)
            option = options[stage]
            assert option is not None
            action = self._queues[stage][option[0][1]].pop()
            self._num_graphs[stage] += (action.kind is Kind.FORWARD) - action.kind.is_backward
            first = self._shape.chunk_of(self._shape.first_trainable)
            self._num_started[stage] += action.kind is Kind.FORWARD and action.chunk == first
            self._clock.run(stage, action, start)
            # a pass can only enable passes of the same stage and of the two neighbours
            for changed in {stage, (stage + 1) % len(stages), (stage - 1) % len(stages)}:
                options[changed] = self._option(changed)
        return self._clock.stages

    def _option(self, stage: int) -> tuple[tuple[float, int], float] | None:
        """Return the stage's next pass as ((start plus the queue's delay, queue), start), or None if none can start."""
        best: tuple[tuple[float, int], float] | None = None
        for queue, left in enumerate(self._queues[stage]):
            if not left or self._must_wait(stage, left[-1]):
                continue
            start = self._clock.earliest_start(stage, left[-1])
            if start is None:
                continue
            rank = (start + self._forward_delay * (left[-1].kind is Kind.FORWARD), queue)
            if best is None or rank < best[0]:
                best = rank, start
        return best

    def _must_wait(self, stage: int, action: Action) -> bool:
        if action.kind is Kind.FORWARD:
            return self._num_graphs[stage] >= self._bounds[stage]
        most = self._num_started[stage] + _LEAD * self._shape.num_stages
        return action.kind is Kind.FORWARD_ONLY and action.microbatch >= most

    def _passes_by_queue(self, stage: int) -> list[list[Action]]:
        """Return the three queues: backward, forward with a graph, forward only. The next pass is the last one."""
        shape, queues = self._shape, ((Kind.BACKWARD, Kind.BACKWARD_INPUT), (Kind.FORWARD,), (Kind.FORWARD_ONLY,))
        passes = [*_passes(shape, stage, is_backward=True), *_passes(shape, stage, is_backward=False)][::-1]
        return [[action for action in passes if action is not None and action.kind in kinds] for kinds in queues]


def _insert_messages(shape: PlanShape, timeline: _Timeline) -> tuple[tuple[Action, ...], ...]:
    """Insert the messages between every stage's passes.

    At both ends, a message follows the passes that start before it can be sent. The loss is known behind the last
    gradient of the last virtual stage, and sent behind it.
    """
    events: defaultdict[int, list[tuple[float, int, int, Action]]] = defaultdict(list)
    for stage, passes in enumerate(timeline):
        for span in passes:
            action = span.action
            virtual, microbatch = shape.virtual_stage(stage, action.chunk), action.microbatch
            is_backward, is_loss = action.kind.is_backward, action.kind is Kind.LOSS
            place = (virtual, shape.num_microbatches - 1) if is_loss else (shape.num_virtual, microbatch)
            events[stage].append((span.start, *place, action))
            is_needed = shape.needs_input_gradient(virtual) if is_backward else virtual < shape.last
            if not (action.kind.is_passed_on and is_needed):
                continue
            target, messages = virtual + 1, [(microbatch, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)]
            if is_backward:
                target, messages = virtual - 1, [(microbatch, Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD)]
                if shape.sends_loss(virtual, microbatch):
                    messages.append((shape.num_microbatches, Kind.SEND_LOSS, Kind.RECEIVE_LOSS))
            for number, *kinds in messages:
                for at, kind in zip((virtual, target), kinds, strict=True):
                    message = Action(kind, number, shape.chunk_of(at))
                    # at equal times the message of the lowest sender comes first, and all messages precede passes
                    events[shape.stage_of(at)].append((span.end, virtual, number, message))
    return tuple(
        tuple(event[-1] for event in sorted(events[stage], key=lambda event: event[:3]))
        for stage in range(shape.num_stages)
    )
