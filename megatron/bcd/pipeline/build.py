"""Build pipeline plans: the order of each stage's passes, with its messages between them. Pure.

From the first trainable stage on, the order is Megatron Core's (1F1B, or interleaved 1F1B with several chunks), as if
that stage were the first one. Virtual stages before it run forward without a graph and have no backward passes.

The passes are simulated, and a message is placed where it can first be sent. All stages therefore agree on one order of
passes and messages. Such a plan cannot deadlock, even if every message blocked until its other end is ready; the
executor blocks less than that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache

from megatron.bcd.pipeline.plan import Action, Kind, Plan, PlanShape
from megatron.bcd.pipeline.simulate import Span, run_orders


@lru_cache(maxsize=64)
def build_plan(shape: PlanShape) -> Plan:
    orders = pass_orders(shape)
    if shape.is_breadth_first and len(orders) == 1:
        return Plan(shape=shape, stages=orders)
    return Plan(shape=shape, stages=_insert_messages(shape, run_orders(shape, orders)))


@lru_cache(maxsize=64)
def pass_orders(shape: PlanShape) -> tuple[tuple[Action, ...], ...]:
    """Return the passes of each stage, without messages."""
    order = breadth_first_order if shape.is_breadth_first else stock_order
    return tuple(order(shape, stage) for stage in range(shape.num_stages))


def breadth_first_order(shape: PlanShape, stage: int) -> tuple[Action, ...]:
    """Return the passes of a stage if all microbatches pass through a chunk before the next one (arXiv 2211.05953).

    The last chunk of the model, which has the head, runs forward and backward in turn, so that the logits of one
    microbatch exist at a time. Others repeat their forward pass before the backward pass, unless its activations are
    kept.
    """
    order: list[Action] = []
    microbatches, last = range(shape.num_microbatches), shape.last if shape.is_training else shape.num_virtual
    by_chunk = [(chunk, shape.virtual_stage(stage, chunk)) for chunk in range(shape.num_chunks)]
    kept = {*kept_passes(shape, stage), *host_passes(shape, stage)}
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
            order.append(Action(Kind.UPDATE, 0, chunk))
    return tuple(order)


@lru_cache(maxsize=4096)
def repeated_passes(shape: PlanShape, stage: int) -> tuple[tuple[int, int], ...]:
    """Return the chunks and microbatches of breadth-first order whose passes a stage repeats unless it keeps their
    activations, the first to keep first.

    Backward passes free the last chunk's first.
    """
    return tuple(
        (chunk, microbatch)
        for chunk in reversed(range(shape.num_chunks))
        if shape.first_trainable <= shape.virtual_stage(stage, chunk) < shape.last
        for microbatch in range(shape.num_microbatches)
    )


def kept_passes(shape: PlanShape, stage: int) -> tuple[tuple[int, int], ...]:
    """Return the passes whose activations wait on the device."""
    return repeated_passes(shape, stage)[: shape.num_kept]


@lru_cache(maxsize=4096)
def host_passes(shape: PlanShape, stage: int) -> tuple[tuple[int, int], ...]:
    """Return the passes whose activations wait in host memory.

    Every chunk has as many, spread evenly over its microbatches, so that copies have the time of all of its passes: the
    reversed bits of 0, 1, 2, 3 are 0, 2, 1, 3.
    """
    bits = shape.num_microbatches.bit_length()
    others = repeated_passes(shape, stage)[shape.num_kept :]
    return tuple(sorted(others, key=lambda place: f"{place[1]:0{bits}b}"[::-1])[: shape.num_on_host])


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


def _insert_messages(shape: PlanShape, timeline: Sequence[Sequence[Span]]) -> tuple[tuple[Action, ...], ...]:
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
