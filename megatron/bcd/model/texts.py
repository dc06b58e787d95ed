"""Attention of packed texts, each to itself alone, without a mask of S x S elements.

Tensor shapes: B sequences, S their length, T = B S tokens, N query heads, G heads of keys and values, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BY_TEXT = "bcd_by_text"
"""The attention of transformers' layers in their configuration. transformers makes masks only for names that it has."""
_KNOWN = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "scaling", "sliding_window", "is_causal"}
_KNOWN |= {"dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
"""Arguments of transformers' attention that `attend` obeys, or that do not change its result."""


def attend_by_text(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, *, scale: float | None, window: int = 0
) -> Tensor:
    """Compute causal attention inside each text. A CPU, which lacks the kernel, takes one text after the other.

    Args:
        query: [T, N, D]; `key` and `value` are [T, G, D].
        bounds: int32 [number of texts + 1], where each text starts, then T.
        longest: tokens of the longest text.
        window: number of tokens to which a token attends, itself included; 0 for no limit.

    Returns:
        The context [T, N, D].
    """
    left, is_grouped = window - 1 if window else -1, key.size(1) != query.size(1)
    if query.is_cuda:
        from torch.nn.attention.varlen import varlen_attn  # imports the compiler

        lengths = (bounds, bounds, longest, longest)
        return varlen_attn(query, key, value, *lengths, scale=scale, window_size=(left, 0), enable_gqa=is_grouped)
    sizes, contexts = bounds.diff().tolist(), []
    for text in zip(*(each.transpose(0, 1).split(sizes, dim=1) for each in (query, key, value)), strict=True):
        length = text[0].size(1)
        mask = torch.ones(length, length, dtype=torch.bool).tril().triu(-left if window else -length)
        contexts.append(
            torch.nn.functional.scaled_dot_product_attention(*text, attn_mask=mask, scale=scale, enable_gqa=is_grouped)
        )
    return torch.cat(contexts, dim=1).transpose(0, 1)


def has_kernel(size: int) -> bool:
    """Return whether variable-length attention has heads of this size. Some cards lack 200 to 224 elements."""
    return size % 8 == 0 and (size <= 192 or 224 < size <= 256)


def text_arguments(bounds: Tensor, longest: int) -> dict[str, Any]:
    """Return what a model of transformers passes on to BY_TEXT, given `bounds` and `longest` of `attend_by_text`."""
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Compute transformers' attention: queries [B, N, S, D], context [B, S, N, D].

    Raises:
        KeyError: the layer was not given `text_arguments`.
        ValueError: variable-length attention has no such function, size or dropout.
    """
    number, _, length, size = query.shape
    is_causal = given.get("is_causal") is not False and getattr(module, "is_causal", True)
    is_supported = is_causal and mask is None and not given.get("dropout") and value.size(-1) == size
    unknown = {name for name, each in given.items() if each is not None} - _KNOWN
    if unknown or not is_supported or not has_kernel(size):
        raise ValueError(f"attention by text: not for {type(module).__name__}")
    bounds, longest = given["cu_seq_lens_q"], given["max_length_q"]
    query, key, value = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    window = given.get("sliding_window") or 0
    context = attend_by_text(query, key, value, bounds, longest, scale=given.get("scaling"), window=window)
    return context.unflatten(0, (number, length)), None
