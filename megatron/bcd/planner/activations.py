"""Activations that autograd saves for one microbatch, a layer's working memory, and the least recomputation that fits.

Closed formulas in bytes, counted for Megatron Core's local layers without dropout, as `model.builder` builds them on a
GPU. Fused attention saves query, key, value and output; RMSNorm, rotation and the element-wise functions of the MLP are
fused. A layer of the suffix saves what its input gradient needs: no input of a linear layer. A layer of the prefix
saves nothing. A CPU fuses none of these and saves more for a LLaMA.

Both the planner (`memory`) and the trainer's --recompute auto (`run_state`) use `StageActivations`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import le

from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import LOSS_CHUNK, LOSS_PARTS
from megatron.bcd.pipeline.build import build_plan, max_graphs
from megatron.bcd.pipeline.plan import Kind, PlanShape
from megatron.bcd.planner.cost import pass_products
from megatron.bcd.planner.state import ModelState

_MOST_ROUNDS = 4
"""Microbatches per stage of an interleaved plan after which what is kept has reached its peak."""


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Saved bytes of one microbatch, by kind of layer."""

    active: int
    suffix: int  # a frozen layer that passes a gradient back
    input: int  # a layer's input, which full recomputation saves; also the size of a message between stages
    head: int  # final norm, head and loss
    active_core: int  # of an active layer's: what recomputing the core of attention need not save
    suffix_core: int
    active_working: int  # the most that an active layer's backward pass holds beside: gradients, and one weight's
    suffix_working: int
    head_working: tuple[int, int]  # the most that head and loss hold beside, with the head frozen and active
    head_weight: int  # the gradient of the head's weight, before it is added to the buffer
    forward_working: int  # the most that the forward pass of a layer of the prefix holds


def layer_bytes(
    state: ModelState,
    *,
    tokens: int,
    sequence: int,
    num_heads: int,
    context_size: int = 1,
    unfused_attention: bool = False,
    linear_loss: bool = False,
) -> LayerBytes:
    """The formula for ``tokens`` of a rank in one microbatch, of sequences of ``sequence`` tokens. With tensor
    parallelism each rank has its part of the heads, of the MLP and of the vocabulary."""
    shape, element, tensor_size = state.shape, state.budget.weight, state.tensor_size
    hidden, ffn = shape.hidden_size, shape.ffn_hidden_size // tensor_size
    vocabulary = state.padded_vocabulary // tensor_size
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
    active += shape.low_rank * (sum(shape.num_adapter_inputs) + 2)
    if shape.qk_norm_size:  # the norms keep copies of queries and keys
        active, suffix = active + heads, suffix + heads
    # key and value of whole sequences, and the contexts of both chunks beside the whole context
    split = 2 * context_size * (heads - query) + query if context_size > 1 else 0
    scores = sequence * attention * (1 if shape.gated else 2) if unfused_attention else 0
    projections = 2 if shape.gated else 1
    # the forward pass of the MLP: its first matrix's output with what its adapter's parts are joined to, or the product
    widths = 3 * projections if shape.low_rank else 1 + projections
    weight = hidden * ffn * element
    # backward through the second linear layer, the activation, the first linear layer; the gradient of a weight is
    # added to the buffer before the next one begins. An adapter has the gradient of its input beside the matrix's;
    # their sum comes after the weight's
    active_working = max(
        tokens * (hidden + (2 if shape.low_rank else 1) * ffn) * element + weight,
        tokens * (hidden + (3 if shape.low_rank else 1) * ffn) * element,
        tokens * (hidden + projections * ffn) * element,
        tokens * (2 * hidden - ffn) * element + projections * weight,
    )
    head, head_working = _head_bytes(tokens, hidden, vocabulary, element, linear_loss=linear_loss)
    return LayerBytes(
        active=tokens * ((active + split + scores) * element + 4 * attention),
        suffix=tokens * ((suffix + split + scores) * element + 4 * attention),
        input=tokens * hidden * element,
        head=head,
        active_core=tokens * (scores * element + 4 * attention),
        suffix_core=tokens * ((scores + query) * element + 4 * attention),
        active_working=active_working,
        suffix_working=tokens * (hidden + (1 + projections) * ffn) * element,
        head_working=head_working,
        head_weight=vocabulary * hidden * element,
        forward_working=tokens * (2 * hidden + widths * ffn) * element,
    )


