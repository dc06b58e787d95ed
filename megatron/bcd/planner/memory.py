"""Memory of every rank in every phase."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from megatron.bcd.pipeline.build import bcd_shape, default_run_ahead
from megatron.bcd.pipeline.chunk_shape import ChunkShape, phase_chunk_shape
from megatron.bcd.planner.activations import Recomputed, Shape, layer_bytes, stage_activations, stage_messages
from megatron.bcd.planner.cost import OFFLOADED_BYTES, ModelShape, host_state_bytes, pass_products, state_budget
from megatron.bcd.planner.matrices import matrix_share
from megatron.bcd.planner.recipe import LayerCounts, Recipe
from megatron.bcd.planner.recomputation import MOST_ROUNDS, least_recomputation
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
    weights: int
    """With the padding of the buffers in which the phases leave their blocks."""
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
    shape: ModelShape, cut: LayerCounts, padded_vocabulary: int, num_replicas: int, is_muon: bool
) -> tuple[tuple[tuple[Buffer, int], ...], ...]:
    partition, stages = cut.partition, []
    for stage in range(partition.num_stages):
        tensors = stage_tensors(shape, partition, stage, padded_vocabulary=padded_vocabulary)
        held = [
            [tensor for tensor in tensors if tensor.is_active(block.index) and not (is_muon and tensor.parts)]
            for block in partition.blocks
        ]
        sizes = [sum(tensor.size for tensor in each) for each in held]
        buffers = [buffer_of(each, num_ranks=num_replicas) for each in held]
        everything = sum(tensor.size for tensor in tensors)
        if partition.always_active:  # a buffer ends with its phase
            elements = [everything - size + buffer.size for size, buffer in zip(sizes, buffers, strict=True)]
        else:
            elements = [everything - sum(sizes) + sum(buffer.size for buffer in buffers)] * len(buffers)
        stages.append(tuple(zip(buffers, elements, strict=True)))
    return tuple(stages)


def phase_shape(recipe: Recipe, block: int) -> Shape:
    """Shape of the pipeline schedule in the middle of the block's phase."""
    partition = recipe.partition
    if partition.num_chunks > 1:
        return phase_chunk_shape(partition, block, num_microbatches=recipe.num_microbatches, head=recipe.head_passes)
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


def rank_memory(recipe: Recipe, *, replica: int = 0) -> tuple[RankMemory, ...]:
    """One rank per stage in every phase, ordered by stage, then by block."""
    choices = recomputation(recipe)
    return tuple(
        _memory_of(recipe, stage, block, replica, choices[stage][block])
        for stage in range(recipe.pipeline_size)
        for block in range(recipe.partition.num_blocks)
    )


def _memory_of(recipe: Recipe, stage: int, block: int, replica: int, recomputed: Recomputed) -> RankMemory:
    budget = state_budget(precision=recipe.precision, adam_moments_dtype=recipe.adam_moments_dtype)
    sizes = layer_bytes(recipe)
    is_on_host = recipe.method == "offload"
    buffer, elements = _stage_weights(recipe)[stage][block]
    held, pieces = buffer.held[replica], buffer.pieces[replica]
    share, shape = matrix_share(recipe, stage, block, replica), _steady_shape(recipe, block)
    of_adam = int(budget.optimizer * held)
    if recipe.adam_moments_dtype == "fp32":
        of_adam += STEP_COUNTER_BYTES * pieces
    return RankMemory(
        stage=stage,
        block=block,
        weights=budget.weight * elements,
        gradients=budget.gradient * buffer.size + share.gradients,
        optimizer=0 if is_on_host else of_adam + share.state,
        activations=stage_activations(recipe.layer_counts, sizes, shape, stage, block, recomputed),
        optimizer_work=0 if is_on_host else max(_adam_work(recipe, held), share.working),
        communication=stage_messages(sizes, shape, stage),
        framework=int(recipe.cluster.framework_gib * GIB),
    )


