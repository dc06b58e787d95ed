"""List the parameters of a pipeline stage as Megatron Core's GPTModel registers them, and lay out their buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm, prod

from megatron.bcd.blocks.ownership import Ownership, ownership
from megatron.bcd.blocks.partition import Partition
from megatron.bcd.blocks.partition import partition as one_block
from megatron.bcd.planner.cost import ExpertShape, ModelShape

_PARAMETER_ALIGNMENT, _BUCKET_ALIGNMENT = 64, 128
"""Megatron Core's buffers for the distributed optimizer align parameters and bucket ends to these numbers."""

_SHARED_BY_TENSOR_RANKS = (
    "word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight",
    "linear_fc1.bias", "linear_proj.weight", "linear_fc2.weight",
)  # fmt: skip
"""Ends of the names of the parameters that tensor parallelism slices. Each rank holds the others whole."""

_NameAndParts = tuple[str, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A parameter of a stage."""

    name: str  # GPTModel's, with local layers
    size: int  # elements
    owned: Ownership
    is_shared: bool = False  # a tied embedding on several stages, or its copy: it has a separate bucket
    parts: tuple[tuple[int, int], ...] = ()
    """Rows and columns of the parts that an inactive update steps apart (queries, keys, values); empty for others."""
    num_matrices: int = 1
    """Matrices of experts in one parameter, each with these parts."""
    is_expert: bool = False
    """Whether expert-parallel ranks hold different ones."""
    num_factors: int = 0
    """Elements that the factored update keeps for the matrix: means by row and by column, and a step count."""


@lru_cache(maxsize=256)
def stage_tensors(
    shape: ModelShape,
    partition: Partition,
    stage: int,
    *,
    padded_vocabulary: int,
    tensor_size: int = 1,
    expert_size: int = 1,
    expert_tensor_size: int | None = None,
) -> tuple[Tensor, ...]:
    """Return the parameters of a rank of the stage in GPTModel's order. Vocabulary 0 leaves out embedding and head."""
    has_copy = shape.tied and partition.num_stages > 1

    def tensor(
        name: str, parts: tuple[tuple[int, int], ...], num_axes: int | None = None, num_matrices: int = 1
    ) -> Tensor:
        owned = ownership(name, partition=partition, stage=stage, num_axes=num_axes)
        is_expert = ".local_experts." in name
        num_slices = (expert_tensor_size or tensor_size) if is_expert else tensor_size
        return Tensor(
            name=name,
            size=num_matrices
            * -(-sum(map(prod, parts)) // (num_slices if name.endswith(_SHARED_BY_TENSOR_RANKS) else 1)),
            is_shared=has_copy and name.endswith(("embedding.word_embeddings.weight", "output_layer.weight")),
            owned=owned,
            parts=parts if owned.is_matrix else (),
            num_matrices=num_matrices,
            is_expert=is_expert and expert_size > 1,
            num_factors=num_matrices * _num_factors(name, parts, num_slices) if owned.is_matrix else 0,
        )

    if shape.parameters:
        listed = _stage_parameters(shape, partition, stage)
        return tuple(
            tensor(name, ((prod(axes[-2:-1]), axes[-1]),), len(axes), prod(axes[:-2])) for name, axes in listed
        )
    everything = _names_and_parts(shape, partition, stage, vocabulary=padded_vocabulary, expert_size=expert_size)
    return tuple(tensor(name, parts) for name, parts in everything if any(map(prod, parts)))


@lru_cache(maxsize=256)
def count_parameters(shape: ModelShape) -> int:
    """Return the number of parameters of the whole model. A tied head counts once."""
    if shape.parameters:
        return sum(prod(axes) for _, axes in shape.parameters)
    whole = one_block(num_layers=shape.num_layers, num_stages=1, num_blocks=1, layout="spread", tied=shape.tied)
    everything = _names_and_parts(shape, whole, 0, vocabulary=shape.vocab_size)
    return sum(prod(part) for _, parts in everything for part in parts)


def _stage_parameters(shape: ModelShape, partition: Partition, stage: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the parameters of a stage by GPTModel's names, with their shapes."""
    last = partition.num_virtual_stages - 1
    for chunk in range(partition.num_chunks):
        virtual, layers = chunk * partition.num_stages + stage, partition.chunk_layers(stage, chunk)
        before = f"chunks.{chunk}." if partition.num_chunks > 1 else ""
        for name, axes in shape.parameters:
            is_in_layer, is_embedding = name.startswith("decoder.layers."), name.startswith("embedding.")
            if is_in_layer:
                number, rest = name.removeprefix("decoder.layers.").split(".", 1)
                if int(number) in layers:
                    yield f"{before}decoder.layers.{int(number) - layers.start}.{rest}", axes
            elif virtual == (0 if is_embedding else last):
                yield before + name, axes
        if shape.tied and virtual == last > 0:
            yield f"{before}output_layer.weight", dict(shape.parameters)["embedding.word_embeddings.weight"]


def _num_factors(name: str, parts: tuple[tuple[int, int], ...], tensor_size: int) -> int:
    rows, columns = sum(rows for rows, _ in parts), sum(columns for _, columns in parts)
    if not name.endswith(_SHARED_BY_TENSOR_RANKS):
        return rows + columns + 1
    slices_columns = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
    return (rows + columns // tensor_size if slices_columns else rows // tensor_size + columns) + 1


def _names_and_parts(
    shape: ModelShape, partition: Partition, stage: int, *, vocabulary: int, expert_size: int = 1
) -> Iterator[_NameAndParts]:
    """Yield each parameter's name and the (rows, columns) of its parts. A vector has one row."""
    hidden, last = shape.hidden_size, partition.num_virtual_stages - 1
    for chunk in range(partition.num_chunks):
        virtual = chunk * partition.num_stages + stage
        before = f"chunks.{chunk}." if partition.num_chunks > 1 else ""
        if virtual == 0:
            yield f"{before}embedding.word_embeddings.weight", ((vocabulary, hidden),)
            if shape.num_positions:
                yield f"{before}embedding.position_embeddings.weight", ((shape.num_positions, hidden),)
        for index, layer in enumerate(partition.chunk_layers(stage, chunk)):
            experts = shape.experts if shape.experts and shape.experts.layers[layer] else None
            for name, parts in _layer(shape, experts, expert_size):
                yield f"{before}decoder.layers.{index}.{name}", parts
        if virtual == last:
            yield from _norm(f"{before}decoder.final_layernorm", hidden, shape)
            if not shape.tied or last > 0:  # on a single stage a tied head is the embedding itself
                yield f"{before}output_layer.weight", ((vocabulary, hidden),)


def _layer(shape: ModelShape, experts: ExpertShape | None, expert_size: int) -> Iterator[_NameAndParts]:
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
    yield from _norm("pre_mlp_layernorm", hidden, shape)
    mlps = {"mlp": ffn}
    if experts is not None:
        yield from linear("mlp.router", hidden, experts.number)
        on_rank = range(experts.number // expert_size)
        mlps = {f"mlp.experts.local_experts.{index}": experts.ffn_hidden_size for index in on_rank}
        mlps |= {"mlp.shared_experts": experts.shared} if experts.shared else {}
    for mlp, width in mlps.items():
        if mlp.endswith("shared_experts") and experts is not None and experts.is_gated:
            yield f"{mlp}.gate_weight", ((1, hidden),)
        yield from linear(f"{mlp}.linear_fc1", hidden, (1 + shape.gated) * width)
        yield from linear(f"{mlp}.linear_fc2", width, hidden)


def _norm(name: str, width: int, shape: ModelShape) -> Iterator[_NameAndParts]:
    for part in ("weight", "bias") if shape.shifted_norms else ("weight",):
        yield f"{name}.{part}", ((1, width),)


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Megatron Core's DDP buffer of a rank's active parameters."""

    size: int  # elements, with padding
    stored: tuple[int, ...]  # by data-parallel rank: elements whose optimizer state it stores, without padding
    counts: tuple[int, ...]  # by data-parallel rank: number of parameters of which it stores a part
    padding: int = 0  # elements

    def joined(self, experts: Buffer, place_of_experts: Sequence[int]) -> Buffer:
        """Return this buffer and that of expert-parallel experts as one, given each rank's place in the latter."""
        places = [place % len(experts.stored) for place in place_of_experts]
        return Buffer(
            size=self.size + experts.size,
            stored=tuple(own + experts.stored[place] for own, place in zip(self.stored, places, strict=True)),
            counts=tuple(own + experts.counts[place] for own, place in zip(self.counts, places, strict=True)),
            padding=self.padding + experts.padding,
        )


def build_buffer(tensors: list[Tensor], *, num_ranks: int) -> Buffer:
    """Return the buffer of these active parameters, which are in GPTModel's order.

    Megatron Core lays out parameters in reverse order at multiples of 64; a shared embedding has a separate bucket.
    It pads each bucket so that every rank gets a slice of the same size.
    """
    buckets: list[list[Tensor]] = [[]]
    for tensor in reversed(tensors):
        if tensor.is_shared:
            buckets += [[tensor], []]
        else:
            buckets[-1].append(tensor)
    end, stored, counts = 0, [0] * num_ranks, [0] * num_ranks
    for bucket in filter(None, buckets):
        begin, spans = end, []
        for tensor in bucket:
            first = round_up(end, _PARAMETER_ALIGNMENT)
            end = first + tensor.size
            spans.append((first, end))
        end = round_up(end, lcm(num_ranks, _BUCKET_ALIGNMENT))
        slice_size = (end - begin) // num_ranks
        for first, stop in spans:
            for rank in range((first - begin) // slice_size, (stop - 1 - begin) // slice_size + 1):
                low = begin + rank * slice_size
                stored[rank] += min(stop, low + slice_size) - max(first, low)
                counts[rank] += 1
    return Buffer(size=end, stored=tuple(stored), counts=tuple(counts), padding=end - sum(stored))


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple that is at least `number`."""
    return -(-number // multiple) * multiple
