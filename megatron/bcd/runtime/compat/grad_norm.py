"""A workaround for Megatron Core 0.16.1: its gradient norm and clipping without Transformer Engine and Apex."""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron.bcd.runtime.compat import foreach


@functools.cache
def patch_grad_norm() -> None:
    """Compute the norm on the device, and clip all gradients at once. Permanent; once per process.

    Megatron Core's own form makes a tensor of one norm per gradient, as numbers of the host: the CPU waits for the
    device once per gradient. Its clipping scales and copies each gradient by itself.
    """
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale_in_place


def l2_norm(_chunk_size: int, _noop_flag: Any, tensor_lists: Any, *_: Any) -> tuple[torch.Tensor, None]:
    """As `local_multi_tensor_l2_norm`, bit for bit: the norm of all tensors' elements, fp32, of shape [1]."""
    [tensors] = tensor_lists
    return torch.nn.utils.get_total_norm(tensors).float().view(1), None


def scale_in_place(_chunk_size: int, _noop_flag: Any, tensor_lists: Any, scale: float) -> None:
    """As `local_multi_tensor_scale`, bit for bit, where both lists hold the same tensors."""
    foreach.scale_each(tensor_lists[1], scale)
