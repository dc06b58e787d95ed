"""The pipeline schedule of one iteration as data (docs/pipeline.md): its shape, its actions and its messages. Pure.

A stage holds one chunk of the model or, in layout ``interleaved``, several: chunk c of stage s is virtual stage
c x stages + s. Virtual stages are numbered by depth.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron.bcd.blocks.partition import Partition


class Kind(enum.StrEnum):
    """The kind of an action: a pass, one end of a message, or what follows passes in breadth-first order."""

    FORWARD = "forward"
    """Keeps activations for a backward pass."""
    FORWARD_ONLY = "forward-only"
    """Runs without a graph and keeps nothing."""
    FORWARD_AHEAD = "forward, kept"
    """Keeps activations while other chunks run forward and backward, in breadth-first order."""
    BACKWARD = "backward"
    """Computes input and weight gradients; on the first trainable stage only down to its first active layer."""
    BACKWARD_INPUT = "backward of input gradients"
    """The backward pass of a frozen stage: no weight gradients."""
    SEND_FORWARD = "send forward"
    RECEIVE_FORWARD = "receive forward"
    SEND_BACKWARD = "send backward"
    RECEIVE_BACKWARD = "receive backward"
    RECOMPUTE = "forward again"
    """Repeats a forward pass from its saved input, and keeps activations for the backward pass that follows."""
    LOSS = "loss"
    """Reduces the loss, which decides whether this iteration updates anything, over the ranks of the last stage."""
    SEND_LOSS = "send loss"
    """Follows the last gradient to the previous stage."""
    RECEIVE_LOSS = "receive loss"
    UPDATE = "update"
    """Steps the chunk's matrices, except those of a block that is stepped as a whole, and frees their gradients. Waits
    for the loss. If gradients are clipped, it copies them to host memory: the updates follow all passes."""

    @cached_property
    def is_forward(self) -> bool:
        return self in (Kind.FORWARD, Kind.FORWARD_ONLY, Kind.FORWARD_AHEAD, Kind.RECOMPUTE)

    @cached_property
    def keeps_graph(self) -> bool:
        """Whether this pass keeps activations."""
        return self in (Kind.FORWARD, Kind.FORWARD_AHEAD, Kind.RECOMPUTE)

    @cached_property
    def is_backward(self) -> bool:
        return self in (Kind.BACKWARD, Kind.BACKWARD_INPUT)

    @cached_property
    def is_message(self) -> bool:
        return self.startswith(("send", "receive"))

    @cached_property
    def computes(self) -> bool:
        return self.is_forward or self.is_backward

    @cached_property
    def is_passed_on(self) -> bool:
        """Whether this is a pass whose result the neighbouring virtual stage may need."""
        return self.computes and self is not Kind.RECOMPUTE


@dataclass(frozen=True, slots=True)
class Action:
    """A pass of one microbatch through a chunk of the stage, the start of a message of that chunk, or what follows the
    passes of all microbatches."""

    kind: Kind
    microbatch: int
    """Index in this iteration. From `num_microbatches` on it counts microbatches of the next iteration. 0 in LOSS and
    UPDATE, `num_microbatches` in messages of the loss."""
    chunk: int = 0


@dataclass(frozen=True, kw_only=True)
class PlanShape:
    """The parameters of a plan.

    The prefix does not change within a phase. Without chunks, forward-only stages can therefore run ahead: they compute
    the first microbatches of the next iteration while the others still run backward and step the optimizer.
    """

    num_stages: int
    num_microbatches: int
    first_trainable: int
    """The first virtual stage that builds a graph. In an evaluation, the number of virtual stages."""
    active: tuple[bool, ...]
    """Whether each virtual stage computes weight gradients."""
    num_chunks: int = 1
    """Number of chunks per stage."""
    is_prefix_cached: bool = False
    """Whether the first trainable virtual stage reads its input from the prefix cache. Earlier ones then do nothing."""
    done_ahead: int = 0
    """Number of microbatches of this iteration that already ran ahead in the previous one."""
    run_ahead: int = 0
    """Number of microbatches of the next iteration that the forward-only stages run ahead in this one."""
    is_breadth_first: bool = False
    """Whether all microbatches pass through a chunk before the next chunk starts (`build.breadth_first_order`)."""
    updated: tuple[bool, ...] = ()
    """In breadth-first order: whether each virtual stage has matrices that are stepped right after its passes."""
    clips_by_chunk: bool = False
    """Whether these updates wait for the norm of all gradients, which follows all actions."""
    num_kept: int = 0
    """In breadth-first order: the passes of a microbatch through a chunk that each stage does not repeat, because their
    activations wait on the device for the backward pass. The last chunks come first."""
    num_on_host: int = 0
    """Others whose activations wait in host memory (`build.host_passes`)."""

    @property
    def num_virtual(self) -> int:
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
        """Return whether the stage only sends to the next one and receives nothing back."""
        return self.num_chunks == 1 and self.is_forward_only(virtual)

    @property
    def max_sends(self) -> int:
        """Maximum number of messages that a stage sends before the oldest one must have arrived."""
        return 2 if self.num_chunks == 1 else 4

    def needs_input_gradient(self, virtual: int) -> bool:
        """Return whether the virtual stage before this one runs backward."""
        return virtual > self.first_trainable

    def needs_input(self, virtual: int) -> bool:
        """Return whether the virtual stage before this one runs forward."""
        return virtual > (self.first_trainable if self.is_prefix_cached else 0)

    def forward_kind(self, virtual: int) -> Kind | None:
        """Return the kind of the forward pass, or None if there is none."""
        if not self.is_forward_only(virtual):
            return Kind.FORWARD
        return None if self.is_prefix_cached else Kind.FORWARD_ONLY

    def backward_kind(self, virtual: int) -> Kind | None:
        """Return the kind of the backward pass, or None if there is none."""
        if self.is_forward_only(virtual):
            return None
        return Kind.BACKWARD if self.active[virtual] else Kind.BACKWARD_INPUT

    def forward_microbatches(self, virtual: int) -> range:
        """Return the microbatches that run forward through the virtual stage."""
        if self.is_forward_only(virtual):
            return range(self.done_ahead, self.num_microbatches + self.run_ahead)
        return range(self.num_microbatches)

    def sends_loss(self, virtual: int, microbatch: int) -> bool:
        """Return whether the loss follows the gradient of this microbatch to the previous stage.

        Each stage receives it once, behind the first gradients that it receives.
        """
        is_last = microbatch == self.num_microbatches - 1
        return self.is_breadth_first and is_last and virtual > self.last - self.num_stages + 1

    def needed_pass(self, virtual: int, action: Action) -> tuple[bool, int, int] | None:
        """Return the neighbour's pass whose result the virtual stage needs to start this action, if any.

        It is given as direction (True is backward), virtual stage and microbatch. The loss arrives before the gradients
        of lower chunks, so what waits for it needs no pass.
        """
        if action.kind.is_backward:
            return (True, virtual + 1, action.microbatch) if virtual < self.last else None
        has_arrived = virtual == self.first_trainable and action.microbatch < self.done_ahead
        has_input = action.kind.is_passed_on and self.needs_input(virtual) and not has_arrived
        return (False, virtual - 1, action.microbatch) if has_input else None

    @property
    def microbatches_ahead(self) -> int:
        """Number of microbatches that forward-only stages run ahead. It hides the time to fill the prefix's stages.

        The first trainable stage works on them while the next microbatch passes through `first_trainable` stages. If it
        is also the last stage, each takes three units of time (forward, both gradients); with stages behind it, the
        first ones take less. Simulated with unit costs, messages of 0 to 0.2 units and up to 24 stages: more gains
        nothing, and less costs up to a sixth of an iteration.
        """
        if self.num_chunks > 1 or self.is_breadth_first or self.is_prefix_cached:
            return 0
        return -(-self.first_trainable // (3 if self.first_trainable == self.last else 2))

    def mid_phase(self, num_microbatches: int) -> PlanShape:
        """Return the shape of an iteration of this size in the middle of a phase, behind one that has run ahead.

        Of its passes the same part is kept.
        """
        ahead = min(self.microbatches_ahead, num_microbatches)
        kept, on_host = (each * num_microbatches // self.num_microbatches for each in (self.num_kept, self.num_on_host))
        shape = replace(self, num_microbatches=num_microbatches, done_ahead=ahead, run_ahead=ahead)
        return replace(shape, num_kept=kept, num_on_host=on_host)

    @property
    def full_training(self) -> PlanShape:
        """Shape of full training: all layers active, no run-ahead."""
        return replace(stock_shape(self), active=(True,) * self.num_virtual)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One iteration of the whole pipeline."""

    shape: PlanShape
    stages: tuple[tuple[Action, ...], ...]
    """The actions of each stage, in order."""


