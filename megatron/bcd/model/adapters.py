"""Low-rank adapters beside the matrices of transformer layers (--bcd-low-rank): LoRA, arXiv 2106.09685, as peft has it.

Tensor shapes: S sequence length on this rank, B micro-batch size, R rank of the adapter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import linear as product

from megatron.bcd.blocks.ownership import ADAPTER

_MATRICES = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


class Adapter(torch.nn.Module):
    """scale x B A x beside a linear layer of Megatron Core, split over the tensor-parallel ranks as its matrix is.

    A fused matrix has several parts (queries, keys and values; gate and up), and a B for each. Each has its own R rows
    of A too, unless `a` has R rows only: GPT-2's queries, keys and values share them, which are one matrix there.
    """

    def __init__(
        self,
        a: Tensor,
        outputs: Sequence[int],
        *,
        rank: int,
        groups: int,
        scale: float,
        is_row_parallel: bool,
        sequence_parallel: bool,
    ) -> None:
        """`a`: [R or parts x R, inputs]. `outputs`: rows of each part on this rank, which lie in `groups` of the
        matrix: a group has rows of every part."""
        super().__init__()
        self.a = torch.nn.Parameter(a)
        self.b = torch.nn.ParameterList(torch.zeros(rows, rank, dtype=a.dtype) for rows in outputs)
        self.groups, self.scale = groups, scale
        self.is_row_parallel, self.sequence_parallel = is_row_parallel, sequence_parallel
        split, whole = ([self.a], self.b) if is_row_parallel else (self.b, [self.a])
        for parameter in split:
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, int(is_row_parallel), 1)
        for parameter in whole:  # Megatron Core sums their gradients over ranks with parts of the sequence
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """From the linear layer's input, [S, B, inputs], what is added to its output, [S, B, outputs]."""
        inner = self.scale * self._exchanged(product(x, self.a))  # R numbers a token: what it adds is wider
        return interleaved([product(*part) for part in of_parts(inner, self.b, dim=-1)], self.groups, dim=-1)

    def _exchanged(self, inner: Tensor) -> Tensor:
        """What the tensor-parallel ranks exchange of A x: R numbers a token, where the layer itself exchanges H."""
        if self.is_row_parallel and self.sequence_parallel:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(inner)
        if self.is_row_parallel:
            return tensor_parallel.reduce_from_tensor_model_parallel_region(inner)
        if self.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(inner)
        return tensor_parallel.copy_to_tensor_model_parallel_region(inner)  # its gradient is summed

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For Megatron Core's checkpoints."""
        split = {"a": 1} if self.is_row_parallel else {f"b.{part}": 0 for part in range(len(self.b))}
        tensors = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(tensors, prefix, split, sharded_offsets)


def of_parts(inner: Tensor, b: Sequence[Tensor], *, dim: int) -> list[tuple[Tensor, Tensor]]:
    """Each part's R elements of `inner` along `dim`, with its B."""
    own = inner.chunk(len(b), dim) if inner.size(dim) > b[0].size(1) else [inner] * len(b)
    return list(zip(own, b, strict=True))


def interleaved(parts: Sequence[Tensor], groups: int, *, dim: int) -> Tensor:
    """The parts of a fused matrix, or of its output, as Megatron Core has them along `dim`: group by group."""
    if len(parts) == 1:
        return parts[0]
    axis = dim % parts[0].dim()
    rows = [part.unflatten(axis, (groups, -1)) for part in parts]
    return torch.cat(rows, dim=axis + 1).flatten(axis, axis + 1)


def merged(weight: Tensor, a: Tensor, b: Sequence[Tensor], *, groups: int, scale: float) -> Tensor:
    """A whole matrix and its adapter in one, added in fp32."""
    update = [each.float() @ own.float() for own, each in of_parts(a, b, dim=0)]
    return (weight.float() + scale * interleaved(update, groups, dim=0)).to(weight.dtype)


def add_adapters(
    layer: TransformerLayer, config: TransformerConfig, *, rank: int, scale: float, shares_a: bool, seed: int
) -> None:
    """Put an adapter beside every matrix of a layer, in the module that holds the matrix.

    B is zero and A as peft draws it, from generators of their own: all other weights are drawn as without adapters.
    `shares_a`: queries, keys and values share A.
    """
    tensor_size, tensor_rank = config.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
    attention, channels = layer.self_attention, config.kv_channels
    heads, groups = attention.num_attention_heads_per_partition, attention.num_query_groups_per_partition
    for number, name in enumerate(_MATRICES):
        linear = layer.get_submodule(name)
        rows, columns = linear.weight.shape
        outputs, is_row_parallel = [rows], name.endswith(("linear_proj", "linear_fc2"))
        if is_qkv := name.endswith("linear_qkv"):
            outputs = [heads * channels, groups * channels, groups * channels]
        elif name.endswith("linear_fc1") and config.gated_linear_unit:
            outputs = [rows // 2, rows // 2]
        num_a = 1 if is_qkv and shares_a else len(outputs)
        a = torch.empty(num_a * rank, columns * (tensor_size if is_row_parallel else 1))
        generator = torch.Generator().manual_seed((seed * 2**20 + layer.layer_number) * len(_MATRICES) + number)
        torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        adapter = Adapter(
            (a.chunk(tensor_size, 1)[tensor_rank] if is_row_parallel else a).to(config.params_dtype).contiguous(),
            outputs,
            rank=rank,
            groups=groups if is_qkv else 1,
            scale=scale,
            is_row_parallel=is_row_parallel,
            sequence_parallel=config.sequence_parallel,
        )
        place, _, last = name.partition(".")
        layer.get_submodule(place).add_module(last + ADAPTER, adapter)
        linear.register_forward_hook(lambda _, x, y, adapter=adapter: (y[0] + adapter(x[0]), *y[1:]))
