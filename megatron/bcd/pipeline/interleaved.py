"""Interleaved plans: every stage holds several chunks of the model (docs/pipeline.md).

Messages are sent without waiting and received before they are needed. Their order is the same at both ends, and is that
of one timeline of all stages: where every message waited for its other end, nothing would hang.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache

from megatron.bcd.pipeline.actions import Action, Kind
from megatron.bcd.pipeline.chunk_order import Policy, Timeline, arrange, follow, length
from megatron.bcd.pipeline.chunk_shape import BACKWARD, ChunkShape, max_graphs, stock_order

MAX_MESSAGES_IN_FLIGHT = 4
"""Messages of a stage whose receivers may not have them yet; one more waits for the oldest."""

_POLICIES = (
    Policy(),
    Policy(keeps_least=True),
    Policy(forward_delay=0.5),
    Policy(forward_delay=0.5, lead=1),
    Policy(forward_delay=1.0, lead=1),
)
_CHOSEN_ON = 3
"""Microbatches per stage on which policies are compared."""


@dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """One iteration of the whole interleaved pipeline."""

    shape: ChunkShape
    stages: tuple[tuple[Action, ...], ...]
    """By stage, in order."""


@cache
def build_chunk_plan(shape: ChunkShape) -> ChunkPlan:
    """The plan of every stage.

    With all virtual stages active, and in an evaluation, the order is Megatron Core's. Else passes may come earlier
    than there, which the missing backward passes allow: of several orders the one that ends first.
    """
    policy = _best_policy(shape)
    return ChunkPlan(shape=shape, stages=_with_messages(shape, _timeline(shape, policy)))


def _best_policy(shape: ChunkShape) -> Policy | None:
    """None is Megatron Core's order."""
    if shape.is_stock or shape.first_trainable == shape.num_virtual:
        return None
    few = replace(shape, num_microbatches=min(shape.num_microbatches, _CHOSEN_ON * shape.num_stages))
    policies = (None, *_POLICIES)
    lengths = [length(_timeline(few, policy)) for policy in policies]
    return policies[lengths.index(min(lengths))]


def _timeline(shape: ChunkShape, policy: Policy | None) -> Timeline:
    orders = [stock_order(shape, stage) for stage in range(shape.num_stages)]
    if policy is None:
        return follow(shape, orders)
    if policy.keeps_least:
        bounds = [max_graphs(order) for order in orders]
    else:
        bounds = [shape.max_graphs(stage) for stage in range(shape.num_stages)]
    return arrange(shape, policy, bounds)


def _with_messages(shape: ChunkShape, timeline: Timeline) -> tuple[tuple[Action, ...], ...]:
    """Every stage's passes, and between them its messages.

    A message stands where it could be sent, on the timeline of all stages: after the passes that began before, at both
    ends. So all stages follow one order of passes and messages.
    """
    events: defaultdict[int, list[tuple[float, int, int, Action]]] = defaultdict(list)
    for stage, passes in enumerate(timeline):
        for done in passes:
            events[stage].append((done.start, shape.num_virtual, done.action.microbatch, done.action))
            virtual = shape.virtual_stage(stage, done.action.chunk)
            is_backward = done.action.kind in BACKWARD
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
