"""Messages of a stage to and from its neighbours."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megatron.bcd.runtime import device


class _Sent(NamedTuple):
    """A message that the receiver may not have yet; the tensor is kept until then."""

    tensor: torch.Tensor
    work: Any
    when_sent: Callable[[torch.Tensor], None] | None


class Messages:
    """Messages with the neighbours in a ring of stages: with several chunks the last one is followed by the first.

    A send does not wait, unless `max_sends` are under way; a receive is awaited when its tensor is used. Both ends
    start the messages between them in one order, so that each receives what was meant.

    On a GPU these waits block the stream, not the CPU. With `paces` the CPU itself is held back, to `max_sends`
    messages of either kind ahead of the GPU: else it would allocate the buffers of all messages to come.
    """

    def __init__(
        self, group: torch.distributed.ProcessGroup, *, dtype: torch.dtype, max_sends: int, paces: bool = False
    ) -> None:
        self.num_backward = 0
        """Gradients sent and received."""
        self._group, self._dtype, self._max_sends = group, dtype, max_sends
        places = ((group.rank() + offset) % group.size() for offset in (1, -1))
        self._next, self._previous = (torch.distributed.get_global_rank(group, place) for place in places)
        self._sent: deque[_Sent] = deque()
        self._coming: dict[int, Any] = {}
        """By the id of the tensor, which the caller keeps."""
        self._pace_of_sends, self._pace_of_receives = (device.Pace(max_sends) if paces else None for _ in range(2))

    def send_forward(self, output: torch.Tensor, *, when_sent: Callable[[torch.Tensor], None] | None = None) -> None:
        """To the next stage. `when_sent` is called with the tensor when the receiver has it."""
        self._send(output, self._next, when_sent)

    def send_backward(self, gradient: torch.Tensor) -> None:
        """To the previous stage."""
        self.num_backward += 1
        self._send(gradient, self._previous, None)

    def receive_forward(self, shape: tuple[int, ...], *, needs_gradient: bool = False) -> torch.Tensor:
        """From the previous stage; the values are there after `wait_for`."""
        return self._receive(shape, self._previous, needs_gradient=needs_gradient)

    def receive_backward(self, shape: tuple[int, ...]) -> torch.Tensor:
        """From the next stage; the values are there after `wait_for`."""
        self.num_backward += 1
        return self._receive(shape, self._next, needs_gradient=False)

    def wait_for(self, tensor: torch.Tensor) -> None:
        """Until a tensor of a receive has its values."""
        self._coming.pop(id(tensor)).wait()
        if self._pace_of_receives is not None:
            self._pace_of_receives.mark()

    def finish_send(self, tensor: torch.Tensor) -> None:
        """Until the receiver has the tensor, and those that were sent before it."""
        while any(sent.tensor is tensor for sent in self._sent):
            self._finish_oldest()

    def finish_sends(self) -> None:
        while self._sent:
            self._finish_oldest()

    def _send(self, tensor: torch.Tensor, target: int, when_sent: Callable[[torch.Tensor], None] | None) -> None:
        while len(self._sent) >= self._max_sends:
            self._finish_oldest()
        if self._pace_of_sends is not None:
            self._pace_of_sends.mark()
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
