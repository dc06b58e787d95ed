"""The mapping between tensors of checkpoints here and of transformers, and the conversions.

Letters: G query groups, Q query heads per group, D head size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.bcd.config import RunConfig
from megatron.bcd.config.measured import Parameters
from megatron.bcd.huggingface.architecture import TRANSFORMERS, Architecture
from megatron.bcd.model.skeleton import EMBEDDING, HEAD, Skeleton, read_config
from megatron.bcd.runtime.compat.transformers import Conversion

LAYERS = "decoder.layers."
"""Prefix of the keys of layers."""
_QKV = "self_attention.linear_qkv.{}"
_IN_LAYERS = (
    ("self_attention.linear_qkv.layer_norm_{}", "input_layernorm.{}", "ln_1.{}"),
    (_QKV, "self_attn.q_proj.{} self_attn.k_proj.{} self_attn.v_proj.{}", "attn.c_attn.{}"),
    ("self_attention.linear_proj.{}", "self_attn.o_proj.{}", "attn.c_proj.{}"),
    ("self_attention.q_layernorm.{}", "self_attn.q_norm.{}", ""),
    ("self_attention.k_layernorm.{}", "self_attn.k_norm.{}", ""),
    ("mlp.linear_fc1.layer_norm_{}", "post_attention_layernorm.{}", "ln_2.{}"),
    ("mlp.linear_fc1.{}", "mlp.gate_proj.{} mlp.up_proj.{}", "mlp.c_fc.{}"),
    ("mlp.linear_fc2.{}", "mlp.down_proj.{}", "mlp.c_proj.{}"),
    ("mlp.router.{}", "mlp.gate.{}", ""),
    ("mlp.experts.experts.linear_fc1.weight", "mlp.experts.gate_up_proj", ""),
    ("mlp.experts.experts.linear_fc2.weight", "mlp.experts.down_proj", ""),
)
"""The tensors of a layer: Megatron Core's name, and transformers' in memory in a LLaMA and in a GPT-2. {} is weight or
bias. A tensor that a model lacks is left out."""

Join = Callable[[Sequence[Tensor]], Tensor]
Split = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A tensor of a checkpoint and transformers' tensors in it."""

    key: str
    layer: int | None = None
    """With Megatron Core's layers, whose tensors are stacked in one of a checkpoint: [layers, ...], the layer."""
    names: tuple[str, ...]
    """Names in transformers' files."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of `names`."""
    join: Join = lambda parts: parts[0]
    split: Split = lambda tensor: (tensor,)
    is_vocabulary: bool = False
    """Whether Megatron Core pads the first axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor, without padding and without the axis of layers."""
        return tuple(self.join([torch.empty(shape, device="meta") for shape in self.shapes]).shape)


def canonical_name(name: str, network: Architecture) -> str:
    """Return the name with the prefix that older GPT-2 files lack, and without that of a part of a larger model."""
    if network.family == TRANSFORMERS:
        return name.replace("language_model.", "", 1)
    is_bare = network.family == "gpt2" and name.startswith(("wte.", "wpe.", "h.", "ln_f."))
    return f"transformer.{name}" if is_bare else name


