"""Point-to-point messages between neighbouring pipeline stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megatron.bcd.runtime import device


class _Sent(NamedTuple):
    """A message that may not have arrived yet. The tensor must stay alive until it has."""

    tensor: torch.Tensor
    work: Any
    when_sent: Callable[[torch.Tensor], None] | None


class Messages:
    """Messages to and from the neighbours in a ring of stages. With several chunks the last stage precedes the first.

    A send does not block, unless `max_sends` are in flight. A receive blocks when its tensor is used. Both ends start
    the messages between them in the same order, so that each receive matches its send.

    On a GPU these waits block the stream, not the CPU. With `throttles_cpu` the CPU also waits, so that it is at most
    `max_sends` sends and receives ahead of the GPU. Otherwise it would allocate the buffers of all later messages.
    """

    def __init__(
        self, group: torch.distributed.ProcessGroup, *, dtype: torch.dtype, max_sends: int, throttles_cpu: bool = False
    ) -> None:
        self._group, self._dtype, self._max_sends = group, dtype, max_sends
        places = ((group.rank() + offset) % group.size() for offset in (1, -1))
        self._next, self._previous = (torch.distributed.get_global_rank(group, place) for place in places)
        self._sent: deque[_Sent] = deque()
        self._coming: dict[int, Any] = {}
        """Pending receives by the id of the tensor, which the caller keeps alive."""
        self._send_throttle, self._receive_throttle = (
            device.Throttle(max_sends) if throttles_cpu else None for _ in range(2)
        )

    def send(
        self,
        tensor: torch.Tensor,
        *,
        is_backward: bool = False,
        when_sent: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Send an output to the next stage, or with `is_backward` an input gradient or the loss to the previous one.

        Call `when_sent` with the tensor as soon as it has arrived.
        """
        while len(self._sent) >= self._max_sends:
            self._finish_oldest()
        if self._send_throttle is not None:
            self._send_throttle.mark()
        target = self._previous if is_backward else self._next
        self._sent.append(_Sent(tensor, torch.distributed.isend(tensor, target, self._group), when_sent))

    def receive(
        self,
        shape: tuple[int, ...],
        *,
        is_backward: bool = False,
        needs_gradient: bool = False,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Start to receive what `send` sends on the neighbour. Call `wait_for` before reading its values."""
        tensor = torch.empty(shape, dtype=dtype or self._dtype, device=device.current(), requires_grad=needs_gradient)
        source = self._next if is_backward else self._previous
        self._coming[id(tensor)] = torch.distributed.irecv(tensor, source, self._group)
        return tensor

    def wait_for(self, tensor: torch.Tensor) -> None:
        """Wait for the values of a received tensor, unless this has been done. Other tensors need no waiting."""
        work = self._coming.pop(id(tensor), None)
        if work is None:
            return
        work.wait()
        if self._receive_throttle is not None:
            self._receive_throttle.mark()

    def finish_sends(self, until: torch.Tensor | None = None) -> None:
        """Wait until all sent tensors have arrived, or this tensor and all that were sent before it."""
        while any(until is None or sent.tensor is until for sent in self._sent):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        sent = self._sent.popleft()
        sent.work.wait()
        if sent.when_sent is not None:
            sent.when_sent(sent.tensor)
