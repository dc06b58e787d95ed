"""Estimate the activations that autograd saves, a layer's working memory, and the least recomputation that fits.

The formulas count bytes of Megatron Core's local layers without dropout, as `model.builder` builds them on a GPU.
Fused attention saves query, key, value and output; RMSNorm, rotation and the element-wise functions of the MLP are
fused. A layer of the suffix saves what its input gradient needs: no input of a linear layer. A layer of the prefix
saves nothing. A CPU fuses none of these and saves more for a LLaMA.

The planner (`memory`) and the trainer's --recompute auto (`run_state`) both use `StageActivations`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import mul
from typing import Any

from megatron.bcd.config import LOSS_CHUNK, LOSS_PARTS, RunConfig
from megatron.bcd.pipeline.build import build_plan, host_passes, kept_passes, max_graphs
from megatron.bcd.pipeline.plan import Kind, PlanShape
from megatron.bcd.planner.cost import fp8_matrices, pass_products
from megatron.bcd.planner.state import ModelState, largest_rank

_MOST_ROUNDS = 4
"""Microbatches per stage after which the activations of an interleaved plan have reached their peak."""


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes of one microbatch, by kind of layer."""

    active: int
    suffix: int  # saved by a frozen layer that passes a gradient back
    input: int  # a layer's input, which full recomputation saves; also the size of a message between stages
    head: int  # saved by final norm, head and loss
    active_core: int  # the part of `active` that is not saved if the core of attention is recomputed
    suffix_core: int
    active_working: int  # temporary memory of an active layer's backward pass: gradients, and one weight's gradient
    suffix_working: int
    head_working: tuple[int, int]  # temporary memory of head and loss, with the head frozen and active
    head_weight: int  # the gradient of the head's weight, before it is added to the buffer
    forward_working: int  # temporary memory of a prefix layer's forward pass


def layer_bytes(config: RunConfig, state: ModelState) -> LayerBytes:
    """Return the bytes of the tokens of a rank in one microbatch."""
    shape, element, tensor_size = state.shape, state.budget.weight, config.tensor_size
    sequence, context_size = config.model.seq_length, config.context_size
    tokens = config.training.micro_batch_size * sequence // context_size
    hidden, ffn = shape.hidden_size, shape.active_ffn // tensor_size
    vocabulary = state.padded_vocabulary // tensor_size
    head, head_working = _head_bytes(tokens, hidden, vocabulary, element, linear_loss=config.has_linear_loss)
    common: dict[str, Any] = {"input": tokens * hidden * element, "head": head, "head_working": head_working}
    common["head_weight"] = vocabulary * hidden * element
    has_masks = config.data.reset_attention_mask and not config.can_attend_by_text
    mask = sequence * has_masks  # elements of a token: each layer converts the mask to numbers that it adds to scores
    if (measured := shape.measured) is not None:  # the mean layer, in breadth-first order the largest
        saved, factor = measured.largest if config.is_breadth_first else measured.mean, tokens * element / 2  # in bf16
        common |= {name: round(factor * (saved(name) + 2 * mask)) for name in ("active", "suffix")}
        working = ("active_working", "suffix_working", "forward_working")
        common |= {name: round(factor * measured.largest(name)) for name in working}
        common["active_working"] += round(element / 2 * measured.largest("weight_working"))
        return _with_fp8(LayerBytes(**common, active_core=0, suffix_core=0), state, tokens)
    query, key_value = shape.query_size // tensor_size, shape.key_value_size // tensor_size
    # query, key, value and context are twice this; in fp32 and with masks attention repeats keys and values for each
    # query of a group
    heads = query + (query if element == 4 or has_masks else key_value)
    # in fp32: the logarithm of the sum of each row of scores
    attention = int(config.transformer["num_attention_heads"]) // tensor_size
    if shape.gated:
        # norm input and output, query-key-value, rotated query and key, context, the second norm's; gate, up, product
        active, suffix = 4 * hidden + 3 * heads + 3 * ffn, 2 * hidden + 3 * heads + 2 * ffn
    else:
        # norm input and output, query-key-value, context, the second norm's; before and after GELU
        active, suffix = 4 * hidden + 2 * heads + 2 * ffn, 2 * hidden + 2 * heads + ffn
    if shape.qk_norm_size:  # the norms keep copies of queries and keys
        active, suffix = active + heads, suffix + heads
    router = 0  # bytes of a token: its experts' numbers and probabilities, and the probabilities of all
    if (experts := shape.experts) is not None:
        # copies of a token for its experts; the router's input; without a fused kernel, products before their weighting
        share, routed = sum(experts.layers) / shape.num_layers, experts.per_token
        width = experts.ffn_hidden_size // state.config.expert_tensor_size * (not shape.gated)
        active += round(share * routed * (hidden + width))
        suffix += round(share * (hidden + routed * width))
        router = round(share * (routed * (20 + element) + experts.number * (1 + element)))
    # with context parallelism: key and value of whole sequences, and the contexts of both chunks beside the whole one
    split = 2 * context_size * (heads - query) + query if context_size > 1 else 0
    is_unfused = config.transformer.get("attention_backend") == "unfused"
    scores = sequence * attention * (1 if shape.gated else 2) if is_unfused else mask
    projections = 2 if shape.gated else 1
    routing = _routing_elements(state)
    sizes = LayerBytes(
        **common,
        active=tokens * ((active + split + scores) * element + 4 * attention + router),
        suffix=tokens * ((suffix + split + scores) * element + 4 * attention + router),
        active_core=tokens * (scores * element + 4 * attention),
        suffix_core=tokens * ((scores + query) * element + 4 * attention),
        active_working=_active_working(state, tokens),
        suffix_working=tokens * max(hidden + (1 + projections) * ffn, routing) * element,
        forward_working=tokens * (2 * hidden + (1 + projections) * ffn + routing) * element,
    )
    return _with_fp8(sizes, state, tokens)


