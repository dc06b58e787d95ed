"""Attention of packed texts by masks or by PyTorch's variable-length attention; without a GPU, text by text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.bcd.config import RunConfig
from megatron.bcd.model import attention, texts
from megatron.bcd.runtime import device

_attend_by_text = texts.attend_by_text


def _checked(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, **others: Any) -> Tensor:
    """Return `attend_by_text` of tensors that the kernel takes: it checks little, and omits what is longer."""
    lengths = bounds.diff()
    assert bounds.dtype == torch.int32 and bounds[0] == 0 and bounds[-1] == len(query) and lengths.min() > 0
    assert type(longest) is int and longest == lengths.max()
    assert all(each.stride(-1) == 1 for each in (query, key, value))
    return _attend_by_text(query, key, value, bounds, longest, **others)


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
        calls = mock.Mock(side_effect=_checked)
        for module in (attention, texts):
            patches.enter_context(mock.patch.object(module, "attend_by_text", calls))
        yield calls
