"""The layers of one pipeline stage, which can start after a frozen prefix.

Tensor shapes: S sequence length, B micro-batch size, H hidden size.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.bcd.model.transformer_config import PHASE_FIELDS
from megatron.bcd.runtime.compat.megatron_core import recompute


def _pass_through(*, hidden_states: Tensor, context: Any = None, **others: Any) -> tuple[Tensor, Any]:
    return hidden_states, context


class BcdTransformerBlock(TransformerBlock):
    """Megatron Core's layers of one stage. They can start after a frozen prefix.

    With full activation recomputation, Megatron Core checkpoints by a re-entrant autograd function. If none of its
    inputs requires a gradient, its output has no graph, and active layers inside it get no gradient. Therefore the
    prefix runs without a graph and without recomputation, and the input of the first active layer starts the graph.

    With a prefix cache, `forward` starts at a later layer. With a `chunk`, it runs only these layers.
    """

    chunk: range | None = None
    """The layers to run, by their numbers on this stage."""

    def recompute(self, granularity: str, num_layers: int) -> None:
        """Set what backward passes recompute, overriding the flags.

        Args:
            granularity: "none"; "selective", the core of attention in every layer; or "full".
            num_layers: with "full", the number of layers to recompute after the prefix.
        """
        config: TransformerConfig = copy.copy(self.config)  # type: ignore[has-type]
        for name in PHASE_FIELDS:  # the copy would keep the first phase's wrapper, and its hooks
            setattr(config, name, None)
        is_full = granularity == "full" and num_layers > 0
        config.recompute_granularity = "full" if is_full else None
        config.recompute_method = "block" if is_full else None
        config.recompute_num_layers = num_layers if is_full else None
        self.config = config  # only of the layers' container: other modules keep their configuration
        layers: torch.nn.ModuleList = self.layers  # type: ignore[has-type]
        for layer in layers:
            layer.self_attention.checkpoint_core_attention = granularity == "selective"

    def forward(self, hidden_states: Tensor, *args: Any, behind_prefix: bool = False, **kwargs: Any) -> Tensor:
        """Run the layers like Megatron Core.

        With `behind_prefix` start with the first active layer, on any stage: `hidden_states` [S, B, H] is its input. If
        only the head is active, run no layer.
        """
        layers: torch.nn.ModuleList = self.layers  # type: ignore[has-type]
        final_norm, received, chunk = self.final_layernorm, self.input_tensor, self.chunk  # type: ignore[has-type]
        if behind_prefix:
            chunk = range(next(iter(self._trainable_layers()), len(layers)), len(layers))
            self.input_tensor, received = hidden_states, None  # stages after the first read their input here
        elif chunk is None:
            return super().forward(hidden_states, *args, **kwargs)
        elif chunk.start > 0:
            hidden_states = received
        self.layers = torch.nn.ModuleList(layers[number] for number in chunk)
        self.final_layernorm = final_norm if chunk.stop == len(layers) else None
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            self.layers, self.final_layernorm, self.input_tensor = layers, final_norm, received

    def _trainable_layers(self) -> list[int]:
        """Return the numbers, on this stage, of the layers with an active parameter."""
        return [i for i, layer in enumerate(self.layers) if any(p.requires_grad for p in layer.parameters())]

    def _checkpointed_forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        context: Tensor,
        context_mask: Tensor,  # type: ignore[override]
        rotary_pos_emb: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        trainable = self._trainable_layers()
        start = 0 if hidden_states.requires_grad else (trainable[0] if trainable else len(self.layers))
        shared = {"attention_mask": attention_mask, "context_mask": context_mask, "rotary_pos_emb": rotary_pos_emb}
        texts = kwargs.get("packed_seq_params")
        with torch.no_grad():
            for layer in self.layers[:start]:
                hidden_states, context = layer(
                    hidden_states=hidden_states, context=context, packed_seq_params=texts, **shared
                )
        if start == len(self.layers):
            return hidden_states
        if not hidden_states.requires_grad:
            hidden_states = hidden_states.detach().requires_grad_()
        layers = list(self.layers[start:])
        if self.config.recompute_method == "uniform":  # fill the last group
            layers += [_pass_through] * (-len(layers) % (self.config.recompute_num_layers or 1))
        return recompute(self, layers, hidden_states=hidden_states, context=context, **shared, **kwargs)
