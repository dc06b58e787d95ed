"""Megatron Core's messages between neighbouring pipeline stages, counted, and one at a time."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator


class CountingCommunicator(P2PCommunicator):
    """Megatron Core's communicator; counts the gradients that this rank sends and receives."""

    backward_messages = 0

    def _communicate(
        self, *, tensor_send_prev: torch.Tensor | None, recv_next: bool, **others: Any
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        self.backward_messages += (tensor_send_prev is not None) + bool(recv_next)
        return super()._communicate(tensor_send_prev=tensor_send_prev, recv_next=recv_next, **others)


def unbatched(communicator: P2PCommunicator, *, group: torch.distributed.ProcessGroup | None = None) -> P2PCommunicator:
    """A communicator whose messages are not batched: a rank's batched messages wait for each other, whatever their
    target. `group`: of the same ranks as the communicator's, which is the default."""
    config = copy.copy(communicator.config)
    config.batch_p2p_comm = False
    return P2PCommunicator(group or communicator.pp_group, config)


def options_of_few_blocks(num_blocks: int) -> Any:
    """Options of an NCCL group whose kernels have at most so many thread blocks."""
    return parallel_state.get_nccl_options("few", {"few": {"min_ctas": 1, "max_ctas": num_blocks}})


def begin_forward_message(
    communicator: P2PCommunicator, tensor: torch.Tensor | None, shape: tuple[int, ...] | None
) -> tuple[torch.Tensor, Any]:
    """Start to send `tensor` to the next stage, if there is one, and to receive `shape` from the previous one, if
    there is one: what comes, and the requests to wait for, by name."""
    received, _, requests = communicator._communicate(
        tensor_send_next=tensor,
        tensor_send_prev=None,
        recv_prev=shape is not None,
        recv_next=False,
        tensor_shape=shape,
        wait_on_reqs=False,
    )
    return received, requests