@dataclass(frozen=True, kw_only=True)
class _Arrangement:
    """How a tensor of Megatron Core consists of transformers' tensors in memory: one below the other."""

    num_parts: int = 1
    is_transposed: bool = False
    """Whether linear layers store [inputs, outputs], as GPT-2's."""
    qkv: tuple[int, int, int] | None = None
    """G, Q and D of queries, keys and values: they alternate, by group Q queries, a key and a value of D rows each."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        parts = [_transpose(part) for part in parts] if self.is_transposed else parts
        if self.qkv is None:
            return torch.cat([*parts]) if self.num_parts > 1 else parts[0]
        parts = parts[0].chunk(3) if self.num_parts == 1 else parts
        return torch.cat([part.unflatten(0, (self.qkv[0], -1, self.qkv[2])) for part in parts], dim=1).flatten(0, 2)

    def split(self, whole: Tensor) -> Sequence[Tensor]:
        if self.qkv is None:
            parts = [*whole.chunk(self.num_parts)]
        else:
            groups, queries, size = self.qkv
            rows = whole.unflatten(0, (groups, queries + 2, size)).split((queries, 1, 1), dim=1)
            parts = [part.flatten(0, 2) for part in rows]
            parts = [torch.cat(parts)] if self.num_parts == 1 else parts
        return [_transpose(part) for part in parts] if self.is_transposed else parts


def _transpose(tensor: Tensor) -> Tensor:
    """Transpose a weight. Return a bias unchanged."""
    return tensor.t().contiguous() if tensor.dim() == 2 else tensor


@functools.lru_cache(maxsize=2)
def build_rows(network: Architecture) -> tuple[Row, ...]:
    """Return the rows of a model, in its order."""
    skeleton, is_core = Skeleton(network.config), network.family != TRANSFORMERS
    conversion = Conversion(skeleton.model)
    state = {name: tensor.to("meta") for _, name, tensor in skeleton.state()}

    def row(
        key: str, names: Sequence[str], *, layer: int | None = None, arranged: _Arrangement = _Arrangement()
    ) -> Row:
        files = [conversion.to_files(name, state[name]) for name in names]

        def join(given: Sequence[Tensor]) -> Tensor:
            tensors = iter(given)
            parts = (dict(zip(part, tensors, strict=False)) for part in files)
            return arranged.join([*map(conversion.from_files, names, parts)])

        def split(whole: Tensor) -> Sequence[Tensor]:
            parts = map(conversion.to_files, names, arranged.split(whole))
            return [tensor for part in parts for tensor in part.values()]

        return Row(
            key=key,
            layer=layer,
            names=tuple(name for part in files for name in part),
            shapes=tuple(tuple(tensor.shape) for part in files for tensor in part.values()),
            join=join,
            split=split,
            is_vocabulary=key in (f"{EMBEDDING}.weight", f"{HEAD}.weight"),
        )

    def layer_rows(layer: int) -> Iterator[Row]:
        flags, is_gpt2 = network.flags, network.family == "gpt2"
        heads, prefix = flags["num_attention_heads"], f"{skeleton.paths[LAYERS[:-1]]}.{layer}."
        groups = flags.get("num_query_groups", heads)
        for kind, (ours, *theirs) in itertools.product(("weight", "bias"), _IN_LAYERS):
            key, names = ours.format(kind), [prefix + name.format(kind) for name in theirs[is_gpt2].split()]
            if not names or names[0] not in state or not key.endswith(kind):
                continue
            if flags["num_moe_experts"]:
                key = key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
            qkv = (groups, heads // groups, flags["kv_channels"]) if ours == _QKV else None
            arranged = _Arrangement(num_parts=len(names), is_transposed=is_gpt2, qkv=qkv)
            yield row(LAYERS + key, names, layer=layer, arranged=arranged)

    rows: list[Row] = []
    for key, name, _ in skeleton.state():
        if is_core and key.startswith(LAYERS):
            layer = int(key.removeprefix(LAYERS).partition(".")[0])
            rows += layer_rows(layer) if rows[-1].layer != layer else ()
        elif not (network.config.tie_word_embeddings and key == f"{HEAD}.weight"):
            rows.append(row(key.replace("transformer_wpe", "position_embeddings") if is_core else key, [name]))
    return tuple(rows)


def list_parameters(config: RunConfig) -> Parameters:
    """Return names and shapes of the parameters of a run on transformers' layers; nothing for other runs."""
    if config.model.transformer_impl != TRANSFORMERS:
        return ()
    return parameters_of(Skeleton(read_config(str(config.checkpoint.load_hf)).get_text_config()), tied=config.tied)


def parameters_of(skeleton: Skeleton, *, tied: bool) -> Parameters:
    """Return names and shapes of a model's parameters. A tied head counts once."""
    parameters = dict(skeleton.model.named_parameters(remove_duplicate=False))
    return tuple(
        (key, tuple(tensor.shape))
        for key, name, tensor in skeleton.state()
        if name in parameters and not (tied and key == f"{HEAD}.weight")
    )
