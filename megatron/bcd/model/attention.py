"""Core attention on PyTorch's scaled_dot_product_attention, also for context parallelism.

With R context-parallel ranks, Megatron Core cuts each sequence into 2 R chunks. Rank r gets r and 2 R - 1 - r, so
causal attention costs every rank the same. Queries stay on their rank; keys and values are gathered.

Tensor shapes: S sequence length, C length of a chunk, L = 2 C (this rank's part), B micro-batch size, N attention heads
and G query groups on this tensor-parallel rank, D head size.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron.bcd.model.texts import attend_by_text
from megatron.bcd.runtime import device


class ScaledDotProductAttention(MegatronModule):
    """Core attention of the local layers on `torch.nn.functional.scaled_dot_product_attention`.

    Megatron Core's local DotProductAttention materialises the S x S scores of every head; this class uses PyTorch's
    flash kernels on CPU and GPU. It is causal if no mask is given. The signatures are Megatron Core's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale
        group = None if pg_collection is None else pg_collection.cp
        self._context_group = group if group is not None and group.size() > 1 else None
        """None without context parallelism."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Compute attention on this context-parallel rank's part of the sequences.

        Args:
            query: [S, B, N, D].
            key: [S, B, G, D], like `value`.
            attention_mask: [B or 1, 1, S, S], True where masked. Its last dimension covers whole sequences.
            packed_seq_params: bounds of texts (`data.attention_inputs`), which attend to themselves, without a mask.

        Returns:
            The context, [S, B, N * D].
        """
        assert attention_bias is None, "no flag sets it"
        if packed_seq_params is not None:
            return self._attend_by_text(query, key, value, packed_seq_params)
        is_causal = (attn_mask_type or self.attn_mask_type) == AttnMaskType.causal
        if self._context_group is not None:
            pair = torch.cat((key, value), dim=-1)
            key, value = whole_sequence(pair, self._context_group).split((key.size(-1), value.size(-1)), dim=-1)
        dropout = self.dropout if self.training else 0.0
        # tensor-parallel ranks have different heads, so their dropout masks must differ
        forks = dropout and not self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if forks else contextlib.nullcontext():
            if attention_mask is not None:
                return self._attend(query, key, value, attn_mask=~attention_mask, dropout_p=dropout)
            if is_causal and self._context_group is not None:
                return self._attend_by_chunk(query, key, value, self._context_group, dropout_p=dropout)
            return self._attend(query, key, value, is_causal=is_causal, dropout_p=dropout)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        """Call PyTorch's attention with these arguments. Shapes are those of `forward`."""
        heads_per_group = query.size(2) // key.size(2)
        # `_attend_by_chunk` passes masks of a subclass of Tensor, for which there is a fast kernel
        has_only_slow_kernel = query.dtype == torch.float32 or type(arguments.get("attn_mask")) is Tensor
        if heads_per_group > 1 and has_only_slow_kernel and device.has_cuda():
            # on a GPU, only PyTorch's kernel that keeps the S x S scores supports grouped queries here
            key, value = (x.repeat_interleave(heads_per_group, dim=2) for x in (key, value))
        query_bnsd, key_bgsd, value_bgsd = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context = torch.nn.functional.scaled_dot_product_attention(
            query_bnsd,
            key_bgsd,
            value_bgsd,
            scale=self.softmax_scale,
            enable_gqa=key.size(2) != query.size(2),
            **arguments,
        )
        return context.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)

    def _attend_by_text(self, query: Tensor, key: Tensor, value: Tensor, texts: PackedSeqParams) -> Tensor:
        """Compute causal attention inside each text. Shapes are those of `forward`."""
        length, number, *_ = query.shape
        query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        bounds, longest = texts.cu_seqlens_q, texts.max_seqlen_q
        context = attend_by_text(query, key, value, bounds, longest, scale=self.softmax_scale)
        return context.reshape(number, length, -1).transpose(0, 1).contiguous()

    def _attend_by_chunk(
        self, query: Tensor, key: Tensor, value: Tensor, group: torch.distributed.ProcessGroup, **arguments: Any
    ) -> Tensor:
        """Compute causal attention of this rank's chunks of queries to whole sequences of keys and values.

        Each chunk attends to the keys up to its own end; its mask is aligned to the lower right corner.
        """
        contexts = []
        for chunk, number in zip(query.chunk(2), (group.rank(), 2 * group.size() - 1 - group.rank()), strict=True):
            end = (number + 1) * len(chunk)
            mask = causal_lower_right(len(chunk), end)
            contexts.append(self._attend(chunk, key[:end], value[:end], attn_mask=mask, **arguments))
        return torch.cat(contexts)


def whole_sequence(part_LB: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Gather a sequence split over context-parallel ranks: [L, B, ...] to [S, B, ...].

    Collective, also in the backward pass, which sums the gradients of each part.
    """
    if group.size() == 1:
        return part_LB
    gathered = tensor_parallel.gather_from_sequence_parallel_region(part_LB, group=group)
    by_rank = gathered.unflatten(0, (group.size(), 2, -1))
    return torch.cat((by_rank[:, 0].flatten(0, 1), by_rank[:, 1].flip(0).flatten(0, 1)))
