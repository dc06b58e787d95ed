"""The mapping between tensors of Megatron Core's checkpoints and of transformers, and the conversions.

Letters: V vocabulary, P positions, H hidden size, F FFN size, N heads, G query groups, Q = N / G heads per group,
D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.bcd.huggingface.architecture import TRANSFORMERS, Architecture

LAYERS = "decoder.layers."
"""Prefix of the keys of Megatron Core's layers. Their tensors are stacked: [layers, ...]."""

Join = Callable[[Sequence[Tensor]], Tensor]
Split = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor of Megatron Core (or one per layer) and the tensors of transformers that it consists of."""

    key: str
    names: tuple[str, ...]
    """Names in transformers; ``{}`` is the number of the layer."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of `names`."""
    join: Join = lambda parts: parts[0]
    split: Split = lambda tensor: (tensor,)
    is_vocabulary: bool = False
    """Whether Megatron Core pads the first axis."""

    @property
    def is_stacked(self) -> bool:
        return self.key.startswith(LAYERS) and not self.key.removeprefix(LAYERS)[0].isdigit()

    def layer_names(self, layer: int) -> tuple[str, ...]:
        """Return transformers' names for one layer. A row outside the layers ignores the number."""
        return tuple(name.format(layer) for name in self.names)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of Megatron Core's tensor, without padding and without the axis of layers."""
        return tuple(self.join([torch.empty(shape, device="meta") for shape in self.shapes]).shape)


def build_rows(network: Architecture) -> tuple[Row, ...]:
    """Return the rows of a model: those before the layers, one per tensor of a layer, and those after the layers."""
    return tuple(_gpt2_rows(network) if network.family == "gpt2" else _llama_rows(network))


def is_buffer(name: str) -> bool:
    """Return whether transformers' tensor is not a weight: older versions also saved masks and frequencies."""
    return name.endswith((".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias"))


def canonical_name(name: str, network: Architecture) -> str:
    """Return the name with the prefix that older GPT-2 files lack, and without that of a part of a larger model."""
    if network.family == TRANSFORMERS:
        return name.replace("language_model.", "", 1)
    is_bare = network.family == "gpt2" and name.startswith(("wte.", "wpe.", "h.", "ln_f."))
    return f"transformer.{name}" if is_bare else name


# --- transforms


@dataclass(frozen=True)
class _QueryKeyValue:
    """Megatron Core's order of rows, group by group: Q queries, a key and a value of D rows each."""

    groups: int
    queries: int
    head_size: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        rows = [part.unflatten(0, (self.groups, -1, self.head_size)) for part in parts]
        return torch.cat(rows, dim=1).flatten(0, 2)

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        rows = tensor.unflatten(0, (self.groups, self.queries + 2, self.head_size))
        return [part.flatten(0, 2) for part in rows.split((self.queries, 1, 1), dim=1)]


def _transpose(tensor: Tensor) -> Tensor:
    """Transpose a weight, because GPT-2's linear layers store [inputs, outputs]. Return a bias unchanged."""
    return tensor.t().contiguous() if tensor.dim() == 2 else tensor


# --- families


def _llama_rows(network: Architecture) -> Iterator[Row]:
    vocabulary, hidden, inner = network.vocab_size, network.hidden_size, network.ffn_hidden_size
    heads, groups, width = network.num_attention_heads, network.num_query_groups, network.head_size
    qkv = _QueryKeyValue(groups, heads // groups, width)

    def layer_row(key: str, names: Sequence[str], *shapes: tuple[int, ...], **transforms: Any) -> Row:
        theirs = tuple("model.layers.{}." + name for name in names)
        return Row(key=LAYERS + key, names=theirs, shapes=shapes, **transforms)

    yield Row(
        key="embedding.word_embeddings.weight",
        names=("model.embed_tokens.weight",),
        shapes=((vocabulary, hidden),),
        is_vocabulary=True,
    )
    yield layer_row("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",), (hidden,))
    for kind, rest in (("weight", (hidden,)), ("bias", ())):
        has_qkv, has_others = (True, True) if kind == "weight" else (network.qkv_bias, network.linear_bias)
        projections = tuple(f"self_attn.{letter}_proj.{kind}" for letter in "qkv")
        shapes = tuple((count * width, *rest) for count in (heads, groups, groups))
        gate_up = (f"mlp.gate_proj.{kind}", f"mlp.up_proj.{kind}")
        if has_qkv:
            yield layer_row(f"self_attention.linear_qkv.{kind}", projections, *shapes, join=qkv.join, split=qkv.split)
        if has_others:
            out, down = ((hidden, heads * width), (hidden, inner)) if rest else ((hidden,), (hidden,))
            fc1 = (inner, *rest)
            yield layer_row(f"self_attention.linear_proj.{kind}", (f"self_attn.o_proj.{kind}",), out)
            if network.num_experts:
                continue
            halves = {"join": torch.cat, "split": lambda tensor: tensor.chunk(2)}
            yield layer_row(f"mlp.linear_fc1.{kind}", gate_up, fc1, fc1, **halves)
            yield layer_row(f"mlp.linear_fc2.{kind}", (f"mlp.down_proj.{kind}",), down)
    if network.qk_norm:
        for letter in "qk":
            yield layer_row(f"self_attention.{letter}_layernorm.weight", (f"self_attn.{letter}_norm.weight",), (width,))
    norm = "pre_mlp_layernorm.weight" if network.num_experts else "mlp.linear_fc1.layer_norm_weight"
    yield layer_row(norm, ("post_attention_layernorm.weight",), (hidden,))
    if network.num_experts:
        yield from _experts(network, layer_row)
    yield Row(key="decoder.final_layernorm.weight", names=("model.norm.weight",), shapes=((hidden,),))
    yield from _head(network)


