"""Memory of every rank in every phase.

Matrices of layers that are stepped without Megatron Core's optimizer are as in `optim.matrix_optimizer`: each has one
of the ranks with the same weights as its owner, which alone holds momentum and low bits, and computes the update.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from megatron.bcd.blocks.ownership import matrix_owners, matrix_stacks
from megatron.bcd.pipeline.plan import PlanShape, steady_shape
from megatron.bcd.planner.activations import (
    MOST_ROUNDS,
    LayerCounts,
    Recomputed,
    StageActivations,
)
from megatron.bcd.planner.cost import (
    DTYPE_BYTES,
    OFFLOADED_BYTES,
    ModelShape,
    host_state_bytes,
    newton_schulz_flops,
    state_budget,
)
from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.tables import GIB
from megatron.bcd.planner.tensors import Buffer, Tensor, buffer_of, stage_tensors

STEP_COUNTER_BYTES = 4
"""PyTorch's Adam has one step counter per parameter that the rank holds a part of."""
_ARENA_ALIGNMENT = 128
"""Elements (`model.frozen_weights`)."""
_LOW_BIT_CHUNK = 2**22
"""Elements whose moments are decoded at once on a GPU (`optim.low_bit_adam`)."""

_WORKING_BYTES, _WORKING_BYTES_COPIED = 12, 17
"""Per element of what is updated at a time: gradient, update and value in fp32; and with copies of weights, low bits
and momentum where several matrices are joined, or of queries, keys and values."""
_STATELESS_PASSES, _MUON_PASSES = 17, 27
"""4-byte elements read or written per parameter in one step, outside the products of the orthogonalisation: norm and
copies of the gradient, scaling, weight decay, update; with a momentum also its update and Nesterov's mean."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank in one phase, from the second cycle on."""

    stage: int
    block: int
    weights: int  # with the padding of the buffers in which the phases leave their blocks
    gradients: int
    optimizer: int
    """Moments, main parameters and step counters of the rank's shard, Muon's momenta and low bits of the matrices that
    it owns; 0 if they are on the host."""
    activations: int
    optimizer_work: int
    """Temporary memory of PyTorch's Adam, or of the largest stack of matrices that is stepped without it, when
    activations are already freed."""
    communication: int
    framework: int

    @property
    def model_state(self) -> int:
        """Weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The peak."""
        moving = max(self.activations + self.communication, self.optimizer_work)
        return self.model_state + moving + self.framework


def stage_buffers(recipe: Recipe, stage: int) -> tuple[Buffer, ...]:
    """The buffer of each phase of a stage, by block."""
    return tuple(buffer for buffer, _ in _stage_weights(recipe)[stage])


def _stage_weights(recipe: Recipe) -> tuple[tuple[tuple[Buffer, int], ...], ...]:
    """By stage and block: the buffer, and the elements of all weights with the padding of buffers."""
    return _weights(recipe.shape, recipe.layer_counts, recipe.padded_vocabulary, recipe.num_replicas, recipe.is_muon)


@lru_cache(maxsize=1024)  # a search needs the same buffers for every micro-batch size
def _weights(
    shape: ModelShape, counts: LayerCounts, padded_vocabulary: int, num_replicas: int, is_muon: bool
) -> tuple[tuple[tuple[Buffer, int], ...], ...]:
    partition, stages = counts.partition, []
    for stage in range(partition.num_stages):
        tensors = stage_tensors(shape, partition, stage, padded_vocabulary=padded_vocabulary)
        held = [
            [tensor for tensor in tensors if tensor.is_active(block.index) and not (is_muon and tensor.parts)]
            for block in partition.blocks
        ]
        buffers = [buffer_of(each, num_ranks=num_replicas) for each in held]
        everything = sum(tensor.size for tensor in tensors)
        padding = [
            buffer.size - sum(tensor.size for tensor in each) for each, buffer in zip(held, buffers, strict=True)
        ]
        if not partition.always_active:  # else a buffer ends with its phase
            padding = [sum(padding)] * len(padding)
        stages.append(tuple((buffer, everything + more) for buffer, more in zip(buffers, padding, strict=True)))
    return tuple(stages)