def _with_fp8(sizes: LayerBytes, state: ModelState, tokens: int) -> LayerBytes:
    """Return the bytes with FP8 products: rounded input, output gradient and weight of a product, of a byte each.

    In breadth-first order the weights of a chunk have copies, in the backward pass two.
    """
    if not state.config.fp8_products or not (matrices := fp8_matrices(state.shape)):
        return sizes
    split = state.config.tensor_size
    rounding = max(tokens * (rows + columns) + rows * columns // split for rows, columns in matrices)
    copies = 0
    if state.config.is_breadth_first:
        copies = max(map(len, state.chunks)) * sum(map(mul, *zip(*matrices, strict=True))) // split
    return replace(
        sizes,
        active_working=sizes.active_working + rounding + 2 * copies,
        suffix_working=sizes.suffix_working + rounding + 2 * copies,
        forward_working=sizes.forward_working + rounding + copies,
    )


def _active_working(state: ModelState, tokens: int) -> int:
    """Return the largest temporary memory of an active layer, in bytes.

    That of experts' forward pass, or of the backward pass through the second linear layer, the activation, and the
    first linear layer; the gradient of a weight is added to the buffer before the next one begins.
    """
    shape, config, element = state.shape, state.config, state.budget.weight
    hidden, ffn, projections = shape.hidden_size, shape.active_ffn // config.tensor_size, 1 + shape.gated
    rows = ffn
    if (experts := shape.experts) is not None and experts.is_grouped:  # the gradients of all experts are one tensor
        rows = max(ffn, experts.number // config.expert_size * experts.ffn_hidden_size // config.expert_tensor_size)
    weight = hidden * rows * element
    return max(
        tokens * _routing_elements(state) * element,
        tokens * (hidden + ffn) * element + weight,
        tokens * (hidden + projections * ffn) * element,
        tokens * (2 * hidden - ffn) * element + projections * weight,
    )


def _routing_elements(state: ModelState) -> int:
    """Return the elements of a token that only the forward pass of its experts needs.

    Copies of the token: as sent; as received, if ranks divide the experts; results of the experts, before and after
    they are sorted.
    """
    if (experts := state.shape.experts) is None:
        return 0
    return (3 + (state.config.expert_size > 1)) * experts.per_token * state.shape.hidden_size


def _head_bytes(
    tokens: int, hidden: int, vocabulary: int, element: int, *, linear_loss: bool
) -> tuple[int, tuple[int, int]]:
    """Return the bytes that final norm, head and loss save, and their temporary memory: head frozen, head active."""
    weight, converted = vocabulary * hidden * element, 0 if element == 4 else element
    if linear_loss:  # norm input and output, and the gradient that the forward pass computes; logits of a few tokens
        logits_of_token = vocabulary * (4 + converted)
        logits = min(tokens, LOSS_CHUNK) * logits_of_token
        beside_weight = min(tokens, LOSS_CHUNK // LOSS_PARTS) * logits_of_token
        return tokens * (3 * hidden * element + 12), (logits, max(logits, beside_weight + weight))
    # the gradient of 16-bit logits, beside that of the loss's fp32 logits, which is freed before the head's pass
    logits = tokens * vocabulary * converted
    passes = tokens * hidden * element - logits
    return tokens * (2 * hidden * element + 4 * vocabulary), (max(logits, passes), max(logits, passes + weight))


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """The recomputation in the backward passes of a stage in one phase. Prefix layers save nothing anyway."""

    granularity: str = "none"
    """none; selective: the core of attention in every layer; full: whole layers."""
    layers: tuple[int, ...] = ()
    """With full: by chunk, how many of the first layers after the prefix are recomputed."""

    def num_whole(self, chunk: int) -> int:
        """Return how many layers of the chunk are recomputed whole."""
        return self.layers[chunk] if self.layers else 0


def least_recomputation(numbers: Sequence[int], fits: Callable[[Recomputed], bool], *, core_share: float) -> Recomputed:
    """Return the least recomputation that fits.

    It is nothing, the core of attention in every layer, or the first few whole layers. Of the last two, the one with
    less work is chosen. If nothing fits, all layers are recomputed. The first layers of the first chunks come first,
    because their activations are kept longest.

    Args:
        numbers: layers after the prefix, by chunk.
        core_share: part of a layer's arithmetic that is the core of attention.
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

    config: RunConfig
    state: ModelState
    sizes: LayerBytes
    shape: PlanShape
    stage: int
    block: int

    def saved_bytes(self, recomputed: Recomputed) -> int:
        """Return the bytes that autograd saves for all microbatches in flight."""
        chunk_bytes = [sum(saved for saved, _ in layers) for layers in self._chunks(recomputed)]
        chunk_bytes[-1] += self.sizes.head * self._is_last_stage
        if self.config.is_breadth_first:
            return max(chunk_bytes)
        if self.shape.num_chunks == 1:
            return chunk_bytes[0] * max_graphs(self.shape, self.stage)
        number = min(self.shape.num_microbatches, _MOST_ROUNDS * self.shape.num_stages)
        in_flight = microbatches_in_flight(replace(self.shape, num_microbatches=number), self.stage)
        totals = (sum(map(mul, chunk_bytes, numbers)) for numbers in in_flight)
        return max(map(int, totals))

    def peak_bytes(self, recomputed: Recomputed) -> int:
        """Return the saved bytes plus the largest temporary memory of a microbatch's passes."""
        if self.config.is_breadth_first:
            return max(self.chunk_peaks(recomputed))
        chunks, partition, waiting = self._chunks(recomputed), self.state.partition, 0
        if partition.tied and partition.num_virtual_stages == 1:  # the head's gradient waits for the embedding's
            waiting = self.sizes.head_weight * partition.head_active(self.block)
        working = (
            self._working(layers, has_head=self._is_last_stage and number == len(chunks), waiting=waiting)
            for number, layers in enumerate(chunks, 1)
        )
        return max(self.saved_bytes(recomputed) + max(working), self.sizes.forward_working)

    def _working(self, layers: Sequence[tuple[int, int]], *, has_head: bool, waiting: int = 0) -> int:
        """Return the largest temporary memory of a microbatch's backward pass through a chunk, less what it has freed
        before; `waiting` is the gradient that it does not free."""
        largest = self.sizes.head_working[self.state.partition.head_active(self.block)] if has_head else 0
        freed = self.sizes.head * has_head - waiting
        for saved, working in reversed(layers):
            largest = max(largest, working - freed)
            freed += saved
        return largest

    # --bcd-schedule breadth-first: a microbatch has the activations of one chunk

    @property
    def num_saved_inputs(self) -> int:
        """The stage's chunks whose inputs wait for the backward pass. The first chunk of the model reads tokens, and
        recomputes the embedding."""
        first, stages = max(self.shape.first_trainable, 1), self.shape.num_stages
        return len(range(first, self.shape.num_virtual)[(self.stage - first) % stages :: stages])

    def input_bytes(self, place: str) -> int:
        """Return the bytes of the inputs that wait in `place`, device or host.

        On the way back the gradient of an input replaces it. With --bcd-saved-inputs host the device has those of one
        chunk, and two that are copied back.
        """
        size, of_chunk = self.sizes.input, min(self.num_saved_inputs, 1) * self.shape.num_microbatches
        number = self.num_saved_inputs * self.shape.num_microbatches
        # activations in host memory have their inputs with them
        kept, on_host = (len(passes(self.shape, self.stage)) for passes in (kept_passes, host_passes))
        if self.config.bcd.bcd_saved_inputs == "host":  # auto counts as device
            if place == "host":
                return size * max(0, number - of_chunk - kept - on_host)
            return size * (of_chunk + kept + 2)
        return size * max(number - on_host, of_chunk) * (place == "device")

    def kept_bytes(self, recomputed: Recomputed) -> int:
        """Return the bytes of the passes that are not repeated, without their inputs, which `input_bytes` has."""
        passes = kept_passes(self.shape, self.stage)
        return self._passes_bytes(passes, recomputed) - self.sizes.input * len(passes)

    def host_bytes(self, recomputed: Recomputed) -> int:
        """Return the bytes of page-locked memory for activations."""
        return self._passes_bytes(host_passes(self.shape, self.stage), recomputed)

    def _passes_bytes(self, passes: Sequence[tuple[int, int]], recomputed: Recomputed) -> int:
        chunks = self._chunks(recomputed)
        kinds = Counter(chunks[chunk] for chunk, _ in passes)
        return sum(number * sum(saved for saved, _ in layers) for layers, number in kinds.items())

    def chunk_peaks(self, recomputed: Recomputed) -> list[int]:
        """Return the peak of a microbatch in each chunk beside `kept_bytes`: what autograd saves and the largest
        temporary memory.

        The chunk with the head runs while all kept activations wait. Others run backward from them, or behind those
        that do. Where activations wait in host memory, those of two microbatches are on the device, as a whole until
        the end of the backward pass.
        """
        chunks, kept = self._chunks(recomputed), self.kept_bytes(recomputed)
        on_host = {chunk for chunk, _ in host_passes(self.shape, self.stage)}

        @cache  # most chunks are alike
        def peak(layers: tuple[tuple[int, int], ...], has_head: bool, is_on_host: bool) -> int:
            saved = sum(saved for saved, _ in layers) + self.sizes.head * has_head
            peak = saved + self._working(layers, has_head=has_head) - min(kept, saved) * (not has_head)
            if is_on_host:
                peak = max(peak, 2 * saved + max(working for _, working in layers) - kept)
            return max(peak, self.sizes.forward_working)

        return [
            peak(layers, self._is_last_stage and number == len(chunks), number - 1 in on_host)
            for number, layers in enumerate(chunks, 1)
        ]

    def _chunks(self, recomputed: Recomputed) -> list[tuple[tuple[int, int], ...]]:
        """Return what each layer after the prefix saves, and the temporary memory of its backward pass, by chunk."""
        chunks = self.state.passes.behind_prefix[self.stage :: self.shape.num_stages]
        of = cache(self._layers)  # most chunks are alike
        return [of(each[self.block], recomputed, recomputed.num_whole(chunk)) for chunk, each in enumerate(chunks)]

    @property
    def message_bytes(self) -> int:
        """Return the bytes of messages in queues and in flight, in addition to inputs that count as activations."""
        shape = self.shape
        if shape.num_stages == 1:
            return 0
        if shape.is_one_way(self.stage):
            return (1 + shape.max_sends) * self.sizes.input
        ahead = shape.run_ahead if self.stage == shape.first_trainable else 0
        return (2 + shape.max_sends + ahead) * self.sizes.input

    def least_recomputation(self, *, limit: float) -> Recomputed:
        """Return the least recomputation with which a rank's peak is at most ``limit`` bytes; all layers if none is."""
        matrices, core = pass_products(self.state.shape, sequence=self.config.model.seq_length)
        rank = largest_rank(self.state, self.stage, self.block)

        def fits(choice: Recomputed) -> bool:
            return replace(rank, activations=self.peak_bytes(choice) + self.message_bytes).total <= limit

        numbers = self.state.partition.num_behind_prefix(self.stage, self.block)
        return least_recomputation(numbers, fits, core_share=core / (matrices + core))

    @property
    def _is_last_stage(self) -> bool:
        return self.stage == self.shape.num_stages - 1

    def _layers(self, updated: Sequence[bool], recomputed: Recomputed, num_whole: int) -> tuple[tuple[int, int], ...]:
        """Return the entries of `_chunks` of these layers, of which the first `num_whole` are recomputed whole."""
        sizes, is_selective, layers = self.sizes, recomputed.granularity == "selective", []
        for number, is_updated in enumerate(updated):
            whole, core, working = (
                (sizes.active, sizes.active_core, sizes.active_working)
                if is_updated
                else (sizes.suffix, sizes.suffix_core, sizes.suffix_working)
            )
            if number < num_whole:
                layers.append((sizes.input, whole + working))
            else:
                layers.append((whole - core * is_selective, core * is_selective + working))
        return tuple(layers)


@cache
def microbatches_in_flight(shape: PlanShape, stage: int) -> tuple[tuple[int, ...], ...]:
    """Return, by chunk, how many microbatches' activations an interleaved stage stores at the same time, after each
    forward pass."""
    kept, moments = [0] * shape.num_chunks, {(0,) * shape.num_chunks}
    for action in build_plan(shape).stages[stage]:
        if action.kind is Kind.FORWARD:
            kept[action.chunk] += 1
            moments.add(tuple(kept))
        elif action.kind.is_backward:
            kept[action.chunk] -= 1
    return tuple(moments)
