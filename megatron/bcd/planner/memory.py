"""Estimate the memory of every rank of a recipe in every phase, and the host memory that it needs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from itertools import product

from megatron.bcd.planner.activations import Recomputed
from megatron.bcd.planner.cost import OFFLOADED_BYTES
from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.state import ModelState, RankMemory
from megatron.bcd.planner.tables import GIB


def rank_memory(recipe: Recipe, *, replica: int = 0) -> tuple[RankMemory, ...]:
    """Return the memory of one rank per stage in every phase, ordered by stage, then by block."""
    choices, framework, ranks = recomputation(recipe), int(recipe.cluster.framework_gib * GIB), []
    for stage, block in product(range(recipe.pipeline_size), range(recipe.partition.num_blocks)):
        rank = recipe.memory.rank(stage, block, choice=choices[stage][block], replica=replica)
        ranks.append(replace(rank, framework=framework))
    return tuple(ranks)


@lru_cache(maxsize=256)
def recomputation(recipe: Recipe) -> list[list[Recomputed]]:
    """Return what is recomputed, by stage and block."""
    limit = recipe.memory_share * recipe.cluster.memory_gib * GIB - int(recipe.cluster.framework_gib * GIB)
    return recipe.memory.recomputation(limit=limit)


def host_bytes(recipe: Recipe) -> int:
    """Return the host memory of one rank.

    Method offload needs weights, gradients and moments. Other methods need offloaded momenta, what 16-bit weights lack
    of their main parameters (--bcd-main-params host), the rank's share of its node's layers in host memory, and saved
    inputs and activations.
    """
    stages = range(recipe.pipeline_size)
    if recipe.method == "offload":
        return OFFLOADED_BYTES * max(max(buffers[0].stored) for buffers in recipe.state.buffers)
    blocks, offloaded, waiting = range(recipe.partition.num_blocks), recipe.state.kept_bytes, 0
    if recipe.is_streamed:
        largest = max(
            len(layers.sizes) * layers.padded + recipe.state.embedding_on_host(stage)
            for stage, layers in enumerate(recipe.state.streamed)
        )
        per_element = recipe.state.budget.weight + recipe.state.layer_state_bytes
        on_node = min(recipe.num_replicas, recipe.gpus_per_node)
        offloaded += int(per_element * largest) // max(1, on_node // recipe.state.num_expert_parts)
    for stage, block in product(stages, blocks) if recipe.config.is_breadth_first else ():
        activations = recipe.memory.activations(stage, block)
        saved = activations.host_bytes(recipe.memory.recomputed(stage, block)) + activations.input_bytes("host")
        waiting = max(waiting, saved)
    offloaded += waiting
    bcd = recipe.config.bcd  # main parameters of inactive updates are on the device or beside the weights
    if len(blocks) == 1 or bcd.bcd_inactive_update != "none" or bcd.bcd_main_params == "drop":
        return offloaded
    return offloaded + max(_offloaded_main_params(recipe, stage) for stage in stages)


def saving_bytes(recipe: Recipe) -> int:
    """Return the additional host memory that a node needs while it saves a checkpoint.

    Weights on devices are copied, and the optimizer state of the active parameters is made in fp32. Layers in host
    memory and what is offloaded are written one tensor after the other.
    """
    most = _saving_rank_bytes(recipe.state, min(recipe.num_replicas, recipe.gpus_per_node))
    return int(most * max(1, recipe.gpus_per_node // recipe.num_replicas))


@lru_cache(maxsize=256)
def _saving_rank_bytes(state: ModelState, on_node: int) -> float:
    """Return the most bytes of `on_node` ranks of a node with the same weights, except experts."""
    is_short, is_on_host = state.config.precision != "fp32", state.config.bcd.bcd_layers_on == "host"
    by_chunk = state.config.steps_block_by_chunk

    def rank_weights(stage: int, block: int) -> float:
        weights = state_elements = largest = 0
        for tensor in state.tensors[stage]:
            size = tensor.size * (state.num_expert_parts if tensor.is_expert else 1)
            copies = tensor.size * (min(on_node, state.num_expert_parts) if tensor.is_expert else 1)
            is_in_arena = is_on_host and tensor.owned.layer is not None
            is_active = tensor.owned.is_active(block)
            if by_chunk and tensor.parts:  # written one after the other
                is_active = not is_in_arena
            num_moments = 1 if state.config.is_muon and tensor.parts else 2
            weights += 0 if is_in_arena and not is_active else state.budget.weight * copies
            if is_active:
                state_elements += (is_short + num_moments) * size
            elif is_in_arena:
                largest = max(largest, tensor.size)
            elif tensor.owned.has_inactive_update(block):
                state_elements += is_short * size
        return weights + 4 * state_elements * on_node / state.num_replicas + 4 * is_short * largest

    return max(rank_weights(*place) for place in product(range(len(state.tensors)), range(state.partition.num_blocks)))


def _offloaded_main_params(recipe: Recipe, stage: int) -> int:
    """Return the bytes of main parameters in host memory. The few bf16 ones that are stored whole do not count."""
    tensors = recipe.state.tensors[stage]
    offloaded = (each.size for each in tensors if each.owned.block is not None and not each.owned.is_always_active)
    return math.ceil({"fp32": 0, "bf16": 2, "fp16": 4}[recipe.config.precision] * sum(offloaded) / recipe.num_replicas)


def node_bytes(recipe: Recipe) -> int:
    """Return the host memory that a node needs while it saves."""
    return recipe.gpus_per_node * host_bytes(recipe) + saving_bytes(recipe)


def fits_on_host(recipe: Recipe) -> bool:
    """Return whether the ranks of a node have enough host memory, if it is limited, also while they save."""
    return recipe.host_memory_gb is None or node_bytes(recipe) <= 1e9 * recipe.host_memory_gb


@lru_cache(maxsize=4096)
def fits(recipe: Recipe, *, share: float = 1.0) -> bool:
    """Return whether every rank's peak is within this share of its GPU's memory, and `fits_on_host`.

    A recipe with a fault does not fit. With --recompute auto the question is whether it fits if all layers are
    recomputed.
    """
    if recipe.fault or not fits_on_host(recipe):
        return False
    if recipe.recompute == "auto":
        recipe = replace(recipe, recompute="full")
    return max(rank.total for rank in rank_memory(recipe)) <= share * recipe.cluster.memory_gib * GIB
