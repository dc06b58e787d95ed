"""The pipeline schedule of one iteration as data (docs/pipeline.md): its shape, what a stage does, what stages send.

A stage holds one chunk of the model or, in layout ``interleaved``, several: chunk c of stage s is virtual stage
c x stages + s. Virtual stages are numbered in depth order. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.bcd.blocks.partition import Partition


class Kind(enum.StrEnum):
    """What an action is."""

    FORWARD = "forward"
    """Keeps activations for a backward."""
    FORWARD_ONLY = "forward-only"
    """Without a graph: keeps nothing."""
    BACKWARD = "backward"
    """Input gradients and weight gradients; on the first trainable stage down to its first active layer only."""
    BACKWARD_INPUT = "backward of input gradients"
    """A frozen stage's: no weight gradients."""
    SEND_FORWARD = "send forward"
    RECEIVE_FORWARD = "receive forward"
    SEND_BACKWARD = "send backward"
    RECEIVE_BACKWARD = "receive backward"

    @property
    def is_forward(self) -> bool:
        """Whether it is a forward pass."""
        return self in (Kind.FORWARD, Kind.FORWARD_ONLY)

    @property
    def is_backward(self) -> bool:
        """Whether it is a backward pass."""
        return self in (Kind.BACKWARD, Kind.BACKWARD_INPUT)

    @property
    def computes(self) -> bool:
        return self.is_forward or self.is_backward


@dataclass(frozen=True, slots=True)
class Action:
    """A pass of one microbatch through a chunk of the stage, or the start of a message of that chunk."""

    kind: Kind
    microbatch: int
    """In its iteration; the number of microbatches + j is microbatch j of the next iteration."""
    chunk: int = 0


class Message(NamedTuple):
    """An output (to the next virtual stage) or an input gradient (to the one before) of one microbatch."""

    source: int
    target: int
    microbatch: int

    @property
    def is_backward(self) -> bool:
        return self.target < self.source


_ENDS = {
    Kind.SEND_FORWARD: (0, 1),
    Kind.RECEIVE_FORWARD: (-1, 0),
    Kind.SEND_BACKWARD: (0, -1),
    Kind.RECEIVE_BACKWARD: (1, 0),
}


def message_of(virtual: int, action: Action) -> Message | None:
    """What a virtual stage sends or receives in the action; None where it computes."""
    if action.kind not in _ENDS:
        return None
    source, target = _ENDS[action.kind]
    return Message(virtual + source, virtual + target, action.microbatch)


@dataclass(frozen=True, kw_only=True)
class PlanShape:
    """What a plan is built from.

    The prefix does not change within a phase. So without chunks the forward-only stages may run ahead: they compute
    the first microbatches of the next iteration while the others still run backward and step the optimizer.
    """

    num_stages: int
    num_microbatches: int
    first_trainable: int
    """The first virtual stage with a graph; the number of virtual stages in an evaluation."""
    active: tuple[bool, ...]
    """By virtual stage: whether it builds weight gradients."""
    num_chunks: int = 1
    """Of every stage."""
    is_prefix_served: bool = False
    """Whether the first trainable virtual stage has its input without those before it, which then do nothing."""
    done_ahead: int = 0
    """Microbatches of this iteration that the iteration before has run ahead with."""
    run_ahead: int = 0
    """Microbatches of the next iteration that the forward-only stages run ahead with."""
    work: tuple[tuple[float, float], ...] = ()
    """By virtual stage: time of a forward and of a backward pass, in any unit, for the order of passes and messages;
    empty: forward = input gradients = weight gradients."""

    def __post_init__(self) -> None:
        num_virtual = self.num_stages * self.num_chunks
        assert min(self.num_stages, self.num_chunks, self.num_microbatches) >= 1 and self.run_ahead >= 0
        assert 0 <= self.first_trainable <= num_virtual == len(self.active)
        assert not any(self.active[: self.first_trainable]), "weight gradients before the first trainable stage"
        assert 0 <= self.done_ahead <= self.num_microbatches
        assert not (self.done_ahead or self.run_ahead) or (
            self.num_chunks == 1 and 0 < self.first_trainable < num_virtual and not self.is_prefix_served
        ), "nothing can run ahead"

    @property
    def num_virtual(self) -> int:
        """Virtual stages."""
        return self.num_stages * self.num_chunks

    @property
    def last(self) -> int:
        """The last virtual stage."""
        return self.num_virtual - 1

    @property
    def is_training(self) -> bool:
        return self.first_trainable < self.num_virtual

    def virtual_stage(self, stage: int, chunk: int) -> int:
        return chunk * self.num_stages + stage

    def stage_of(self, virtual: int) -> int:
        return virtual % self.num_stages

    def chunk_of(self, virtual: int) -> int:
        return virtual // self.num_stages

    def is_forward_only(self, virtual: int) -> bool:
        return virtual < self.first_trainable

    def is_one_way(self, virtual: int) -> bool:
        """Whether the messages of a stage to the next one are all that passes between the two."""
        return self.num_chunks == 1 and self.is_forward_only(virtual)

    @property
    def max_sends(self) -> int:
        """Messages of a stage that their receivers may not have yet; one more waits for the oldest."""
        return 2 if self.num_chunks == 1 else 4

    def needs_input_gradient(self, virtual: int) -> bool:
        """Whether the virtual stage before this one runs backward."""
        return virtual > self.first_trainable

    def needs_input(self, virtual: int) -> bool:
        """Whether the virtual stage before this one runs forward."""
        return virtual > (self.first_trainable if self.is_prefix_served else 0)

    def forward_kind(self, virtual: int) -> Kind | None:
        """None where there is no forward pass."""
        if not self.is_forward_only(virtual):
            return Kind.FORWARD
        return None if self.is_prefix_served else Kind.FORWARD_ONLY

    def backward_kind(self, virtual: int) -> Kind | None:
        """None where there is no backward pass."""
        if self.is_forward_only(virtual):
            return None
        return Kind.BACKWARD if self.active[virtual] else Kind.BACKWARD_INPUT

    def forward_microbatches(self, virtual: int) -> range:
        """Those that come through the virtual stage."""
        if self.is_forward_only(virtual):
            return range(self.done_ahead, self.num_microbatches + self.run_ahead)
        return range(self.num_microbatches)

    def needed_message(self, virtual: int, action: Action) -> Message | None:
        """The message without which a pass of the virtual stage can't begin."""
        if action.kind.is_forward:
            came_before = virtual == self.first_trainable and action.microbatch < self.done_ahead
            is_there = came_before or not self.needs_input(virtual)
            return None if is_there else Message(virtual - 1, virtual, action.microbatch)
        return Message(virtual + 1, virtual, action.microbatch) if virtual < self.last else None

    def duration(self, virtual: int, kind: Kind) -> float:
        """Of a pass, in the unit of `work`."""
        if self.work:
            return self.work[virtual][kind.is_backward]
        return 1.0 + (kind is Kind.BACKWARD)

    @property
    def full_training(self) -> PlanShape:
        """All layers active, in Megatron Core's order."""
        return replace(stock_shape(self), active=(True,) * self.num_virtual)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One iteration of the whole pipeline."""

    shape: PlanShape
    stages: tuple[tuple[Action, ...], ...]
    """By stage, in order."""


def evaluation_shape(*, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> PlanShape:
    """Forward passes only; of the first stages or chunks where the numbers are not all."""
    num_virtual = num_stages * num_chunks
    return PlanShape(
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        first_trainable=num_virtual,
        active=(False,) * num_virtual,
    )


def stock_shape(shape: PlanShape) -> PlanShape:
    """Megatron Core's own 1F1B for the same phase: every stage runs forward and backward."""
    return replace(shape, first_trainable=0, is_prefix_served=False, done_ahead=0, run_ahead=0, work=())


