"""Interleaved plans: every stage holds several chunks of the model (docs/pipeline.md).

Chunk c of stage s is virtual stage c x stages + s; virtual stages are numbered in depth order. Forward and backward
passes come in Megatron Core's interleaved order: microbatches in groups of as many as there are stages, a group through
one chunk after the other; backward with the chunks in reverse. What virtual stages before the first trainable one do is
forward only, so their backward passes are left out.

Messages are sent without waiting and received before they are needed. Their order is the same at both ends, and is that
of one timeline of all stages: where every message waited for its other end, nothing would hang.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from megatron.bcd.pipeline.actions import Action, Kind

MAX_MESSAGES_IN_FLIGHT = 4
"""Messages of a stage whose receivers may not have them yet; one more waits for the oldest."""

_DURATIONS = {Kind.FORWARD: 1.0, Kind.FORWARD_ONLY: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0}
"""Time of an action for the order of messages: forward = input gradients = weight gradients."""


@dataclass(frozen=True, kw_only=True)
class ChunkShape:
    """The input of `build_chunk_plan`."""

    num_stages: int
    num_chunks: int
    """Of every stage."""
    num_microbatches: int
    first_trainable: int
    """The first virtual stage with a graph; the number of virtual stages in an evaluation."""
    active: tuple[bool, ...]
    """By virtual stage: whether it builds weight gradients."""

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that contradict each other."""
        if self.num_stages < 2 or self.num_chunks < 1 or self.num_microbatches < 1:
            raise ValueError(
                f"{self.num_stages} stages, {self.num_chunks} chunks, {self.num_microbatches} microbatches: at least "
                "2 stages and 1 of the others"
            )
        if not 0 <= self.first_trainable <= self.num_virtual:
            raise ValueError(f"first trainable virtual stage {self.first_trainable}: must be 0 to {self.num_virtual}")
        if len(self.active) != self.num_virtual or any(self.active[: self.first_trainable]):
            raise ValueError(
                f"active virtual stages {self.active}: one value for each of {self.num_virtual}, and none before the "
                f"first trainable one {self.first_trainable}"
            )

    @property
    def num_virtual(self) -> int:
        """Virtual stages."""
        return self.num_stages * self.num_chunks

    @property
    def last(self) -> int:
        """The last virtual stage."""
        return self.num_virtual - 1

    @property
    def run_ahead(self) -> int:
        """Nothing runs ahead: every stage works until the end of the iteration."""
        return 0

    @property
    def is_stock(self) -> bool:
        """Whether it is full training, whose order is Megatron Core's."""
        return all(self.active)

    def virtual_stage(self, stage: int, chunk: int) -> int:
        return chunk * self.num_stages + stage

    def stage_of(self, virtual: int) -> int:
        return virtual % self.num_stages

    def chunk_of(self, virtual: int) -> int:
        return virtual // self.num_stages

    def is_forward_only(self, virtual: int) -> bool:
        return virtual < self.first_trainable

    def needs_input_gradient(self, virtual: int) -> bool:
        """Whether the virtual stage before this one runs backward."""
        return virtual > self.first_trainable

    def forward_kind(self, virtual: int) -> Kind:
        return Kind.FORWARD_ONLY if self.is_forward_only(virtual) else Kind.FORWARD

    def backward_kind(self, virtual: int) -> Kind | None:
        """None where there is no backward pass."""
        if self.is_forward_only(virtual):
            return None
        return Kind.BACKWARD if self.active[virtual] else Kind.BACKWARD_INPUT

    def role(self, stage: int) -> str:
        """The stage's chunks by what they are in this phase: p prefix, A active, s suffix."""
        letters = []
        for chunk in range(self.num_chunks):
            virtual = self.virtual_stage(stage, chunk)
            letters.append("p" if self.is_forward_only(virtual) else "A" if self.active[virtual] else "s")
        return "".join(letters)

    def max_graphs(self, stage: int) -> int:
        """Bound on the microbatches whose activations the stage keeps at once, chunks counted separately."""
        return max_graphs(stock_order(self, stage))


@dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """One iteration of the whole interleaved pipeline."""

    shape: ChunkShape
    stages: tuple[tuple[Action, ...], ...]
    """By stage, in order."""


