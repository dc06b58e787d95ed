"""The actions of every pipeline stage in one iteration (docs/pipeline.md).

Stages before the first trainable stage hold prefix only: they run forward without a graph and send their outputs on.
From the first trainable stage on the order is 1F1B, as if that stage were the first one: it sends no backward message.

Run-ahead: the prefix does not change within a phase, so the forward-only stages may compute the first microbatches of
the next iteration while the others still run backward and step the optimizer. Microbatches count from 0 in their
iteration; `num_microbatches` + j is microbatch j of the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from megatron.bcd.pipeline.actions import Action, Kind

MAX_SENDS_IN_FLIGHT = 2
"""Outputs of a forward-only stage that its receiver has not received yet; one more waits for the oldest."""


@dataclass(frozen=True, kw_only=True)
class PlanShape:
    """The input of `build_plan`."""

    num_stages: int
    num_microbatches: int
    first_trainable: int
    """The first trainable stage; `num_stages` in an evaluation, where no stage has a graph."""
    active: tuple[bool, ...]
    """By stage: whether it builds weight gradients."""
    done_ahead: int = 0
    """Microbatches of this iteration that the iteration before has run ahead with."""
    run_ahead: int = 0
    """Microbatches of the next iteration that the forward-only stages run ahead with."""
    is_stock: bool = False
    """Megatron Core's own 1F1B: every stage runs forward and backward, whatever `first_trainable` is."""

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that contradict each other."""
        if self.num_stages < 1 or self.num_microbatches < 1:
            raise ValueError(f"{self.num_stages} stages and {self.num_microbatches} microbatches: at least 1 of each")
        if not 0 <= self.first_trainable <= self.num_stages:
            raise ValueError(f"first trainable stage {self.first_trainable}: must be 0 to {self.num_stages}")
        if len(self.active) != self.num_stages or any(self.active[: self.first_trainable]):
            raise ValueError(
                f"active stages {self.active}: one per stage, and none before the first trainable stage "
                f"{self.first_trainable}"
            )
        if not 0 <= self.done_ahead <= self.num_microbatches or self.run_ahead < 0:
            raise ValueError(
                f"ahead by {self.done_ahead} and {self.run_ahead} microbatches: at least 0, done at most all"
            )
        if (self.done_ahead or self.run_ahead) and (self.is_stock or not 0 < self.first_trainable < self.num_stages):
            raise ValueError("only stages before the first trainable stage run ahead, and there are none")

    @property
    def last(self) -> int:
        """The last stage."""
        return self.num_stages - 1

    def is_forward_only(self, stage: int) -> bool:
        """Whether the stage holds prefix only."""
        return not self.is_stock and stage < self.first_trainable

    def is_one_way(self, stage: int) -> bool:
        """Whether nothing but forward messages passes between `stage` and the next one.

        Such messages are sent without waiting for the receiver, MAX_SENDS_IN_FLIGHT at most.
        """
        return self.is_forward_only(stage)

    def max_graphs(self, stage: int) -> int:
        """Bound on the microbatches whose activations the stage keeps at once."""
        return 0 if self.is_forward_only(stage) else min(self.num_microbatches, self.num_stages - stage)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One iteration of the whole pipeline."""

    shape: PlanShape
    stages: tuple[tuple[Action, ...], ...]
    """By stage, in order."""


def bcd_shape(
    *,
    num_stages: int,
    num_microbatches: int,
    first_trainable: int,
    active: Sequence[bool] | None = None,
    done_ahead: int = 0,
    run_ahead: int = 0,
) -> PlanShape:
    """The shape of a training iteration; by default the first trainable stage alone is active. Raises ValueError as
    PlanShape."""
    stages = range(num_stages)
    return PlanShape(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        first_trainable=first_trainable,
        active=tuple(stage == first_trainable for stage in stages) if active is None else tuple(active),
        done_ahead=done_ahead,
        run_ahead=run_ahead,
    )