@dataclass(frozen=True, kw_only=True)
class StreamedLayers:
    """The layers of a stage that --bcd-frozen-weights host takes, without what is active in every phase."""

    sizes: tuple[int, ...]
    """Elements, in order."""
    padded: int
    """Of one: as it lies in the arena and in a buffer."""
    is_active: tuple[tuple[bool, ...], ...]
    """By block, of each layer."""

    def num_held(self, block: int, resident: int) -> int:
        """Frozen layers that the device holds in the block's phase, buffers included."""
        frozen = self.is_active[block].count(False)
        return min(frozen, resident + 2) if frozen > resident else frozen

    def device_elements(self, block: int, resident: int) -> int:
        active = sum(size for size, is_active in zip(self.sizes, self.is_active[block], strict=True) if is_active)
        return active + self.num_held(block, resident) * self.padded


@lru_cache(maxsize=1024)
def _streamed(shape: ModelShape, counts: LayerCounts, stage: int) -> StreamedLayers:
    partition, by_layer = counts.partition, dict[int, list[Tensor]]()
    for tensor in stage_tensors(shape, partition, stage, padded_vocabulary=1):
        if tensor.owned.layer is not None and not tensor.owned.is_always_active:
            by_layer.setdefault(tensor.owned.layer, []).append(tensor)
    layers = list(by_layer.values())
    return StreamedLayers(
        sizes=tuple(sum(tensor.size for tensor in layer) for layer in layers),
        padded=sum(-(-tensor.size // _ARENA_ALIGNMENT) * _ARENA_ALIGNMENT for tensor in layers[0]) if layers else 0,
        is_active=tuple(
            tuple(any(tensor.is_active(block.index) for tensor in layer) for layer in layers)
            for block in partition.blocks
        ),
    )


def streamed_layers(recipe: Recipe, stage: int) -> StreamedLayers:
    return _streamed(recipe.shape, recipe.layer_counts, stage)


def _weight_elements(recipe: Recipe, stage: int, block: int) -> int:
    """On the device, with the padding of buffers."""
    buffer, elements = _stage_weights(recipe)[stage][block]
    if not recipe.is_streamed:
        return elements
    tensors = stage_tensors(recipe.shape, recipe.partition, stage, padded_vocabulary=recipe.padded_vocabulary)
    active = sum(tensor.size for tensor in tensors if tensor.is_active(block))
    layers = streamed_layers(recipe, stage)
    outside = sum(tensor.size for tensor in tensors) - sum(layers.sizes)
    return outside + layers.device_elements(block, recipe.resident_layers or 0) + buffer.size - active


def schedule_shape(recipe: Recipe, block: int) -> PlanShape:
    """The pipeline schedule in the middle of the block's phase."""
    return steady_shape(recipe.partition, block, num_microbatches=recipe.num_microbatches, head=recipe.head_passes)


def stage_activations(recipe: Recipe, stage: int, block: int) -> StageActivations:
    shape = schedule_shape(recipe, block)
    if shape.num_chunks > 1:
        shape = replace(shape, num_microbatches=min(shape.num_microbatches, MOST_ROUNDS * shape.num_stages))
    return StageActivations(counts=recipe.layer_counts, sizes=recipe.layer_bytes, shape=shape, stage=stage, block=block)


def rank_memory(recipe: Recipe, *, replica: int = 0) -> tuple[RankMemory, ...]:
    """One rank per stage in every phase, ordered by stage, then by block."""
    choices, ranks = recomputation(recipe), []
    for stage, block in product(range(recipe.pipeline_size), range(recipe.partition.num_blocks)):
        one = stage_activations(recipe, stage, block)
        state = _without_activations(recipe, stage, block, replica)
        activations = one.peak_bytes(choices[stage][block])
        ranks.append(replace(state, activations=activations, communication=one.message_bytes))
    return tuple(ranks)


def _without_activations(recipe: Recipe, stage: int, block: int, replica: int) -> RankMemory:
    budget = state_budget(precision=recipe.precision, adam_moments_dtype=recipe.adam_moments_dtype)
    is_on_host, is_fp32 = recipe.method == "offload", recipe.adam_moments_dtype == "fp32"
    buffer, _ = _stage_weights(recipe)[stage][block]
    held, share = buffer.held[replica], matrix_share(recipe, stage, block, replica)
    of_adam = int(budget.optimizer * held) + STEP_COUNTER_BYTES * buffer.pieces[replica] * is_fp32
    # with moments in fewer bits Adam steps a part of a parameter at a time
    adam_work = 4 * held if is_fp32 else 16 * min(held, _LOW_BIT_CHUNK)
    return RankMemory(
        stage=stage,
        block=block,
        weights=budget.weight * _weight_elements(recipe, stage, block),
        gradients=budget.gradient * buffer.size + share.gradients,
        optimizer=0 if is_on_host else of_adam + share.state,
        activations=0,
        optimizer_work=0 if is_on_host else max(adam_work, share.working),
        communication=0,
        framework=int(recipe.cluster.framework_gib * GIB),
    )


@lru_cache(maxsize=256)
def recomputation(recipe: Recipe) -> tuple[tuple[Recomputed, ...], ...]:
    """What is recomputed, by stage and block: as the recipe says, or with auto the least that fits."""
    blocks = range(recipe.partition.num_blocks)
    return tuple(tuple(_recomputed(recipe, stage, block) for block in blocks) for stage in range(recipe.pipeline_size))


def _recomputed(recipe: Recipe, stage: int, block: int) -> Recomputed:
    numbers = recipe.layer_counts.after_prefix(stage, block)
    if recipe.recompute == "none" or not any(numbers):
        return Recomputed()
    if recipe.recompute == "full":
        return Recomputed(granularity="full", layers=tuple(numbers))
    # ranks differ by less than a parameter's shard
    largest = max(range(recipe.num_replicas), key=lambda rank: stage_buffers(recipe, stage)[block].held[rank])
    rank = _without_activations(recipe, stage, block, largest)
    return stage_activations(recipe, stage, block).least_recomputation(
        recipe.shape,
        sequence=recipe.tokens,
        state=rank.model_state + rank.framework,
        optimizer_work=rank.optimizer_work,
        limit=recipe.memory_share * recipe.cluster.memory_gib * GIB,
    )


def host_bytes(recipe: Recipe) -> int:
    """Host memory of one rank: with method offload weights, gradients and moments; else offloaded momenta, what 16-bit
    weights lack of main parameters (--bcd-main-params host), and its share of a node's frozen weights."""
    stages = range(recipe.pipeline_size)
    if recipe.method == "offload":
        return OFFLOADED_BYTES * max(max(stage_buffers(recipe, stage)[0].held) for stage in stages)
    ranks, blocks = range(recipe.num_replicas), range(recipe.partition.num_blocks)
    kept = max(matrix_share(recipe, *place).kept for place in product(stages, blocks, ranks))
    if recipe.is_streamed:
        largest = max(len(layers.sizes) * layers.padded for layers in (streamed_layers(recipe, one) for one in stages))
        kept += recipe.bytes_per_element * largest // min(recipe.num_replicas, recipe.gpus_per_node)
    # main parameters of stateless updates are on the device
    if len(blocks) == 1 or recipe.bcd.bcd_resting_update != "none":
        return kept
    return kept + max(_offloaded_main_params(recipe, stage) for stage in stages)


def _offloaded_main_params(recipe: Recipe, stage: int) -> int:
    tensors = stage_tensors(recipe.shape, recipe.partition, stage, padded_vocabulary=recipe.padded_vocabulary)
    kept = (each.size for each in tensors if each.owned.block is not None and not each.owned.is_always_active)
    return host_state_bytes(
        num_kept=sum(kept),
        precision=recipe.precision,
        moments=0,
        data_parallel_size=recipe.num_replicas,
        distributed_optimizer=True,
    )


def peak(ranks: tuple[RankMemory, ...]) -> RankMemory:
    """The rank and phase with the largest peak."""
    return max(ranks, key=lambda rank: rank.total)


def fits(recipe: Recipe, *, share: float = 1.0) -> bool:
    """Whether every rank's peak is within this share of its GPU's memory. With auto: if all layers are recomputed."""
    if recipe.recompute == "auto":
        recipe = replace(recipe, recompute="full")
    return peak(rank_memory(recipe)).total <= share * recipe.cluster.memory_gib * GIB


# ---------------------------------------------------------------- matrices without Megatron Core's optimizer


@dataclass(frozen=True, kw_only=True)
class MatrixShare:
    """A rank's share of a stage's matrices in one phase, by default without matrices to step."""

    gradients: int = 0  # bytes, of all matrices that are stepped: also of those that other ranks own
    state: int = 0  # bytes of momenta, and of the 16 bits that bf16 weights lack
    kept: int = 0  # bytes of momenta of other blocks, in host memory
    working: int = 0  # bytes of temporary memory while the largest own stack of matrices is updated
    orthogonalization: int = 0  # operations
    traffic: int = 0  # bytes of element-wise work
    messages: int = 0  # bytes of gradients that go to their owners, and of weights that come back


_shares: dict[tuple[object, ...], list[MatrixShare]] = {}
"""Of all ranks, by what they depend on: a search asks for the same ones again."""


def matrix_share(recipe: Recipe, stage: int, block: int, replica: int) -> MatrixShare:
    """The share of one rank."""
    if not recipe.is_muon and recipe.bcd.bcd_resting_update == "none":
        return MatrixShare()
    key = (recipe.shape, recipe.layer_counts, recipe.num_replicas, recipe.method, recipe.precision, stage, block)
    if key not in _shares:
        tensors = stage_tensors(recipe.shape, recipe.partition, stage, padded_vocabulary=recipe.padded_vocabulary)
        matrices = [tensor for tensor in tensors if tensor.parts]
        owners = matrix_owners([tensor.size for tensor in matrices], recipe.num_replicas)
        ranks = range(recipe.num_replicas)
        _shares[key] = [_share(recipe, matrices, [owner == rank for owner in owners], block) for rank in ranks]
    return _shares[key][replica]


def _share(recipe: Recipe, matrices: list[Tensor], is_own: list[bool], block: int) -> MatrixShare:
    bcd = recipe.bcd
    muon_gradient, stateless_gradient = DTYPE_BYTES[bcd.muon_grad_dtype], DTYPE_BYTES[bcd.bcd_resting_grad_dtype]
    momentum = DTYPE_BYTES[bcd.muon_momentum_dtype] if recipe.is_muon else 0
    low_bits = 2 if recipe.precision == "bf16" else 0
    total, updated = Counter[str](), []
    for tensor, own in zip(matrices, is_own, strict=True):
        is_active = tensor.is_active(block)
        is_stepped = is_active and recipe.is_muon or tensor.is_stateless(block)
        if is_stepped:
            gradient = muon_gradient if is_active else stateless_gradient
            total["gradients"] += gradient * tensor.size
            total["messages"] += (gradient + recipe.bytes_per_element) * tensor.size * (recipe.num_replicas > 1)
        if not own:
            continue
        total["state"] += (low_bits + momentum * is_active) * tensor.size
        if not is_active and recipe.partition.has_active_block and bcd.bcd_optimizer_state == "host":
            total["kept"] += momentum * tensor.size
        if is_stepped:
            updated.append(tensor)
            total["traffic"] += 4 * (_MUON_PASSES if is_active else _STATELESS_PASSES) * tensor.size
            if is_active or bcd.bcd_resting_update == "orthogonal":
                total["orthogonalization"] += sum(newton_schulz_flops(*part) for part in tensor.parts)
    keys = [(tensor.is_active(block), tensor.parts) for tensor in updated]
    for stack in matrix_stacks(keys, [tensor.size for tensor in updated]):
        first = updated[stack[0]]
        is_copied = len(stack) > 1 or len(first.parts) > 1
        working = (_WORKING_BYTES_COPIED if is_copied else _WORKING_BYTES) * len(stack) * first.size
        total["working"] = max(total["working"], working)
    return MatrixShare(**total)
