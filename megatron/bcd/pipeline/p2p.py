"""Messages between neighbouring stages: Megatron Core's communicator with a counter, and a one-way link."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron.bcd.pipeline.build import MAX_SENDS_IN_FLIGHT


class CountingCommunicator(P2PCommunicator):
    """Megatron Core's communicator; counts the gradients that this rank sends and receives."""

    backward_messages = 0

    def _communicate(
        self, *, tensor_send_prev: torch.Tensor | None, recv_next: bool, **others: Any
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        self.backward_messages += (tensor_send_prev is not None) + bool(recv_next)
        return super()._communicate(tensor_send_prev=tensor_send_prev, recv_next=recv_next, **others)


class OneWayLink:
    """Forward messages between stages of the prefix, which send no gradients back.

    A sender does not wait for the receiver until MAX_SENDS_IN_FLIGHT messages are under way; a receiver starts to
    receive the next message while it computes on the present one.
    """

    def __init__(self, communicator: P2PCommunicator) -> None:
        config = copy.copy(communicator.config)
        config.batch_p2p_comm = False  # a rank's batched messages wait for each other, whatever their target
        self._communicator = P2PCommunicator(communicator.pp_group, config)
        self._sent: deque[tuple[torch.Tensor, Any]] = deque()
        self._coming: deque[tuple[torch.Tensor, Any]] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        """Start to send; the tensor is kept alive until the receiver has it."""
        while len(self._sent) >= MAX_SENDS_IN_FLIGHT:
            self._finish_oldest_send()
        self._sent.append((tensor, self._begin(tensor, None)[1]))

    def begin_receive(self, shape: tuple[int, ...]) -> None:
        self._coming.append(self._begin(None, shape))

    def receive(self, shape: tuple[int, ...], *, more_follow: bool) -> torch.Tensor:
        """The oldest message that was not returned yet, without a gradient; starts to receive the one after it."""
        if not self._coming:
            self.begin_receive(shape)
        tensor, requests = self._coming.popleft()
        _wait(requests)
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
        received, _, requests = self._communicator._communicate(
            tensor_send_next=tensor,
            tensor_send_prev=None,
            recv_prev=shape is not None,
            recv_next=False,
            tensor_shape=shape,
            wait_on_reqs=False,
        )
        return received, requests


def _wait(requests: dict[str, Any]) -> None:
    for request in requests.values():
        request.wait()
