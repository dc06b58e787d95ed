"""What one pipeline stage does in an iteration, action by action, and the messages between stages. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class Kind(enum.StrEnum):
    """What an action is. A message names the microbatch that it belongs to."""

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
    SEND_FORWARD_RECEIVE_BACKWARD = "send forward, receive backward"
    """Both at once: in sequence, two neighbours that both send first would deadlock."""
    SEND_BACKWARD_RECEIVE_FORWARD = "send backward, receive forward"
    RECEIVE_AHEAD = "receive ahead"
    """The first trainable stage's receive of a microbatch of the next iteration: started now, awaited when that
    iteration uses it."""

    @property
    def computes(self) -> bool:
        return self in _COMPUTE


_COMPUTE = frozenset((Kind.FORWARD, Kind.FORWARD_ONLY, Kind.BACKWARD, Kind.BACKWARD_INPUT))


@dataclass(frozen=True)
class Action:
    """One step of a stage: a computation or a message."""

    kind: Kind
    microbatch: int
    """Of a two-way message: the one that is sent."""
    received: int | None = None
    """The microbatch that a two-way message receives."""
    chunk: int = 0
    """In an interleaved plan: which chunk of the stage computes, sends or receives."""


_SENT_TO = {
    Kind.SEND_FORWARD: 1,
    Kind.SEND_FORWARD_RECEIVE_BACKWARD: 1,
    Kind.SEND_BACKWARD: -1,
    Kind.SEND_BACKWARD_RECEIVE_FORWARD: -1,
}


_RECEIVED_FROM = {
    Kind.RECEIVE_FORWARD: -1,
    Kind.RECEIVE_AHEAD: -1,
    Kind.SEND_BACKWARD_RECEIVE_FORWARD: -1,
    Kind.RECEIVE_BACKWARD: 1,
    Kind.SEND_FORWARD_RECEIVE_BACKWARD: 1,
}


TWO_WAY = frozenset(_SENT_TO.keys() & _RECEIVED_FROM.keys())
"""Kinds that send and receive; each half completes by itself, the action when both have."""


class Message(NamedTuple):
    """An output (to the next stage) or an input gradient (to the one before) of one microbatch."""

    source: int
    """The stage that sends; in an interleaved plan the virtual stage."""
    target: int
    """The stage that receives; in an interleaved plan the virtual stage."""
    microbatch: int

    @property
    def is_backward(self) -> bool:
        return self.target < self.source


def sent(stage: int, action: Action) -> Message | None:
    """What `stage` sends in the action."""
    offset = _SENT_TO.get(action.kind)
    return None if offset is None else Message(stage, stage + offset, action.microbatch)


def received(stage: int, action: Action) -> Message | None:
    """What `stage` receives in the action; a two-way action must name its `received`."""
    offset = _RECEIVED_FROM.get(action.kind)
    if offset is None:
        return None
    microbatch = action.received if action.kind in TWO_WAY else action.microbatch
    assert microbatch is not None
    return Message(stage + offset, stage, microbatch)


def messages_of(stage: int, action: Action) -> tuple[Message, ...]:
    """All of the action's messages, the sent one first."""
    return tuple(message for message in (sent(stage, action), received(stage, action)) if message is not None)