def _experts(network: Architecture, layer_row: Callable[..., Row]) -> Iterator[Row]:
    """Yield the rows of a layer's router and experts. Megatron Core stacks the experts."""
    experts, hidden, inner = range(network.num_experts), network.hidden_size, network.expert_ffn_size
    mlp, gate, up, down = "mlp", "gate_proj", "up_proj", "down_proj"
    if network.family == "mixtral":
        mlp, gate, up, down = "block_sparse_moe", "w1", "w3", "w2"
    yield layer_row("mlp.router.weight", (f"{mlp}.gate.weight",), (network.num_experts, hidden))
    gate_up = tuple(f"{mlp}.experts.{expert}.{name}.weight" for expert in experts for name in (gate, up))
    yield layer_row(
        "mlp.experts.experts.linear_fc1.weight",
        gate_up,
        *[(inner, hidden)] * len(gate_up),
        join=lambda parts: torch.stack(list(parts)).view(len(experts), 2 * inner, hidden),
        split=lambda tensor: tensor.view(len(gate_up), inner, hidden).unbind(),
    )
    names = tuple(f"{mlp}.experts.{expert}.{down}.weight" for expert in experts)
    transforms = {"join": lambda parts: torch.stack(list(parts)), "split": torch.unbind}
    yield layer_row("mlp.experts.experts.linear_fc2.weight", names, *[(hidden, inner)] * len(names), **transforms)


def _gpt2_rows(network: Architecture) -> Iterator[Row]:
    vocabulary, hidden, inner = network.vocab_size, network.hidden_size, network.ffn_hidden_size
    heads = network.num_attention_heads
    qkv = _QueryKeyValue(heads, 1, network.head_size)

    def layer_row(key: str, name: str, shape: tuple[int, ...], **transforms: Any) -> Row:
        turn = {"join": lambda parts: _transpose(parts[0]), "split": lambda tensor: (_transpose(tensor),)} | transforms
        return Row(key=LAYERS + key, names=("transformer.h.{}." + name,), shapes=(shape,), **turn)

    yield Row(
        key="embedding.word_embeddings.weight",
        names=("transformer.wte.weight",),
        shapes=((vocabulary, hidden),),
        is_vocabulary=True,
    )
    yield Row(
        key="embedding.position_embeddings.weight",
        names=("transformer.wpe.weight",),
        shapes=((network.max_positions, hidden),),
    )
    for kind in ("weight", "bias"):

        def linear(inputs: int, outputs: int, kind: str = kind) -> tuple[int, ...]:
            return (inputs, outputs) if kind == "weight" else (outputs,)

        yield layer_row(f"self_attention.linear_qkv.layer_norm_{kind}", f"ln_1.{kind}", (hidden,))
        yield layer_row(
            f"self_attention.linear_qkv.{kind}",
            f"attn.c_attn.{kind}",
            linear(hidden, 3 * hidden),
            join=lambda parts: qkv.join(_transpose(parts[0]).chunk(3)),
            split=lambda tensor: (_transpose(torch.cat([*qkv.split(tensor)])),),
        )
        yield layer_row(f"self_attention.linear_proj.{kind}", f"attn.c_proj.{kind}", linear(hidden, hidden))
        yield layer_row(f"mlp.linear_fc1.layer_norm_{kind}", f"ln_2.{kind}", (hidden,))
        yield layer_row(f"mlp.linear_fc1.{kind}", f"mlp.c_fc.{kind}", linear(hidden, inner))
        yield layer_row(f"mlp.linear_fc2.{kind}", f"mlp.c_proj.{kind}", linear(inner, hidden))
    for kind in ("weight", "bias"):
        yield Row(key=f"decoder.final_layernorm.{kind}", names=(f"transformer.ln_f.{kind}",), shapes=((hidden,),))
    yield from _head(network)


def _head(network: Architecture) -> Iterator[Row]:
    if not network.tied:
        shape = (network.vocab_size, network.hidden_size)
        yield Row(key="output_layer.weight", names=("lm_head.weight",), shapes=(shape,), is_vocabulary=True)
