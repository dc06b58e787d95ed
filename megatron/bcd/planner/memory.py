"""Memory of every rank of a recipe in every phase: model state, activations, messages, and what the host holds."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from itertools import product

from megatron.bcd.pipeline.plan import PlanShape, steady_shape
from megatron.bcd.planner.activations import Recomputed, StageActivations
from megatron.bcd.planner.cost import OFFLOADED_BYTES
from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.replica_groups import exchange_of
from megatron.bcd.planner.state import RankMemory
from megatron.bcd.planner.tables import GIB


def schedule_shape(recipe: Recipe, block: int) -> PlanShape:
    """The pipeline schedule in the middle of the block's phase."""
    return steady_shape(recipe.partition, block, num_microbatches=recipe.num_microbatches, head=recipe.head_passes)


def stage_activations(recipe: Recipe, stage: int, block: int) -> StageActivations:
    return StageActivations(
        state=recipe.state,
        sequence=recipe.tokens,
        sizes=recipe.layer_bytes,
        shape=schedule_shape(recipe, block),
        stage=stage,
        block=block,
    )


def rank_memory(recipe: Recipe, *, replica: int = 0) -> tuple[RankMemory, ...]:
    """One rank per stage in every phase, ordered by stage, then by block."""
    choices, framework, ranks = recomputation(recipe), int(recipe.cluster.framework_gib * GIB), []
    for stage, block in product(range(recipe.pipeline_size), range(recipe.partition.num_blocks)):
        one = stage_activations(recipe, stage, block)
        moving = {"activations": one.peak_bytes(choices[stage][block]), "communication": one.message_bytes}
        ranks.append(replace(recipe.state.rank(stage, block, replica), **moving, framework=framework))
    return tuple(ranks)


@lru_cache(maxsize=256)
def recomputation(recipe: Recipe) -> tuple[tuple[Recomputed, ...], ...]:
    """What is recomputed, by stage and block: as the recipe says, or with auto the least that fits."""
    blocks = range(recipe.partition.num_blocks)
    return tuple(tuple(_recomputed(recipe, stage, block) for block in blocks) for stage in range(recipe.pipeline_size))


def _recomputed(recipe: Recipe, stage: int, block: int) -> Recomputed:
    numbers = recipe.partition.num_behind_prefix(stage, block)
    if recipe.recompute == "none" or not any(numbers):
        return Recomputed()
    if recipe.recompute == "full":
        return Recomputed(granularity="full", layers=tuple(numbers))
    limit = recipe.memory_share * recipe.cluster.memory_gib * GIB - int(recipe.cluster.framework_gib * GIB)
    return stage_activations(recipe, stage, block).least_recomputation(limit=limit)


def host_bytes(recipe: Recipe) -> int:
    """Host memory of one rank: with method offload weights, gradients and moments; else offloaded momenta, what 16-bit
    weights lack of main parameters (--bcd-main-params host), and its share of a node's frozen weights; beside it what
    replica groups exchange."""
    exchange = exchange_of(recipe)
    return _kept_bytes(recipe) + (exchange.host_bytes if exchange else 0)


def _kept_bytes(recipe: Recipe) -> int:
    stages = range(recipe.pipeline_size)
    if recipe.method == "offload":
        return OFFLOADED_BYTES * max(max(buffers[0].held) for buffers in recipe.state.buffers)
    ranks, blocks = range(recipe.num_replicas), range(recipe.partition.num_blocks)
    kept = max(recipe.state.share(*place).kept for place in product(stages, blocks, ranks))
    if recipe.is_streamed:
        largest = max(
            len(layers.sizes) * layers.padded + recipe.state.embedding_on_host(stage)
            for stage, layers in enumerate(recipe.state.streamed)
        )
        kept += recipe.bytes_per_element * largest // min(recipe.num_replicas, recipe.gpus_per_node)
    # main parameters of stateless updates are on the device
    if len(blocks) == 1 or recipe.bcd.bcd_inactive_update != "none":
        return kept
    return kept + max(_offloaded_main_params(recipe, stage) for stage in stages)


def _offloaded_main_params(recipe: Recipe, stage: int) -> int:
    """In bf16, 2 bytes restore the main parameter; in fp16 it is kept whole. The one bf16 main parameter in some
    100,000 that is stored in full is not counted."""
    tensors = recipe.state.tensors[stage]
    kept = (each.size for each in tensors if each.owned.block is not None and not each.owned.is_always_active)
    return math.ceil({"fp32": 0, "bf16": 2, "fp16": 4}[recipe.precision] * sum(kept) / recipe.num_replicas)


def peak(ranks: tuple[RankMemory, ...]) -> RankMemory:
    """The rank and phase with the largest peak."""
    return max(ranks, key=lambda rank: rank.total)


def fits_on_host(recipe: Recipe) -> bool:
    """Whether a node's ranks have the host memory that they need, where it is limited."""
    limit = recipe.host_memory_gb
    return limit is None or recipe.gpus_per_node * host_bytes(recipe) <= 1e9 * limit


def fits(recipe: Recipe, *, share: float = 1.0) -> bool:
    """Whether every rank's peak is within this share of its GPU's memory, and `fits_on_host`. With auto: if all layers
    are recomputed."""
    if not fits_on_host(recipe):
        return False
    if recipe.recompute == "auto":
        recipe = replace(recipe, recompute="full")
    return peak(rank_memory(recipe)).total <= share * recipe.cluster.memory_gib * GIB