def _adam_work(recipe: Recipe, held: int) -> int:
    """Temporary memory of Adam's step; with moments in fewer bits it steps a part of a parameter at a time."""
    return 4 * held if recipe.adam_moments_dtype == "fp32" else 16 * min(held, _LOW_BIT_CHUNK)


def _steady_shape(recipe: Recipe, block: int) -> Shape:
    shape = phase_shape(recipe, block)
    if isinstance(shape, ChunkShape):
        return replace(shape, num_microbatches=min(shape.num_microbatches, MOST_ROUNDS * shape.num_stages))
    return shape


@lru_cache(maxsize=256)
def recomputation(recipe: Recipe) -> tuple[tuple[Recomputed, ...], ...]:
    """What is recomputed, by stage and block: as the recipe says, or with auto the cheapest that fits, of what costs
    least, all layers where nothing does."""
    return tuple(
        tuple(_choice(recipe, stage, block) for block in range(recipe.partition.num_blocks))
        for stage in range(recipe.pipeline_size)
    )


def _choice(recipe: Recipe, stage: int, block: int) -> Recomputed:
    cut = recipe.layer_counts
    numbers = [
        cut.after_prefix[chunk * recipe.pipeline_size + stage][block] for chunk in range(recipe.partition.num_chunks)
    ]
    if recipe.recompute == "none":
        return Recomputed()
    if recipe.recompute == "full":
        return Recomputed(granularity="full", layers=tuple(numbers)) if any(numbers) else Recomputed()
    limit = recipe.memory_share * recipe.cluster.memory_gib * GIB
    # ranks differ by less than a parameter's shard
    largest = max(range(recipe.num_replicas), key=lambda rank: _stage_weights(recipe)[stage][block][0].held[rank])
    matrices, core = pass_products(recipe.shape, sequence=recipe.tokens)
    return least_recomputation(
        numbers,
        lambda choice: _memory_of(recipe, stage, block, largest, choice).total <= limit,
        core_share=core / (matrices + core),
    )


def host_bytes(recipe: Recipe) -> int:
    """Host memory of one rank: with method offload weights, gradients and moments; momenta that blocks keep, and what
    16-bit weights lack of main parameters (--bcd-main-params host)."""
    if recipe.method != "offload":
        ranks, blocks = range(recipe.num_replicas), range(recipe.partition.num_blocks)
        stages = range(recipe.pipeline_size)
        momenta = max(matrix_share(recipe, *place).kept for place in product(stages, blocks, ranks))
        return momenta + max(_kept_main_params(recipe, stage) for stage in stages)
    held = max(max(stage_buffers(recipe, stage)[0].held) for stage in range(recipe.pipeline_size))
    return OFFLOADED_BYTES * held


def _kept_main_params(recipe: Recipe, stage: int) -> int:
    partition = recipe.partition
    if partition.num_blocks == 1 or recipe.bcd.bcd_resting_update != "none":  # resting matrices' are on the device
        return 0
    tensors = stage_tensors(recipe.shape, partition, stage, padded_vocabulary=recipe.padded_vocabulary)
    owned = [(tensor.size, tensor.owned) for tensor in tensors if tensor.owned is not None]
    return host_state_bytes(
        num_kept=sum(size for size, one in owned if one.block is not None and not one.is_always_active),
        precision=recipe.precision,
        moments=0,
        data_parallel_size=recipe.num_replicas,
        distributed_optimizer=True,
    )


def peak(ranks: tuple[RankMemory, ...]) -> RankMemory:
    """The rank and phase with the largest peak."""
    return max(ranks, key=lambda rank: rank.total)


def fits(recipe: Recipe) -> bool:
    """Whether every rank's peak is within its GPU's memory. With auto: if all layers are recomputed."""
    if recipe.recompute == "auto":
        recipe = replace(recipe, recompute="full")
    return peak(rank_memory(recipe)).total <= recipe.cluster.memory_gib * GIB
