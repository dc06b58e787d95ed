"""Activations that autograd saves for one microbatch, and a layer's working memory: closed formulas in bytes.

Counted for Megatron Core's local layers without dropout, as `model.builder` builds them on a GPU. Fused attention saves
query, key, value and output; RMSNorm, rotation and the element-wise functions of the MLP are fused. A layer of the
suffix saves what its input gradient needs: no input of a linear layer. A layer of the prefix saves nothing. A CPU
fuses none of these and saves more for a LLaMA.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from operator import le
from typing import TypeAlias

from megatron.bcd.pipeline.actions import Kind
from megatron.bcd.pipeline.build import MAX_SENDS_IN_FLIGHT, PlanShape
from megatron.bcd.pipeline.chunk_shape import ChunkShape
from megatron.bcd.pipeline.interleaved import MAX_MESSAGES_IN_FLIGHT, build_chunk_plan
from megatron.bcd.planner.cost import ModelShape
from megatron.bcd.planner.recipe import LayerCounts, Recipe

Shape: TypeAlias = PlanShape | ChunkShape
"""Of a pipeline's schedule, with a chunk on each stage or several."""


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Saved bytes of one microbatch, by kind of layer."""

    active: int
    """An active layer."""
    suffix: int
    """A frozen layer that passes a gradient back."""
    input: int
    """A layer's input, which full recomputation saves; also the size of a message between stages."""
    head: int
    """Final norm, head and loss."""
    active_core: int
    """Of an active layer's: what recomputing the core of attention need not save."""
    suffix_core: int
    active_working: int
    """The most that the backward pass of one active layer holds beside what is saved: gradients, and one weight's."""
    suffix_working: int
    head_converted: int
    """The gradient of 16-bit logits, beside that of the loss's fp32 ones; 0 in fp32."""
    head_weight: int
    """The gradient of the head's weight, before it is added to the buffer."""
    forward_working: int
    """The most that the forward pass of a layer of the prefix holds."""


def layer_bytes(recipe: Recipe) -> LayerBytes:
    """The formula for one microbatch of the recipe."""
    return bytes_of_layers(
        recipe.shape,
        tokens=recipe.rank_tokens * recipe.micro_batch_size,
        sequence=recipe.tokens,
        element=recipe.bytes_per_element,
        num_heads=recipe.model.heads,
        context_size=recipe.context_size,
        padded_vocabulary=recipe.padded_vocabulary,
        unfused_attention=recipe.unfused_attention,
    )


def bytes_of_layers(
    shape: ModelShape,
    *,
    tokens: int,
    sequence: int,
    element: int,
    num_heads: int,
    padded_vocabulary: int,
    context_size: int = 1,
    tensor_size: int = 1,
    unfused_attention: bool = False,
) -> LayerBytes:
    """The formula for ``tokens`` of a rank in one microbatch, of sequences of ``sequence`` tokens, ``element`` bytes
    each number. With tensor parallelism each rank has its part of the heads, of the MLP and of the vocabulary."""
    hidden, ffn, vocabulary = shape.hidden_size, shape.ffn_hidden_size // tensor_size, padded_vocabulary // tensor_size
    query, key_value = shape.query_size // tensor_size, shape.key_value_size // tensor_size
    # query and context, key and value: twice this; in fp32 attention repeats keys and values for each query of a group
    heads = query + (query if element == 4 else key_value)
    attention = num_heads // tensor_size  # in fp32: the logarithm of the sum of each row of scores
    if shape.gated:
        # norm input and output, query-key-value, rotated query and key, context, the second norm's; gate, up, product
        active, suffix = 4 * hidden + 3 * heads + 3 * ffn, 2 * hidden + 3 * heads + 2 * ffn
    else:
        # norm input and output, query-key-value, context, the second norm's; before and after GELU
        active, suffix = 4 * hidden + 2 * heads + 2 * ffn, 2 * hidden + 2 * heads + ffn
    if shape.qk_norm_size:  # the norms keep copies of queries and keys
        active, suffix = active + heads, suffix + heads
    # key and value of whole sequences, and the contexts of both chunks beside the whole context
    split = 2 * context_size * (heads - query) + query if context_size > 1 else 0
    scores = sequence * attention * (1 if shape.gated else 2) if unfused_attention else 0
    projections = 2 if shape.gated else 1
    weight = hidden * ffn * element
    # backward through the second linear layer, the activation, the first linear layer; the gradient of a weight is
    # added to the buffer before the next one begins
    active_working = max(
        tokens * (hidden + ffn) * element + weight,
        tokens * (hidden + projections * ffn) * element,
        tokens * (2 * hidden - ffn) * element + projections * weight,
    )
    return LayerBytes(
        active=tokens * ((active + split + scores) * element + 4 * attention),
        suffix=tokens * ((suffix + split + scores) * element + 4 * attention),
        input=tokens * hidden * element,
        head=tokens * (2 * hidden * element + 4 * vocabulary),
        active_core=tokens * (scores * element + 4 * attention),
        suffix_core=tokens * ((scores + query) * element + 4 * attention),
        active_working=active_working,
        suffix_working=tokens * (hidden + (1 + projections) * ffn) * element,
        head_converted=0 if element == 4 else tokens * vocabulary * element,
        head_weight=vocabulary * hidden * element,
        forward_working=tokens * (2 * hidden + (1 + projections) * ffn) * element,
    )


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """What a stage recomputes in its backward passes, in the phase of one block. Layers of the prefix keep nothing."""

    granularity: str = "none"
    """none; selective: the core of attention in every layer; full: whole layers."""
    layers: tuple[int, ...] = ()
    """With full, by chunk: the first so many layers after the prefix."""

    def num_whole(self, chunk: int) -> int:
        """Layers of a chunk that are recomputed as a whole."""
        return self.layers[chunk] if self.layers else 0


