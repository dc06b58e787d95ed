"""Activations that autograd saves for one microbatch, and a layer's working memory: closed formulas in bytes.

Counted for Megatron Core's local layers without dropout, as `model.builder` builds them. Fused attention saves query,
key, value and output; the element-wise functions of the MLP are fused on a GPU. A layer of the suffix saves what its
input gradient needs: no input of a linear layer. A layer of the prefix saves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.bcd.pipeline.build import MAX_SENDS_IN_FLIGHT, PlanShape
from megatron.bcd.planner.recipe import Recipe


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
    working: int
    """The largest gradients that one layer, or the head, holds during its backward pass."""


def layer_bytes(recipe: Recipe) -> LayerBytes:
    """The formula for one microbatch of the recipe."""
    shape, element = recipe.shape, recipe.bytes_per_element
    tokens = recipe.rank_tokens * recipe.micro_batch_size
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
    # query and context, key and value: twice this; in fp32 attention repeats keys and values for each query of a group
    heads = shape.query_size + (shape.query_size if element == 4 else shape.key_value_size)
    attention = recipe.model.heads  # in fp32: the logarithm of the sum of each row of scores
    if shape.gated:
        # norm input and output, query-key-value, rotated query and key, context, the second norm's; gate, up, product
        active, suffix = 4 * hidden + 3 * heads + 3 * ffn, 2 * hidden + 3 * heads + 2 * ffn
    else:
        # norm input and output, query-key-value, context, the second norm's; before and after GELU
        active, suffix = 4 * hidden + 2 * heads + 2 * ffn, 2 * hidden + 2 * heads + ffn
    # key and value of whole sequences, and the contexts of both chunks beside the whole context
    split = 2 * recipe.context_size * (heads - shape.query_size) + shape.query_size if recipe.context_size > 1 else 0
    scores = recipe.tokens * recipe.model.heads * (1 if shape.gated else 2) if recipe.unfused_attention else 0
    logits = recipe.padded_vocabulary * (4 if element == 4 else 6)
    return LayerBytes(
        active=tokens * ((active + split + scores) * element + 4 * attention),
        suffix=tokens * ((suffix + split + scores) * element + 4 * attention),
        input=tokens * hidden * element,
        head=tokens * (2 * hidden * element + 4 * recipe.padded_vocabulary),
        working=tokens * max((2 * hidden + 2 * ffn) * element, logits - 4 * recipe.padded_vocabulary),
    )


def stage_saved_bytes(recipe: Recipe, sizes: LayerBytes, shape: PlanShape, stage: int, block: int) -> int:
    """Bytes that autograd saves on a stage in the block's phase, over all microbatches in flight."""
    if shape.is_forward_only(stage):
        return 0
    num_active = recipe.layer_counts.weight_gradient[stage][block]
    num_suffix = recipe.layer_counts.after_prefix[stage][block] - num_active
    if recipe.recompute == "full":
        kept = (num_active + num_suffix) * sizes.input
    else:
        kept = num_active * sizes.active + num_suffix * sizes.suffix
    if stage == shape.last:
        kept += sizes.head
    return kept * shape.max_graphs(stage)


def stage_activations(recipe: Recipe, sizes: LayerBytes, shape: PlanShape, stage: int, block: int) -> int:
    """Peak of a stage's activations: saved, recomputed for one layer, and working memory."""
    once = 0
    if recipe.recompute == "full" and not shape.is_forward_only(stage):
        once = sizes.active if recipe.layer_counts.weight_gradient[stage][block] else sizes.suffix
        if stage == shape.last:  # the head's are freed before the first layer is recomputed
            once = max(0, once - sizes.head)
    return stage_saved_bytes(recipe, sizes, shape, stage, block) + once + sizes.working


def stage_messages(sizes: LayerBytes, shape: PlanShape, stage: int) -> int:
    """Bytes of queued messages and messages in flight, beside the inputs counted as activations."""
    if shape.num_stages == 1:
        return 0
    one = sizes.input
    if shape.is_forward_only(stage):
        return (1 + MAX_SENDS_IN_FLIGHT) * one
    ahead = shape.run_ahead if stage == shape.first_trainable else 0
    return (2 + ahead) * one
