"""Memory of every rank in every phase."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron.bcd.pipeline.build import PlanShape, bcd_shape, default_run_ahead
from megatron.bcd.planner.activations import layer_bytes, stage_activations, stage_messages
from megatron.bcd.planner.cost import OFFLOADED_BYTES, ModelShape, state_budget
from megatron.bcd.planner.recipe import LayerCounts, Recipe
from megatron.bcd.planner.tables import GIB
from megatron.bcd.planner.tensors import Buffer, Tensor, buffer_of, stage_tensors

STEP_COUNTER_BYTES = 4
"""PyTorch's Adam has one step counter per parameter that the rank holds a part of."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank in one phase, from the second cycle on."""

    stage: int
    block: int
    weights: int
    """With the padding of the buffers in which the phases leave their blocks."""
    gradients: int
    optimizer: int
    """Moments, main parameters and step counters of the rank's shard; 0 if they are on the host."""
    activations: int
    optimizer_work: int
    """Temporary memory of PyTorch's Adam during its step, when activations are already freed."""
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
    return _buffers(recipe.shape, recipe.layer_counts, recipe.padded_vocabulary, recipe.data_size)[stage]


@lru_cache(maxsize=1024)  # a search needs the same buffers for every micro-batch size
def _buffers(
    shape: ModelShape, cut: LayerCounts, padded_vocabulary: int, data_size: int
) -> tuple[tuple[Buffer, ...], ...]:
    partition, stages = cut.partition, []
    for stage in range(partition.num_stages):
        active: list[list[Tensor]] = [[] for _ in partition.blocks]
        for tensor in stage_tensors(shape, partition, stage, padded_vocabulary=padded_vocabulary):
            if tensor.block is not None:
                active[tensor.block].append(tensor)
        stages.append(tuple(buffer_of(held, data_size=data_size) for held in active))
    return tuple(stages)


def phase_shape(recipe: Recipe, block: int) -> PlanShape:
    """Shape of the pipeline schedule in the middle of the block's phase."""
    partition = recipe.partition
    first_trainable = partition.first_trainable_stage(block)
    ahead = min(
        default_run_ahead(num_stages=partition.num_stages, first_trainable=first_trainable), recipe.num_microbatches
    )
    return bcd_shape(
        num_stages=partition.num_stages,
        num_microbatches=recipe.num_microbatches,
        first_trainable=first_trainable,
        active=[partition.stage_active(block, stage) for stage in range(partition.num_stages)],
        done_ahead=ahead,
        run_ahead=ahead,
    )


def rank_memory(recipe: Recipe, *, data_rank: int = 0) -> tuple[RankMemory, ...]:
    """One rank per stage in every phase, ordered by stage, then by block."""
    budget = state_budget(precision=recipe.precision)
    is_on_host = recipe.method == "offload"
    shapes = [phase_shape(recipe, block.index) for block in recipe.partition.blocks]
    sizes, framework = layer_bytes(recipe), int(recipe.cluster.framework_gib * GIB)
    ranks = []
    for stage in range(recipe.pipeline_size):
        buffers = stage_buffers(recipe, stage)
        weights = budget.weight * sum(buffer.size for buffer in buffers)
        for block, (buffer, shape) in enumerate(zip(buffers, shapes, strict=True)):
            held, pieces = buffer.held[data_rank], buffer.pieces[data_rank]
            ranks.append(
                RankMemory(
                    stage=stage,
                    block=block,
                    weights=weights,
                    gradients=budget.gradient * buffer.size,
                    optimizer=0 if is_on_host else int(budget.optimizer) * held + STEP_COUNTER_BYTES * pieces,
                    activations=stage_activations(recipe, sizes, shape, stage, block),
                    optimizer_work=0 if is_on_host else 4 * held,
                    communication=stage_messages(sizes, shape, stage),
                    framework=framework,
                )
            )
    return tuple(ranks)


def host_bytes(recipe: Recipe) -> int:
    """Host memory of one rank's optimizer with method offload: weights, gradients, moments."""
    if recipe.method != "offload":
        return 0
    held = max(max(stage_buffers(recipe, stage)[0].held) for stage in range(recipe.pipeline_size))
    return OFFLOADED_BYTES * held


def peak(ranks: tuple[RankMemory, ...]) -> RankMemory:
    """The rank and phase with the largest peak."""
    return max(ranks, key=lambda rank: rank.total)


def fits(recipe: Recipe) -> bool:
    """Whether every rank's peak is within its GPU's memory."""
    return peak(rank_memory(recipe)).total <= recipe.cluster.memory_gib * GIB
