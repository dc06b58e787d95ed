"""How long messages of an interleaved plan travel, from the traces of all ranks. Pure.

No action of such a plan is a message's own time: a send does not wait, and a receive is awaited by the pass that needs
it. So both ends say when they began, and the receiver when its pass had the message. Times in seconds of a clock that
all ranks share: the ranks of tools/benchmark.py --schedule are processes of one machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.bcd.pipeline.actions import Message, messages_of
from megatron.bcd.pipeline.chunk_shape import ChunkShape
from megatron.bcd.pipeline.iteration import TimedAction
from megatron.bcd.pipeline.simulate_interleaved import needed_message


@dataclass(frozen=True, kw_only=True)
class MessageEnd:
    """One end of a message in one iteration."""

    message: Message
    begun: float
    """When the end began to send or to receive."""
    free: float | None = None
    """Receiver only: when it had nothing to do but to wait for the message."""
    used: float | None = None
    """Receiver only: when the pass had it."""


def message_ends(trace: Sequence[TimedAction], shape: ChunkShape, stage: int) -> tuple[MessageEnd, ...]:
    """The ends on a stage of all messages of one iteration, as traced."""
    begun: dict[Message, float] = {}
    ends = []
    for before, timed in zip((None, *trace), trace, strict=False):
        virtual = shape.virtual_stage(stage, timed.action.chunk)
        for message in messages_of(virtual, timed.action):
            begun[message] = timed.start
            if message.source == virtual:
                ends.append(MessageEnd(message=message, begun=timed.start))
        needed = needed_message(shape, virtual, timed.action) if timed.action.kind.computes else None
        if needed is not None and before is not None:
            ends.append(MessageEnd(message=needed, begun=begun[needed], free=before.end, used=timed.start))
    return tuple(ends)


def awaited_message_ms(ends: Sequence[MessageEnd]) -> float:
    """Milliseconds that a message travels for which a pass waits; `ends` are those of one iteration on all stages.

    The median over the messages that a pass waited for during at least half of their way; 0 if there are none.
    """
    sent = {end.message: end.begun for end in ends if end.used is None}
    times = []
    for end in ends:
        if end.used is None or end.free is None:
            continue
        begin = max(end.begun, sent[end.message])
        if end.used - max(end.free, begin) >= (end.used - begin) / 2:
            times.append((end.used - begin) * 1e3)
    return statistics.median(times) if times else 0.0
