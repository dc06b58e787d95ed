"""Megatron Core's messages between neighbouring pipeline stages, counted; NCCL's options."""

from __future__ import annotations

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


def options_of_few_blocks(num_blocks: int) -> Any:
    """Options of an NCCL group whose kernels have at most so many thread blocks."""
    return parallel_state.get_nccl_options("few", {"few": {"min_ctas": 1, "max_ctas": num_blocks}})