def _head_bytes(
    tokens: int, hidden: int, vocabulary: int, element: int, *, linear_loss: bool
) -> tuple[int, tuple[int, int]]:
    """What final norm, head and loss keep, and the most that they hold beside, with the head frozen and active."""
    weight, converted = vocabulary * hidden * element, 0 if element == 4 else element
    if linear_loss:  # norm input and output, and their gradient, which the forward pass computes; some logits
        one = vocabulary * (4 + converted)
        logits, beside_weight = min(tokens, LOSS_CHUNK) * one, min(tokens, LOSS_CHUNK // LOSS_PARTS) * one
        return tokens * (3 * hidden * element + 12), (logits, max(logits, beside_weight + weight))
    # the gradient of 16-bit logits, beside that of the loss's fp32 ones, which is freed before the head's pass
    of_logits = tokens * vocabulary * converted
    passes = tokens * hidden * element - of_logits
    return tokens * (2 * hidden * element + 4 * vocabulary), (max(of_logits, passes), max(of_logits, passes + weight))


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


def least_recomputation(numbers: Sequence[int], fits: Callable[[Recomputed], bool], *, core_share: float) -> Recomputed:
    """Nothing if that fits; else the core of attention in every layer, or the first few whole layers, whichever is less
    work and fits; all layers if nothing fits.

    ``numbers`` are the layers after the prefix, by chunk. The first layers of the first chunks are recomputed: their
    activations are kept longest. ``core_share`` is the part of a layer's arithmetic that is the core of attention.
    """
    total = sum(numbers)
    if not total or fits(Recomputed()):
        return Recomputed()
    whole = 1 + bisect_left(range(1, total), True, key=lambda number: fits(_first_layers(numbers, number)))
    selective = Recomputed(granularity="selective")
    return selective if core_share * total < whole and fits(selective) else _first_layers(numbers, whole)


def _first_layers(numbers: Sequence[int], whole: int) -> Recomputed:
    layers = []
    for number in numbers:
        layers.append(min(number, whole))
        whole -= layers[-1]
    return Recomputed(granularity="full", layers=tuple(layers))


@dataclass(frozen=True, kw_only=True)
class StageActivations:
    """Activations and messages of one stage in the phase of one block."""

    state: ModelState
    sequence: int
    sizes: LayerBytes
    shape: PlanShape
    stage: int
    block: int

    @property
    def partition(self) -> Partition:
        return self.state.partition

    def saved_bytes(self, recomputed: Recomputed) -> int:
        """What autograd saves, over all microbatches in flight."""
        of_chunks = [
            sum(kept for kept, _ in self._layers(chunk, recomputed)) + self.sizes.head * self._has_head(chunk)
            for chunk in range(self.partition.num_chunks)
        ]
        if self.shape.num_chunks == 1:
            return of_chunks[0] * max_graphs(self.shape, self.stage)
        number = min(self.shape.num_microbatches, _MOST_ROUNDS * self.shape.num_stages)
        in_flight = microbatches_in_flight(replace(self.shape, num_microbatches=number), self.stage)
        return max(sum(one * number for one, number in zip(of_chunks, numbers, strict=True)) for numbers in in_flight)

    def peak_bytes(self, recomputed: Recomputed) -> int:
        """What is saved, and the most that a microbatch's passes hold beside it."""
        sizes, partition, beside = self.sizes, self.partition, 0
        for chunk in range(partition.num_chunks):
            has_head = self._has_head(chunk)
            head_active = has_head and partition.head_active(self.block)
            if has_head:
                beside = max(beside, sizes.head_working[head_active])
            freed = sizes.head * has_head  # of this microbatch, when the backward pass comes to the layer
            if partition.tied and partition.num_virtual_stages == 1:  # waits for the embedding's gradient
                freed -= sizes.head_weight * head_active
            for kept, working in reversed(self._layers(chunk, recomputed)):
                beside = max(beside, working - freed)
                freed += kept
        return max(self.saved_bytes(recomputed) + beside, sizes.forward_working)

    @property
    def message_bytes(self) -> int:
        """Queued messages and messages in flight, beside the inputs counted as activations."""
        shape = self.shape
        if shape.num_stages == 1:
            return 0
        if shape.is_one_way(self.stage):
            return (1 + shape.max_sends) * self.sizes.input
        ahead = shape.run_ahead if self.stage == shape.first_trainable else 0
        return (2 + shape.max_sends + ahead) * self.sizes.input

    def least_recomputation(self, *, limit: float) -> Recomputed:
        """With which model state, and the larger of activations with messages and the optimizer's work, take at most
        ``limit`` bytes of a rank in the block's phase; all layers where that does not fit either."""
        matrices, core = pass_products(self.state.shape, sequence=self.sequence)
        rank = self.state.largest_rank(self.stage, self.block)

        def fits(choice: Recomputed) -> bool:
            return replace(rank, activations=self.peak_bytes(choice) + self.message_bytes).total <= limit

        numbers = self.partition.num_behind_prefix(self.stage, self.block)
        return least_recomputation(numbers, fits, core_share=core / (matrices + core))

    def _virtual(self, chunk: int) -> int:
        return chunk * self.partition.num_stages + self.stage

    def _has_head(self, chunk: int) -> bool:
        return self._virtual(chunk) == self.partition.num_virtual_stages - 1

    def _layers(self, chunk: int, recomputed: Recomputed) -> list[tuple[int, int]]:
        """What each layer after the prefix saves, and what its backward pass holds beside it."""
        sizes, is_selective, layers = self.sizes, recomputed.granularity == "selective", []
        for number, is_updated in enumerate(self.partition.behind_prefix[self._virtual(chunk)][self.block]):
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


@cache
def microbatches_in_flight(shape: PlanShape, stage: int) -> tuple[tuple[int, ...], ...]:
    """Numbers of microbatches, by chunk, whose activations an interleaved stage keeps together; those
    that no other exceeds."""
    kept, found = [0] * shape.num_chunks, {(0,) * shape.num_chunks}
    for action in build_plan(shape).stages[stage]:
        if action.kind is Kind.FORWARD:
            kept[action.chunk] += 1
            found.add(tuple(kept))
        elif action.kind.is_backward:
            kept[action.chunk] -= 1
    return tuple(one for one in sorted(found) if not any(one != other and all(map(le, one, other)) for other in found))