def evaluation_shape(
    *, num_stages: int, num_microbatches: int, num_chunks: int = 1, is_breadth_first: bool = False
) -> PlanShape:
    """Return the shape of forward passes without a graph. `num_stages` and `num_chunks` may cover only the model's
    first part."""
    num_virtual = num_stages * num_chunks
    return PlanShape(
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        first_trainable=num_virtual,
        active=(False,) * num_virtual,
        is_breadth_first=is_breadth_first,
    )


def stock_shape(shape: PlanShape) -> PlanShape:
    """Return the shape of Megatron Core's 1F1B for the same phase: every stage runs forward and backward."""
    return replace(shape, first_trainable=0, is_prefix_cached=False, done_ahead=0, run_ahead=0)


def phase_shape(
    partition: Partition,
    block: int,
    *,
    num_microbatches: int,
    is_breadth_first: bool = False,
    steps_block_by_chunk: bool = False,
    **options: Any,
) -> PlanShape:
    """Return the shape of a training iteration in the phase of `block`. `options` are other fields of the shape.

    In breadth-first order `partition` is a `Partition.in_passes`.
    """
    numbers = range(partition.num_virtual_stages)
    updated = (steps_block_by_chunk or partition.virtual_stage_updated(block, virtual) for virtual in numbers)
    return PlanShape(
        num_stages=partition.num_stages,
        num_chunks=partition.num_chunks,
        num_microbatches=num_microbatches,
        first_trainable=partition.first_trainable_virtual_stage(block),
        active=tuple(partition.virtual_stage_active(block, virtual) for virtual in numbers),
        is_breadth_first=is_breadth_first,
        updated=tuple(updated) if is_breadth_first else (),
        **options,
    )
