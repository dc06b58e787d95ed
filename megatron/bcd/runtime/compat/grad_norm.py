"""A workaround for Megatron Core 0.16.1: its gradient norm without Transformer Engine and Apex."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def patch_grad_norm() -> None:
    """Compute the norm on the device. Permanent; once per process.

    Megatron Core's own form makes a tensor of one norm per gradient, as numbers of the host: the CPU waits for the
    device once per gradient.
    """
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm


def l2_norm(_chunk_size: int, _noop_flag: Any, tensor_lists: Any, *_: Any) -> tuple[torch.Tensor, None]:
    """As `local_multi_tensor_l2_norm`, bit for bit: the norm of all tensors' elements, fp32, of shape [1]."""
    [tensors] = tensor_lists
    return torch.nn.utils.get_total_norm(tensors).float().view(1), None
