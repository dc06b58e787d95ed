"""The parameters of a pipeline stage, one by one, as Megatron Core's GPTModel registers them, and their buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm, prod

from megatron.bcd.blocks.ownership import Ownership
from megatron.bcd.blocks.partition import Partition
from megatron.bcd.planner.adapters import ADAPTER, ownership_with_adapters
from megatron.bcd.planner.cost import ModelShape

_PARAMETER_ALIGNMENT, _BUCKET_ALIGNMENT = 64, 128
"""Alignment, in elements, of parameters and of bucket ends in Megatron Core's buffers with distributed optimizer."""

_SHARED_BY_TENSOR_RANKS = (
    "word_embeddings.weight",
    "output_layer.weight",
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_fc1.weight",
    "linear_fc1.bias",
    "linear_proj.weight",
    "linear_fc2.weight",
    *(f"linear_{column}{ADAPTER}.b.{part}" for column in ("qkv", "fc1") for part in range(3)),
    *(f"linear_{row}{ADAPTER}.a" for row in ("proj", "fc2")),
)
"""Ends of the names of parameters of which each tensor-parallel rank holds a slice; it holds all of the others."""

_NameAndParts = tuple[str, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One parameter of a stage."""

    name: str  # GPTModel's, with local layers
    size: int  # elements
    owned: Ownership
    is_shared: bool = False  # an embedding with a copy on another stage, or the copy: it has a bucket of its own
    parts: tuple[tuple[int, int], ...] = ()
    """Of a matrix that a stateless update may step: rows and columns of what it takes apart (queries, keys, values)."""
    num_factors: int = 0
    """Elements that the rule `factored` keeps of such a matrix: means by row and by column, and a number of steps."""

    def is_active(self, block: int) -> bool:
        """Whether it is updated with optimizer state in the block's phase."""
        return self.owned.is_active(block)

    def is_stateless(self, block: int) -> bool:
        """Whether it is updated without optimizer state in the block's phase."""
        return self.owned.is_stateless(block)


def stage_tensors(
    shape: ModelShape, partition: Partition, stage: int, *, padded_vocabulary: int, tensor_size: int = 1
) -> tuple[Tensor, ...]:
    """The parameters of a rank of a pipeline stage in GPTModel's order; with a vocabulary of 0 no embedding or head."""
    has_copy = shape.tied and partition.num_stages > 1
    return tuple(
        Tensor(
            name=name,
            size=-(-sum(map(prod, parts)) // (tensor_size if name.endswith(_SHARED_BY_TENSOR_RANKS) else 1)),
            is_shared=has_copy and name.endswith(("embedding.word_embeddings.weight", "output_layer.weight")),
            owned=(owned := ownership_with_adapters(name, partition=partition, stage=stage)),
            parts=parts if owned.is_matrix else (),
            num_factors=_num_factors(name, parts, tensor_size) if owned.is_matrix else 0,
        )
        for name, parts in _names_and_parts(shape, partition, stage, padded_vocabulary)
        if any(map(prod, parts))
    )


def _num_factors(name: str, parts: tuple[tuple[int, int], ...], tensor_size: int) -> int:
    rows, columns = sum(rows for rows, _ in parts), sum(columns for _, columns in parts)
    slices_columns = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
    return (rows + columns // tensor_size if slices_columns else rows // tensor_size + columns) + 1


def _names_and_parts(shape: ModelShape, partition: Partition, stage: int, vocabulary: int) -> Iterator[_NameAndParts]:
    """Names, and rows and columns of their parts; one row for a vector."""
    hidden, last = shape.hidden_size, partition.num_virtual_stages - 1
    for chunk in range(partition.num_chunks):
        virtual = chunk * partition.num_stages + stage
        before = f"chunks.{chunk}." if partition.num_chunks > 1 else ""
        if virtual == 0:
            yield f"{before}embedding.word_embeddings.weight", ((vocabulary, hidden),)
            if shape.num_positions:
                yield f"{before}embedding.position_embeddings.weight", ((shape.num_positions, hidden),)
        for index in range(len(partition.chunk_layers(stage, chunk))):
            for name, parts in _layer(shape):
                yield f"{before}decoder.layers.{index}.{name}", parts
        if virtual == last:
            yield from _norm(f"{before}decoder.final_layernorm", hidden, shape)
            if not shape.tied or last > 0:  # on a single stage a tied head is the embedding itself
                yield f"{before}output_layer.weight", ((vocabulary, hidden),)


def _layer(shape: ModelShape) -> Iterator[_NameAndParts]:
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size

    def linear(name: str, inputs: int, *outputs: int, has_bias: bool = shape.biases) -> Iterator[_NameAndParts]:
        yield f"{name}.weight", tuple((rows, inputs) for rows in outputs)
        if has_bias:
            yield f"{name}.bias", ((1, sum(outputs)),)

    heads, groups = shape.query_size, shape.key_value_size
    yield from _norm("input_layernorm", hidden, shape)
    yield from linear("self_attention.linear_proj", heads, hidden)
    has_bias = shape.biases or shape.qkv_bias
    yield from linear("self_attention.linear_qkv", hidden, heads, groups, groups, has_bias=has_bias)
    for name in ("q_layernorm", "k_layernorm") if shape.qk_norm_size else ():
        yield from _norm(f"self_attention.{name}", shape.qk_norm_size, shape)
    of_qkv, of_fc1 = shape.num_adapter_inputs
    yield from _adapter("self_attention.linear_qkv", shape.low_rank, of_qkv, hidden, heads, groups, groups)
    yield from _adapter("self_attention.linear_proj", shape.low_rank, 1, heads, hidden)
    yield from _norm("pre_mlp_layernorm", hidden, shape)
    yield from linear("mlp.linear_fc1", hidden, (1 + shape.gated) * ffn)
    yield from linear("mlp.linear_fc2", ffn, hidden)
    yield from _adapter("mlp.linear_fc1", shape.low_rank, of_fc1, hidden, *[ffn] * of_fc1)
    yield from _adapter("mlp.linear_fc2", shape.low_rank, 1, ffn, hidden)


def _adapter(name: str, rank: int, num_inputs: int, inputs: int, *outputs: int) -> Iterator[_NameAndParts]:
    """The adapter beside a matrix."""
    yield f"{name}{ADAPTER}.a", ((num_inputs * rank, inputs),)
    for part, rows in enumerate(outputs):
        yield f"{name}{ADAPTER}.b.{part}", ((rows, rank),)


def _norm(name: str, width: int, shape: ModelShape) -> Iterator[_NameAndParts]:
    for part in ("weight", "bias") if shape.shifted_norms else ("weight",):
        yield f"{name}.{part}", ((1, width),)


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Megatron Core's DDP buffer of a rank's active parameters."""

    size: int  # elements, with padding
    held: tuple[int, ...]  # by data-parallel rank: elements whose optimizer state it holds, without padding
    pieces: tuple[int, ...]  # by data-parallel rank: number of parameters that it holds a part of

    @property
    def padding(self) -> int:
        """Elements."""
        return self.size - sum(self.held)


def buffer_of(tensors: list[Tensor], *, num_ranks: int | None) -> Buffer:
    """The buffer of these active parameters, given in GPTModel's order.

    Parameters are laid out in reverse order at multiples of 64; a shared embedding has a bucket of its own. Each bucket
    is padded so that its ranks share it evenly, one slice each. With ``num_ranks`` None, without distributed optimizer,
    nothing is padded, and each rank holds all.
    """
    if num_ranks is None:
        size = sum(tensor.size for tensor in tensors)
        return Buffer(size=size, held=(size,), pieces=(len(tensors),))
    buckets: list[list[Tensor]] = [[]]
    for tensor in reversed(tensors):
        if tensor.is_shared:
            buckets += [[tensor], []]
        else:
            buckets[-1].append(tensor)
    end, held, pieces = 0, [0] * num_ranks, [0] * num_ranks
    for bucket in filter(None, buckets):
        begin, spans = end, []
        for tensor in bucket:
            first = _up(end, _PARAMETER_ALIGNMENT)
            end = first + tensor.size
            spans.append((first, end))
        end = _up(end, lcm(num_ranks, _BUCKET_ALIGNMENT))
        slice_size = (end - begin) // num_ranks
        for first, stop in spans:
            for rank in range((first - begin) // slice_size, (stop - 1 - begin) // slice_size + 1):
                low = begin + rank * slice_size
                held[rank] += min(stop, low + slice_size) - max(first, low)
                pieces[rank] += 1
    return Buffer(size=end, held=tuple(held), pieces=tuple(pieces))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