def stage_saved_bytes(
    cut: LayerCounts, sizes: LayerBytes, shape: Shape, stage: int, block: int, recomputed: Recomputed
) -> int:
    """Bytes that autograd saves on a stage in the block's phase, over all microbatches in flight."""
    of_chunks = [_chunk_bytes(cut, sizes, stage, chunk, block, recomputed) for chunk in range(cut.partition.num_chunks)]
    if isinstance(shape, ChunkShape):
        in_flight = microbatches_in_flight(shape, stage)
        return max(sum(one * number for one, number in zip(of_chunks, numbers, strict=True)) for numbers in in_flight)
    return 0 if shape.is_forward_only(stage) else of_chunks[0] * shape.max_graphs(stage)


def _chunk_bytes(
    cut: LayerCounts, sizes: LayerBytes, stage: int, chunk: int, block: int, recomputed: Recomputed
) -> int:
    """Of one microbatch in one chunk."""
    layers = _layers(cut, sizes, stage, chunk, block, recomputed)
    return sum(kept for kept, _ in layers) + sizes.head * _has_head(cut, stage, chunk)


def _has_head(cut: LayerCounts, stage: int, chunk: int) -> bool:
    return chunk * cut.partition.num_stages + stage == cut.partition.num_virtual_stages - 1


def _layers(
    cut: LayerCounts, sizes: LayerBytes, stage: int, chunk: int, block: int, recomputed: Recomputed
) -> list[tuple[int, int]]:
    """What each layer after the prefix saves, and what its backward pass holds beside it."""
    is_selective, layers = recomputed.granularity == "selective", []
    for number, is_updated in enumerate(cut.is_updated[chunk * cut.partition.num_stages + stage][block]):
        whole, core, working = (
            (sizes.active, sizes.active_core, sizes.active_working)
            if is_updated
            else (sizes.suffix, sizes.suffix_core, sizes.suffix_working)
        )
        if number < recomputed.num_whole(chunk):
            layers.append((sizes.input, whole + working))
        else:
            layers.append((whole - core * is_selective, core * is_selective + working))
    return layers


def stage_activations(
    cut: LayerCounts, sizes: LayerBytes, shape: Shape, stage: int, block: int, recomputed: Recomputed
) -> int:
    """Peak of a stage's activations: what is saved, and the most that a microbatch's passes hold beside it."""
    saved, beside = stage_saved_bytes(cut, sizes, shape, stage, block, recomputed), 0
    for chunk in range(cut.partition.num_chunks):
        has_head = _has_head(cut, stage, chunk)
        head_weight = sizes.head_weight * (has_head and cut.partition.head_active(block))
        if has_head:  # the loss's gradient is freed before the head's pass
            beside = max(beside, sizes.head_converted, sizes.input + head_weight - sizes.head_converted)
        freed = sizes.head * has_head  # of this microbatch, when the backward pass comes to the layer
        if cut.partition.tied and cut.partition.num_virtual_stages == 1:  # waits for the embedding's gradient
            freed -= head_weight
        for kept, working in reversed(_layers(cut, sizes, stage, chunk, block, recomputed)):
            beside = max(beside, working - freed)
            freed += kept
    return max(saved + beside, sizes.forward_working)


@cache
def microbatches_in_flight(shape: ChunkShape, stage: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of microbatches, by chunk, whose activations an interleaved stage keeps together; those
    that no other exceeds."""
    kept, found = [0] * shape.num_chunks, {(0,) * shape.num_chunks}
    for action in build_chunk_plan(shape).stages[stage]:
        if action.kind is Kind.FORWARD:
            kept[action.chunk] += 1
            found.add(tuple(kept))
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            kept[action.chunk] -= 1
    return tuple(one for one in sorted(found) if not any(one != other and all(map(le, one, other)) for other in found))


def stage_messages(sizes: LayerBytes, shape: Shape, stage: int) -> int:
    """Bytes of queued messages and messages in flight, beside the inputs counted as activations."""
    one = sizes.input
    if isinstance(shape, ChunkShape):
        return (2 + MAX_MESSAGES_IN_FLIGHT) * one
    if shape.num_stages == 1:
        return 0
    if shape.is_forward_only(stage):
        return (1 + MAX_SENDS_IN_FLIGHT) * one
    ahead = shape.run_ahead if stage == shape.first_trainable else 0
    return (2 + ahead) * one
