"""Attention of packed texts by masks or by PyTorch's variable-length attention; in plain operators without a GPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from megatron.bcd.config import RunConfig
from megatron.bcd.model import attention
from megatron.bcd.runtime import device


def plain_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Return `torch.nn.attention.varlen.varlen_attn` of texts that attend to themselves, [T, N, D]."""
    assert cu_seq_k is not None and cu_seq_q.dtype == torch.int32 and torch.equal(cu_seq_q, cu_seq_k)
    lengths = cu_seq_q.diff()
    assert cu_seq_q[0] == 0 and cu_seq_q[-1] == len(query) and lengths.min() > 0
    assert type(max_q) is int and max_q == max_k == lengths.max(), "the kernel omits what is longer"
    assert window_size == (-1, 0) and enable_gqa == (query.size(1) != key.size(1))
    assert all(each.stride(-1) == 1 for each in (query, key, value))
    texts = []
    for start, end in itertools.pairwise(cu_seq_q.tolist()):
        heads_first = (each[start:end].transpose(0, 1) for each in (query, key, value))
        text = torch.nn.functional.scaled_dot_product_attention(
            *heads_first, is_causal=True, scale=scale, enable_gqa=enable_gqa
        )
        texts.append(text.transpose(0, 1))
    return torch.cat(texts)


@contextlib.contextmanager
def attention_of_texts(*, by_text: bool) -> Iterator[mock.Mock]:
    """Let runs with --reset-attention-mask keep texts apart without masks, or with them. Yields the calls.

    Without a GPU they do so in fp32.
    """
    with contextlib.ExitStack() as patches:
        has_it = mock.patch.object(device, "has_variable_length_attention", return_value=by_text)
        patches.enter_context(has_it)
        if not device.has_cuda():
            can = property(lambda config: config.data.reset_attention_mask)
            patches.enter_context(mock.patch.object(RunConfig, "can_attend_by_text", can))
        function = varlen_attn if device.has_cuda() else plain_varlen_attn
        yield patches.enter_context(mock.patch.object(attention, "varlen_attn", side_effect=function))
