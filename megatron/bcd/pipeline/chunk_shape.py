"""The size of an interleaved plan, and Megatron Core's order of its passes (docs/pipeline.md). Pure.

Chunk c of stage s is virtual stage c x stages + s; virtual stages are numbered in depth order. Forward and backward
passes come in Megatron Core's interleaved order: microbatches in groups of as many as there are stages, a group through
one chunk after the other; backward with the chunks in reverse. What virtual stages before the first trainable one do is
forward only, so their backward passes are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from megatron.bcd.blocks.partition import Partition
from megatron.bcd.pipeline.actions import Action, Kind

BACKWARD = frozenset((Kind.BACKWARD, Kind.BACKWARD_INPUT))


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
    is_prefix_served: bool = False
    """Whether the first trainable virtual stage has its input without those before it, which then do nothing."""
    work: tuple[tuple[float, float], ...] = ()
    """By virtual stage: time of a forward and of a backward pass, in any unit, for the order of passes; empty: forward
    = input gradients = weight gradients."""

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

    def needs_input(self, virtual: int) -> bool:
        """Whether the virtual stage before this one runs forward."""
        return virtual > (self.first_trainable if self.is_prefix_served else 0)

    def forward_kind(self, virtual: int) -> Kind | None:
        """None where there is no forward pass."""
        if self.is_prefix_served and self.is_forward_only(virtual):
            return None
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

    def duration(self, virtual: int, kind: Kind) -> float:
        """Of a pass, in the unit of `work`."""
        is_backward = kind in BACKWARD
        if self.work:
            return self.work[virtual][is_backward]
        return 1.0 + (kind is Kind.BACKWARD)

    def max_graphs(self, stage: int) -> int:
        """Bound on the microbatches whose activations the stage keeps at once, chunks counted separately: what full
        training keeps in Megatron Core's order."""
        if self.first_trainable == self.num_virtual:
            return 0
        whole = replace(self, first_trainable=0, active=(True,) * self.num_virtual, is_prefix_served=False, work=())
        return max_graphs(stock_order(whole, stage))


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


def phase_chunk_shape(
    partition: Partition, block: int, *, num_microbatches: int, head: float, is_prefix_served: bool = False
) -> ChunkShape:
    """Of a training iteration in the phase of `block`; a pass of the output head takes `head` passes of a layer."""
    updated = set(partition.blocks[block].layers if partition.has_active_block else ()) | set(
        partition.resting_layers(block)
    )
    first = len(partition.prefix_layers(block))
    work = []
    for virtual in range(partition.num_virtual_stages):
        chunk, stage = divmod(virtual, partition.num_stages)
        layers = partition.chunk_layers(stage, chunk)
        forward = float(len(layers))
        backward = float(sum((layer >= first) + (layer in updated) for layer in layers))
        if virtual == partition.num_virtual_stages - 1:
            forward, backward = forward + head, backward + head * (1 + partition.head_active(block))
        work.append((forward, backward))
    return ChunkShape(
        num_stages=partition.num_stages,
        num_chunks=partition.num_chunks,
        num_microbatches=num_microbatches,
        first_trainable=partition.first_trainable_virtual_stage(block),
        active=tuple(partition.virtual_stage_active(block, each) for each in range(partition.num_virtual_stages)),
        is_prefix_served=is_prefix_served,
        work=tuple(work),
    )


def evaluation_chunk_shape(*, num_stages: int, num_chunks: int, num_microbatches: int) -> ChunkShape:
    """Forward passes only, of the first chunks where `num_chunks` is not all."""
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


def passes(shape: ChunkShape, stage: int) -> tuple[list[Action | None], list[Action | None]]:
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
    forward, backward = passes(shape, stage)
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
        elif action.kind in BACKWARD:
            kept -= 1
        most = max(most, kept)
    return most
