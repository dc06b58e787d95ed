"""Memory of every rank in every phase."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from megatron.bcd.pipeline.plan import PlanShape, steady_shape
from megatron.bcd.planner.activations import (
    MOST_ROUNDS,
    LayerCounts,
    Recomputed,
    StageActivations,
)
from megatron.bcd.planner.cost import OFFLOADED_BYTES, ModelShape, host_state_bytes, state_budget
from megatron.bcd.planner.matrices import matrix_share
from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.tables import GIB
from megatron.bcd.planner.tensors import Buffer, buffer_of, stage_tensors

STEP_COUNTER_BYTES = 4
"""PyTorch's Adam has one step counter per parameter that the rank holds a part of."""
_LOW_BIT_CHUNK = 2**22
"""Elements whose moments are decoded at once on a GPU (`optim.low_bit_adam`)."""


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
    buffer, elements = _stage_weights(recipe)[stage][block]
    held, share = buffer.held[replica], matrix_share(recipe, stage, block, replica)
    of_adam = int(budget.optimizer * held) + STEP_COUNTER_BYTES * buffer.pieces[replica] * is_fp32
    # with moments in fewer bits Adam steps a part of a parameter at a time
    adam_work = 4 * held if is_fp32 else 16 * min(held, _LOW_BIT_CHUNK)
    return RankMemory(
        stage=stage,
        block=block,
        weights=budget.weight * elements,
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
    """Host memory of one rank: with method offload weights, gradients and moments; else offloaded momenta, and what
    16-bit weights lack of main parameters (--bcd-main-params host)."""
    stages = range(recipe.pipeline_size)
    if recipe.method == "offload":
        return OFFLOADED_BYTES * max(max(stage_buffers(recipe, stage)[0].held) for stage in stages)
    ranks, blocks = range(recipe.num_replicas), range(recipe.partition.num_blocks)
    momenta = max(matrix_share(recipe, *place).kept for place in product(stages, blocks, ranks))
    # main parameters of stateless updates are on the device
    if len(blocks) == 1 or recipe.bcd.bcd_resting_update != "none":
        return momenta
    return momenta + max(_offloaded_main_params(recipe, stage) for stage in stages)


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