def chunk_shape(*, num_stages: int, num_chunks: int, num_microbatches: int, num_blocks: int, block: int) -> ChunkShape:
    """Of a training iteration in the phase of `block`, whose chunks are `block`, `block` + `num_blocks`, ... Raises
    ValueError as ChunkShape, and where chunks are no multiple of the blocks."""
    if num_blocks < 1 or num_chunks % num_blocks:
        raise ValueError(f"{num_chunks} chunks of a stage for {num_blocks} blocks: must be a multiple")
    if not 0 <= block < num_blocks:
        raise ValueError(f"block {block}: must be 0 to {num_blocks - 1}")
    return ChunkShape(
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        first_trainable=block * num_stages,
        active=tuple(virtual // num_stages % num_blocks == block for virtual in range(num_stages * num_chunks)),
    )


def evaluation_chunk_shape(*, num_stages: int, num_chunks: int, num_microbatches: int) -> ChunkShape:
    """Forward passes only."""
    num_virtual = num_stages * num_chunks
    return ChunkShape(
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        first_trainable=num_virtual,
        active=(False,) * num_virtual,
    )


def _rounds(shape: ChunkShape, *, is_backward: bool) -> Iterator[tuple[int, int]]:
    """Chunk and microbatch, one after the other, as Megatron Core's schedule table.

    The last group is as large as the others, also where that many microbatches do not exist: an order from which
    microbatches are left out on all stages is as free of deadlock as the whole one.
    """
    chunks = range(shape.num_chunks)
    for first in range(0, shape.num_microbatches, shape.num_stages):
        for chunk in reversed(chunks) if is_backward else chunks:
            for microbatch in range(first, first + shape.num_stages):
                yield chunk, microbatch


def _passes(shape: ChunkShape, stage: int) -> tuple[list[Action | None], list[Action | None]]:
    """The forward passes of a stage, and beside them the backward passes; None in place of one that is left out."""
    forward: list[Action | None] = []
    backward: list[Action | None] = []
    for is_backward, passes in ((False, forward), (True, backward)):
        for chunk, microbatch in _rounds(shape, is_backward=is_backward):
            virtual = shape.virtual_stage(stage, chunk)
            kind = shape.backward_kind(virtual) if is_backward else shape.forward_kind(virtual)
            is_left_out = kind is None or microbatch >= shape.num_microbatches
            passes.append(None if is_left_out or kind is None else Action(kind, microbatch, chunk=chunk))
    return forward, backward


@cache
def stock_order(shape: ChunkShape, stage: int) -> tuple[Action, ...]:
    """The stage's passes in Megatron Core's order: warm-up, one forward and one backward in turn, cool-down."""
    forward, backward = _passes(shape, stage)
    num_warm_up = min(len(forward), 2 * (shape.num_stages - stage - 1) + (shape.num_chunks - 1) * shape.num_stages)
    order: list[Action | None] = list(forward[:num_warm_up])
    for step in range(len(backward)):
        order += [*forward[num_warm_up + step : num_warm_up + step + 1], backward[step]]
    return tuple(action for action in order if action is not None)


def max_graphs(order: Sequence[Action]) -> int:
    """Most microbatches whose activations are kept at once."""
    kept = most = 0
    for action in order:
        if action.kind is Kind.FORWARD:
            kept += 1
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            kept -= 1
        most = max(most, kept)
    return most


@dataclass(frozen=True, slots=True)
class _Done:
    """A pass with its times."""

    action: Action
    start: float
    end: float


class _Timeline:
    """Runs the passes of all stages with messages that take no time and never block.

    `orders` fixes each stage's order. Without it, a stage that is free takes its next backward pass if that is
    possible, else its next forward pass, unless it keeps `ChunkShape.max_graphs` microbatches; the orders among forward
    and among backward passes are Megatron Core's. That can't get stuck: whatever Megatron Core's order does next is
    possible here too.
    """

    def __init__(self, shape: ChunkShape, orders: Sequence[Sequence[Action]] | None) -> None:
        self._shape = shape
        self._orders = orders
        self._ends: dict[tuple[bool, int, int], float] = {}
        """By whether it is backward, virtual stage and microbatch."""
        self.stages: list[list[_Done]] = [[] for _ in range(shape.num_stages)]
        self._forward: list[list[Action]] = []
        self._backward: list[list[Action]] = []
        for stage in range(shape.num_stages):
            forward, backward = _passes(shape, stage)
            self._forward.append([action for action in forward if action is not None][::-1])
            self._backward.append([action for action in backward if action is not None][::-1])
        self._num_graphs = [0] * shape.num_stages
        self._bounds = [shape.max_graphs(stage) for stage in range(shape.num_stages)]

    def run(self) -> list[list[_Done]]:
        """The passes of every stage with their times. Raises ValueError if a stage waits for ever."""
        free = [0.0] * self._shape.num_stages
        while any(self._forward) or any(self._backward):
            options = [
                (start, stage, action)
                for stage in range(self._shape.num_stages)
                if (option := self._next(stage, free[stage])) is not None
                for start, action in [option]
            ]
            if not options:
                raise ValueError("the stages wait for each other for ever")
            start, stage, action = min(options, key=lambda option: option[:2])
            free[stage] = self._do(stage, action, start)
        return self.stages

    def _next(self, stage: int, free: float) -> tuple[float, Action] | None:
        """The stage's next pass and when it can begin; None while that is not known."""
        if self._orders is not None:
            position = len(self.stages[stage])
            if position == len(self._orders[stage]):
                return None
            action = self._orders[stage][position]
            ready = self._ready(stage, action)
            return None if ready is None else (max(free, ready), action)
        options: list[tuple[float, bool, Action]] = []
        for is_forward, left in ((False, self._backward[stage]), (True, self._forward[stage])):
            if not left:
                continue
            keeps = left[-1].kind is Kind.FORWARD
            if keeps and self._num_graphs[stage] == self._bounds[stage]:
                continue
            ready = self._ready(stage, left[-1])
            if ready is not None:
                options.append((max(free, ready), is_forward, left[-1]))
        if not options:
            return None
        start, _, action = min(options, key=lambda option: option[:2])
        return start, action

    def _ready(self, stage: int, action: Action) -> float | None:
        """When what the pass needs is there; None while that is not known."""
        shape, microbatch = self._shape, action.microbatch
        virtual = shape.virtual_stage(stage, action.chunk)
        if action.kind in (Kind.FORWARD, Kind.FORWARD_ONLY):
            return 0.0 if virtual == 0 else self._ends.get((False, virtual - 1, microbatch))
        if virtual == shape.last:
            return self._ends.get((False, virtual, microbatch))
        return self._ends.get((True, virtual + 1, microbatch))

    def _do(self, stage: int, action: Action, start: float) -> float:
        is_backward = action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        left = (self._backward if is_backward else self._forward)[stage]
        left.pop()
        self._num_graphs[stage] += {True: -1, False: int(action.kind is Kind.FORWARD)}[is_backward]
        end = start + _DURATIONS[action.kind]
        virtual = self._shape.virtual_stage(stage, action.chunk)
        self._ends[is_backward, virtual, action.microbatch] = end
        self.stages[stage].append(_Done(action, start, end))
        return end


@cache
def build_chunk_plan(shape: ChunkShape) -> ChunkPlan:
    """The plan of every stage.

    With all virtual stages active the order is Megatron Core's. Else passes may come earlier than there, which the
    missing backward passes allow: whichever order ends first.
    """
    stock = [stock_order(shape, stage) for stage in range(shape.num_stages)]
    timeline = _Timeline(shape, stock).run()
    if not shape.is_stock:
        eager = _Timeline(shape, None).run()
        if _length(eager) < _length(timeline):
            timeline = eager
    return ChunkPlan(shape=shape, stages=_with_messages(shape, timeline))


def _length(timeline: Sequence[Sequence[_Done]]) -> float:
    return max(done[-1].end for done in timeline)


def _with_messages(shape: ChunkShape, timeline: Sequence[Sequence[_Done]]) -> tuple[tuple[Action, ...], ...]:
    """Every stage's passes, and between them its messages.

    A message stands where it could be sent, on the timeline of all stages: after the passes that began before, at both
    ends. So all stages follow one order of passes and messages.
    """
    events: defaultdict[int, list[tuple[float, int, int, Action]]] = defaultdict(list)
    for stage, passes in enumerate(timeline):
        for done in passes:
            events[stage].append((done.start, shape.num_virtual, done.action.microbatch, done.action))
            virtual = shape.virtual_stage(stage, done.action.chunk)
            is_backward = done.action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
            target = virtual - 1 if is_backward else virtual + 1
            if not 0 <= target < shape.num_virtual or (is_backward and not shape.needs_input_gradient(virtual)):
                continue
            for end, kinds in (
                (virtual, (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)),
                (target, (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)),
            ):
                message = Action(kinds[is_backward], done.action.microbatch, chunk=shape.chunk_of(end))
                # of messages of one moment, the one of the lowest sender comes first; all before passes that begin then
                events[shape.stage_of(end)].append((done.end, virtual, done.action.microbatch, message))
    return tuple(
        tuple(event[-1] for event in sorted(events[stage], key=lambda event: event[:3]))
        for stage in range(shape.num_stages)
    )
