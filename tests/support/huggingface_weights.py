"""Convert weights of a whole model, or their gradients, from GPTModel's names and shapes to transformers'.

Letters: N attention heads, G query groups, D head size, F inner width, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

_LLAMA = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
    "input_layernorm": "input_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc2": "mlp.down_proj",
}
_GPT2 = {
    "embedding.word_embeddings": "transformer.wte",
    "embedding.position_embeddings": "transformer.wpe",
    "decoder.final_layernorm": "transformer.ln_f",
    "output_layer": "lm_head",
    "input_layernorm": "ln_1",
    "self_attention.linear_proj": "attn.c_proj",
    "pre_mlp_layernorm": "ln_2",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}


def to_llama(tensors: Mapping[str, Tensor], *, num_heads: int, num_groups: int, is_gated: bool = True) -> Tensors:
    """Convert to the names and shapes of LlamaForCausalLM, StableLM, Arcee and Nemotron.

    Raises:
        KeyError: the model has no such parameter.
    """
    return dict(_llama_parts(tensors, num_heads, num_groups, is_gated))


def _llama_parts(
    tensors: Mapping[str, Tensor], num_heads: int, num_groups: int, is_gated: bool
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        layer, part, kind = _split_name(name)
        prefix = "" if layer is None else f"model.layers.{layer}."
        if part == "self_attention.linear_qkv":
            pieces = _query_key_value(tensor, num_heads, num_groups)
            for letter, piece in zip("qkv", pieces, strict=True):
                yield f"{prefix}self_attn.{letter}_proj.{kind}", piece
        elif part == "mlp.linear_fc1" and not is_gated:
            yield f"{prefix}mlp.up_proj.{kind}", tensor
        elif part == "mlp.linear_fc1":
            gate, up = tensor.chunk(2)
            yield f"{prefix}mlp.gate_proj.{kind}", gate
            yield f"{prefix}mlp.up_proj.{kind}", up
        else:
            yield f"{prefix}{_LLAMA[part]}.{kind}", tensor


def to_gpt2(tensors: Mapping[str, Tensor], *, num_heads: int) -> Tensors:
    """Convert to the names and shapes of GPT2LMHeadModel, whose linear layers are [inputs, outputs].

    Raises:
        KeyError: the model has no such parameter.
    """
    converted = {}
    for name, tensor in tensors.items():
        layer, part, kind = _split_name(name)
        prefix = "" if layer is None else f"transformer.h.{layer}."
        if part == "self_attention.linear_qkv":
            target, tensor = "attn.c_attn", torch.cat(_query_key_value(tensor, num_heads, num_heads))
        else:
            target = _GPT2[part]
        is_turned = layer is not None and tensor.dim() == 2
        converted[f"{prefix}{target}.{kind}"] = tensor.t() if is_turned else tensor
    return converted


def _split_name(name: str) -> tuple[int | None, str, str]:
    """Return (layer or None, the module's name inside it, weight or bias)."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("decoder.layers."):
        return None, module, kind
    layer, _, part = module.removeprefix("decoder.layers.").partition(".")
    return int(layer), part, kind


def _query_key_value(tensor: Tensor, num_heads: int, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused matrix (per group N / G queries, a key, a value) into query [N * D, ...], key and value [G * D,
    ...]."""
    heads = tensor.unflatten(0, (num_groups, num_heads // num_groups + 2, -1))
    query, key, value = heads.split((num_heads // num_groups, 1, 1), dim=1)
    return query.flatten(0, 2), key.flatten(0, 2), value.flatten(0, 2)
