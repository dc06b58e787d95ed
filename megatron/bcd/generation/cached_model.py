"""A whole model with a key-value cache: Megatron Core's static inference context.

Letters: B sequences, S tokens, V rows of the vocabulary.
"""

from __future__ import annotations

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from torch import Tensor


class CachedModel:
    """Continues sequences of one length: every call appends tokens to what the calls before were given.

    Keys and values of the earlier tokens are kept, so a call costs a forward pass of its own tokens only.
    """

    def __init__(self, model: torch.nn.Module, *, batch_size: int, max_length: int) -> None:
        """`model` is the whole model, in evaluation mode; `max_length` the most tokens of a sequence."""
        assert not model.training, "Megatron Core caches in evaluation mode only"
        self._model = model
        self._context = StaticInferenceContext(batch_size, max_length)
        inner: torch.nn.Module = model
        while hasattr(inner, "module"):
            inner = inner.module
        assert isinstance(inner, GPTModel)
        like = next(inner.decoder.parameters())
        for layer in inner.decoder.layers:
            attention = layer.self_attention
            groups = attention.num_query_groups_per_partition
            # Megatron Core would allocate them itself, but on a GPU only
            self._context.key_value_memory_dict[attention.layer_number] = tuple(
                torch.empty(max_length, batch_size, groups, width, dtype=like.dtype, device=like.device)
                for width in (attention.key_hidden_size, attention.val_hidden_size)
            )

    @property
    def length(self) -> int:
        """Tokens of a sequence until now."""
        return int(self._context.sequence_len_offset)

    @torch.no_grad()
    def append(self, tokens: Tensor) -> Tensor:
        """Logits after the last of `tokens` [B, S], float32 [B, V].

        After the first call S is 1: Megatron Core masks the first tokens only.
        """
        context, count = self._context, tokens.size(1)
        assert not self.length or count == 1, "tokens after the first ones come one by one"
        assert self.length + count <= context.max_sequence_length, "the caller keeps to max_length"
        positions = torch.arange(self.length, self.length + count, device=tokens.device).expand_as(tokens)
        if self.length:
            context.enable_decode_mode()
        logits: Tensor = self._model(tokens, positions, None, inference_context=context, runtime_gather_output=True)
        context.increment_sequence_len_offset(count)
        return logits[:, -1].float()


@torch.no_grad()
def whole_logits(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Logits after every one of `tokens` [B, S], [B, S, V], without a cache."""
    positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    logits: Tensor = model(tokens, positions, None, runtime_gather_output=True)
    return logits