def phase_shape(
    partition: Partition,
    block: int,
    *,
    num_microbatches: int,
    head: float,
    is_prefix_served: bool = False,
    done_ahead: int = 0,
    run_ahead: int = 0,
) -> PlanShape:
    """Of a training iteration in the phase of `block`; a pass of the output head takes `head` passes of a layer."""
    virtual_stages = range(partition.num_virtual_stages)
    return PlanShape(
        num_stages=partition.num_stages,
        num_chunks=partition.num_chunks,
        num_microbatches=num_microbatches,
        first_trainable=partition.first_trainable_virtual_stage(block),
        active=tuple(partition.virtual_stage_active(block, virtual) for virtual in virtual_stages),
        is_prefix_served=is_prefix_served,
        done_ahead=done_ahead,
        run_ahead=run_ahead,
        work=_work(partition, block, head),
    )


def _work(partition: Partition, block: int, head: float) -> tuple[tuple[float, float], ...]:
    """As `PlanShape.work`, in passes of a layer."""
    active = partition.blocks[block].layers if partition.has_active_block else ()
    updated = {*active, *partition.stateless_layers(block)}
    first = len(partition.prefix_layers(block))
    work = []
    for virtual in range(partition.num_virtual_stages):
        chunk, stage = divmod(virtual, partition.num_stages)
        layers: Sequence[int] = partition.chunk_layers(stage, chunk)
        forward = float(len(layers))
        backward = float(sum((layer >= first) + (layer in updated) for layer in layers))
        if virtual == partition.num_virtual_stages - 1:
            forward, backward = forward + head, backward + head * (1 + partition.head_active(block))
        work.append((forward, backward))
    return tuple(work)


def steady_shape(
    partition: Partition, block: int, *, num_microbatches: int, head: float, run_ahead: int | None = None
) -> PlanShape:
    """Of an iteration in the middle of the phase, which begins with what the one before ran ahead with and runs ahead
    itself. `run_ahead` as --bcd-run-ahead."""
    ahead = min(microbatches_ahead(partition, block, run_ahead), num_microbatches)
    return phase_shape(
        partition, block, num_microbatches=num_microbatches, head=head, done_ahead=ahead, run_ahead=ahead
    )


def microbatches_ahead(partition: Partition, block: int, asked: int | None) -> int:
    """How many microbatches forward-only stages may run ahead with; `asked` is --bcd-run-ahead."""
    first = partition.first_trainable_stage(block)
    if partition.num_chunks > 1 or first == 0:
        return 0
    return default_run_ahead(num_stages=partition.num_stages, first_trainable=first) if asked is None else asked


def default_run_ahead(*, num_stages: int, first_trainable: int) -> int:
    """Microbatches of run-ahead that hide the filling of the stages before the first trainable stage.

    The first trainable stage works on them until the next one has come through `first_trainable` stages. Alone behind
    the prefix it takes three units of time for each (forward, both gradients); with stages behind it, the first ones go
    faster. With unit costs and messages of 0 to 0.2, up to 24 stages, more gains nothing and fewer costs up to a sixth
    of an iteration.
    """
    return -(-first_trainable // (3 if first_trainable == num_stages - 1 else 2))
