"""Messages between neighbouring stages: a one-way link, and messages between chunks, whose last stage is followed by
the first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron.bcd.pipeline.build import MAX_SENDS_IN_FLIGHT
from megatron.bcd.pipeline.interleaved import MAX_MESSAGES_IN_FLIGHT
from megatron.bcd.runtime import device
from megatron.bcd.runtime.compat import p2p


class OneWayLink:
    """Forward messages between stages of the prefix, which send no gradients back.

    A sender does not wait for the receiver until MAX_SENDS_IN_FLIGHT messages are under way; a receiver starts to
    receive the next message while it computes on the present one. On a GPU these waits block the stream, not the CPU,
    which is held back by itself: it runs at most MAX_SENDS_IN_FLIGHT messages of either kind ahead of the GPU.
    """

    def __init__(self, communicator: P2PCommunicator, *, group: torch.distributed.ProcessGroup | None = None) -> None:
        """`group`: of the same ranks as the communicator's, which is the default."""
        self._communicator = p2p.unbatched(communicator, group=group)
        self._sent: deque[tuple[torch.Tensor, Any]] = deque()
        self._coming: deque[tuple[torch.Tensor, Any]] = deque()
        self._pace_of_sends = device.Pace(MAX_SENDS_IN_FLIGHT)
        self._pace_of_receives = device.Pace(MAX_SENDS_IN_FLIGHT)

    def send(self, tensor: torch.Tensor) -> None:
        """Start to send; the tensor is kept alive until the receiver has it."""
        while len(self._sent) >= MAX_SENDS_IN_FLIGHT:
            self._finish_oldest_send()
        self._pace_of_sends.mark()
        self._sent.append((tensor, self._begin(tensor, None)[1]))

    def begin_receive(self, shape: tuple[int, ...]) -> None:
        self._coming.append(self._begin(None, shape))

    def receive(self, shape: tuple[int, ...], *, more_follow: bool) -> torch.Tensor:
        """The oldest message that was not returned yet, without a gradient; starts to receive the one after it."""
        if not self._coming:
            self.begin_receive(shape)
        tensor, requests = self._coming.popleft()
        _wait(requests)
        self._pace_of_receives.mark()
        if more_follow and not self._coming:
            self.begin_receive(shape)
        return tensor.requires_grad_(False)

    def finish_sends(self) -> None:
        while self._sent:
            self._finish_oldest_send()

    def _finish_oldest_send(self) -> None:
        _wait(self._sent[0][1])
        self._sent.popleft()

    def _begin(self, tensor: torch.Tensor | None, shape: tuple[int, ...] | None) -> tuple[torch.Tensor, Any]:
        return p2p.begin_forward_message(self._communicator, tensor, shape)


class _Sent(NamedTuple):
    """A message that the receiver may not have yet; the tensor is kept until then."""

    tensor: torch.Tensor
    work: Any
    when_sent: Callable[[torch.Tensor], None] | None


class ChunkMessages:
    """Messages of an interleaved plan, where the stages form a ring.

    A send does not wait, unless MAX_MESSAGES_IN_FLIGHT are under way; a receive is awaited when its tensor is used.
    Both ends start the messages between them in one order, so that each receives what was meant.
    """

    def __init__(self, group: torch.distributed.ProcessGroup, *, dtype: torch.dtype) -> None:
        self.backward_messages = 0
        """Gradients sent and received."""
        self._group, self._dtype = group, dtype
        places = ((group.rank() + offset) % group.size() for offset in (1, -1))
        self._next, self._previous = (torch.distributed.get_global_rank(group, place) for place in places)
        self._sent: deque[_Sent] = deque()
        self._coming: dict[int, Any] = {}
        """By the id of the tensor, which the caller keeps."""

    def send_forward(self, output: torch.Tensor, *, when_sent: Callable[[torch.Tensor], None] | None = None) -> None:
        """To the next stage. `when_sent` is called with the tensor when the receiver has it."""
        self._send(output, self._next, when_sent)

    def send_backward(self, gradient: torch.Tensor) -> None:
        """To the previous stage."""
        self.backward_messages += 1
        self._send(gradient, self._previous, None)

    def receive_forward(self, shape: tuple[int, ...], *, needs_gradient: bool) -> torch.Tensor:
        """From the previous stage; the values are there after `wait_for`."""
        return self._receive(shape, self._previous, needs_gradient=needs_gradient)

    def receive_backward(self, shape: tuple[int, ...]) -> torch.Tensor:
        """From the next stage; the values are there after `wait_for`."""
        self.backward_messages += 1
        return self._receive(shape, self._next, needs_gradient=False)

    def wait_for(self, tensor: torch.Tensor) -> None:
        """Until a tensor of a receive has its values."""
        self._coming.pop(id(tensor)).wait()

    def finish_send(self, tensor: torch.Tensor) -> None:
        """Until the receiver has the tensor, and those that were sent before it."""
        while any(sent.tensor is tensor for sent in self._sent):
            self._finish_oldest()

    def finish_sends(self) -> None:
        while self._sent:
            self._finish_oldest()

    def _send(self, tensor: torch.Tensor, target: int, when_sent: Callable[[torch.Tensor], None] | None) -> None:
        while len(self._sent) >= MAX_MESSAGES_IN_FLIGHT:
            self._finish_oldest()
        self._sent.append(_Sent(tensor, torch.distributed.isend(tensor, target, self._group), when_sent))

    def _finish_oldest(self) -> None:
        sent = self._sent.popleft()
        sent.work.wait()
        if sent.when_sent is not None:
            sent.when_sent(sent.tensor)

    def _receive(self, shape: tuple[int, ...], source: int, *, needs_gradient: bool) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=device.current(), requires_grad=needs_gradient)
        self._coming[id(tensor)] = torch.distributed.irecv(tensor, source, self._group)
        return tensor


def _wait(requests: dict[str, Any]) -> None:
    for request in requests.values():
        request.wait()