def default_run_ahead(*, num_stages: int, first_trainable: int) -> int:
    """Microbatches of run-ahead that hide the filling of the stages before the first trainable stage.

    The first trainable stage works on them until the next one has come through `first trainable stage` stages. Alone
    behind the prefix it takes three units of time for each (forward, both gradients); with stages behind it, the first
    ones go faster. With unit costs and messages of 0 to 0.2, up to 24 stages, more gains nothing and fewer costs up to
    a sixth of an iteration.
    """
    return -(-first_trainable // (3 if first_trainable == num_stages - 1 else 2))


def stock_shape(shape: PlanShape) -> PlanShape:
    """Megatron Core's own schedule for the same phase."""
    return PlanShape(
        num_stages=shape.num_stages,
        num_microbatches=shape.num_microbatches,
        first_trainable=shape.first_trainable,
        active=shape.active,
        is_stock=True,
    )


def evaluation_shape(*, num_stages: int, num_microbatches: int) -> PlanShape:
    """Forward passes only, on every stage."""
    return PlanShape(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        first_trainable=num_stages,
        active=(False,) * num_stages,
    )


def build_plan(shape: PlanShape) -> Plan:
    """The plan of every stage."""
    return Plan(shape=shape, stages=tuple(stage_actions(shape, stage) for stage in range(shape.num_stages)))


@cache
def stage_actions(shape: PlanShape, stage: int) -> tuple[Action, ...]:
    """What `stage` does in one iteration, in order."""
    actions = _forward_only(shape, stage) if shape.is_forward_only(stage) else _one_forward_one_backward(shape, stage)
    return tuple(actions)


def _forward_only(shape: PlanShape, stage: int) -> Iterator[Action]:
    for microbatch in range(shape.done_ahead, shape.num_microbatches + shape.run_ahead):
        if stage > 0:
            yield Action(Kind.RECEIVE_FORWARD, microbatch)
        yield Action(Kind.FORWARD_ONLY, microbatch)
        if stage < shape.last:
            yield Action(Kind.SEND_FORWARD, microbatch)


def _one_forward_one_backward(shape: PlanShape, stage: int) -> Iterator[Action]:
    """Megatron Core's order: warm-up, one forward and one backward in turn, cool-down."""
    total = shape.num_microbatches
    num_warm_up = min(shape.last - stage, total)
    backward = Kind.BACKWARD if shape.active[stage] else Kind.BACKWARD_INPUT
    is_first, is_last = stage == 0, stage == shape.last
    sends_backward = not is_first and not shape.is_one_way(stage - 1)

    for microbatch in range(num_warm_up):
        yield from _receive(shape, stage, microbatch)
        yield Action(Kind.FORWARD, microbatch)
        yield Action(Kind.SEND_FORWARD, microbatch)

    for microbatch in range(num_warm_up, total):
        oldest = microbatch - num_warm_up
        # with a backward message to send, this receive went along with it
        if microbatch == num_warm_up or not sends_backward:
            yield from _receive(shape, stage, microbatch)
        yield Action(Kind.FORWARD, microbatch)
        if not is_last:
            yield Action(Kind.SEND_FORWARD_RECEIVE_BACKWARD, microbatch, oldest)
        yield Action(backward, oldest)
        if sends_backward and microbatch == total - 1:
            yield Action(Kind.SEND_BACKWARD, oldest)
        elif sends_backward:
            yield Action(Kind.SEND_BACKWARD_RECEIVE_FORWARD, oldest, microbatch + 1)

    for microbatch in range(total - num_warm_up, total):
        yield Action(Kind.RECEIVE_BACKWARD, microbatch)
        yield Action(backward, microbatch)
        if sends_backward:
            yield Action(Kind.SEND_BACKWARD, microbatch)


def _receive(shape: PlanShape, stage: int, microbatch: int) -> Iterator[Action]:
    """The input of a microbatch; after the iteration's last one, the first trainable stage begins to receive the next
    one's."""
    if stage == 0:
        return
    is_after_prefix = shape.is_one_way(stage - 1)
    if not is_after_prefix or microbatch >= shape.done_ahead:
        yield Action(Kind.RECEIVE_FORWARD, microbatch)
    if is_after_prefix and microbatch == shape.num_microbatches - 1:
        for ahead in range(shape.num_microbatches, shape.num_microbatches + shape.run_ahead):
            yield Action(Kind.RECEIVE_AHEAD, ahead)
