"""Orders of an interleaved iteration's passes, found on a timeline of all stages. Pure.

`follow` times given orders; `arrange` finds an order. A stage has up to three rows of passes: backward, forward with a
graph, and forward only. Inside a row the order is Megatron Core's; of the rows' next passes a stage takes the one that
can begin first. Messages take no time and never block here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.bcd.pipeline.actions import Action, Kind
from megatron.bcd.pipeline.chunk_shape import BACKWARD, ChunkShape, passes


@dataclass(frozen=True, slots=True)
class Done:
    """A pass with its times."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a stage chooses between its rows."""

    forward_delay: float = 0.0
    """A backward pass that begins at most this much later than a forward pass comes first; in mean forward passes."""
    prefix_delay: float = 0.0
    """The same before a forward-only pass."""
    lead: int = 2
    """Groups of microbatches by which forward-only passes may be ahead of those with a graph."""
    keeps_least: bool = False
    """Keep activations of no more microbatches than Megatron Core's order without the passes that are left out."""


Timeline = list[list[Done]]
"""By stage, in order."""


def length(timeline: Timeline) -> float:
    """When the last pass ends."""
    return max(done[-1].end for done in timeline)


class _Clock:
    """When passes end, and when others can begin therefore."""

    def __init__(self, shape: ChunkShape) -> None:
        self.shape = shape
        self.stages: Timeline = [[] for _ in range(shape.num_stages)]
        self._ends: dict[tuple[bool, int, int], float] = {}
        """By whether it is backward, virtual stage and microbatch."""

    def start_of(self, stage: int, action: Action) -> float | None:
        """When the pass can begin as the stage's next one; None while that is not known."""
        shape, microbatch = self.shape, action.microbatch
        virtual = shape.virtual_stage(stage, action.chunk)
        if action.kind not in BACKWARD:
            ready = 0.0 if not shape.needs_input(virtual) else self._ends.get((False, virtual - 1, microbatch))
        elif virtual == shape.last:
            ready = self._ends.get((False, virtual, microbatch))
        else:
            ready = self._ends.get((True, virtual + 1, microbatch))
        if ready is None or not self.stages[stage]:
            return ready
        return max(ready, self.stages[stage][-1].end)

    def do(self, stage: int, action: Action, start: float) -> None:
        virtual = self.shape.virtual_stage(stage, action.chunk)
        end = start + self.shape.duration(virtual, action.kind)
        self._ends[action.kind in BACKWARD, virtual, action.microbatch] = end
        self.stages[stage].append(Done(action, start, end))


def follow(shape: ChunkShape, orders: Sequence[Sequence[Action]]) -> Timeline:
    """The passes in these orders with their times. Raises ValueError if a stage waits for ever."""
    clock, left = _Clock(shape), [list(reversed(order)) for order in orders]
    is_moving = True
    while is_moving:
        is_moving = False
        for stage, actions in enumerate(left):
            while actions and (start := clock.start_of(stage, actions[-1])) is not None:
                clock.do(stage, actions.pop(), start)
                is_moving = True
    if any(left):
        raise ValueError("the stages wait for each other for ever")
    return clock.stages


def arrange(shape: ChunkShape, policy: Policy, bounds: Sequence[int]) -> Timeline:
    """The passes in an order of the policy's, with their times.

    ``bounds`` limit the microbatches whose activations a stage keeps. With those of Megatron Core's order this can't
    get stuck: whatever that order does next is possible here too. Raises ValueError where smaller ones do.
    """
    return _Arrangement(shape, policy, bounds).run()


_Option = tuple[tuple[float, int], float]
"""What is compared: the beginning with the row's delay, and the row; and the beginning."""


class _Arrangement:
    def __init__(self, shape: ChunkShape, policy: Policy, bounds: Sequence[int]) -> None:
        self._shape, self._bounds = shape, bounds
        self._clock = _Clock(shape)
        self._rows = [list(_rows(shape, stage)) for stage in range(shape.num_stages)]
        forward = [shape.duration(virtual, Kind.FORWARD) for virtual in range(shape.num_virtual)]
        mean = sum(forward) / len(forward)
        self._delays = (0.0, mean * policy.forward_delay, mean * policy.prefix_delay)
        self._lead = policy.lead * shape.num_stages
        self._num_graphs = [0] * shape.num_stages
        self._num_begun = [0] * shape.num_stages
        """Microbatches that have come through the stage's first chunk with a graph."""

    def run(self) -> Timeline:
        stages = range(self._shape.num_stages)
        options = [self._option(stage) for stage in stages]
        while any(any(rows) for rows in self._rows):
            possible = [(option[1], stage) for stage in stages if (option := options[stage]) is not None]
            if not possible:
                raise ValueError("the stages wait for each other for ever")
            _, stage = min(possible)
            option = options[stage]
            assert option is not None
            self._take(stage, row=option[0][1], start=option[1])
            for changed in {stage, (stage + 1) % len(stages), (stage - 1) % len(stages)}:
                options[changed] = self._option(changed)
        return self._clock.stages

    def _option(self, stage: int) -> _Option | None:
        """The stage's next pass."""
        best: _Option | None = None
        for row, left in enumerate(self._rows[stage]):
            if not left or self._must_wait(stage, left[-1]):
                continue
            start = self._clock.start_of(stage, left[-1])
            if start is not None and (best is None or (start + self._delays[row], row) < best[0]):
                best = (start + self._delays[row], row), start
        return best

    def _must_wait(self, stage: int, action: Action) -> bool:
        if action.kind is Kind.FORWARD:
            return self._num_graphs[stage] >= self._bounds[stage]
        return action.kind is Kind.FORWARD_ONLY and action.microbatch >= self._num_begun[stage] + self._lead

    def _take(self, stage: int, *, row: int, start: float) -> None:
        action = self._rows[stage][row].pop()
        self._num_graphs[stage] += (action.kind is Kind.FORWARD) - (action.kind in BACKWARD)
        first = self._shape.chunk_of(self._shape.first_trainable)
        self._num_begun[stage] += action.kind is Kind.FORWARD and action.chunk == first
        self._clock.do(stage, action, start)


def _rows(shape: ChunkShape, stage: int) -> Iterator[list[Action]]:
    """Backward, forward with a graph, forward only; the next pass last."""
    forward, backward = passes(shape, stage)
    yield [action for action in reversed(backward) if action is not None]
    for kind in (Kind.FORWARD, Kind.FORWARD_ONLY):
        yield [action for action in reversed(forward) if action is not None and action.kind is kind]
