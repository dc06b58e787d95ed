"""Which messages an action sends and receives."""

from __future__ import annotations

from typing import NamedTuple

from megatron.bcd.pipeline_plan.plan import Action, Kind

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
    """The stage that sends."""
    target: int
    """The stage that receives."""
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
