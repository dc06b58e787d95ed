"""The estimate of a recipe: memory, fit, time, tokens per second, days and dollars."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any

from megatron.bcd.planner.memory import RankMemory, fits, host_bytes, peak, rank_memory
from megatron.bcd.planner.multipliers import multiplier_of
from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.step_time import PhaseTime, cycle_seconds, head_pass, layer_pass, mean_seconds
from megatron.bcd.planner.tables import GIB

DEFAULT_TOKENS_PER_PARAMETER = 20
"""Hoffmann et al. 2022."""
DEFAULT_SFT_TOKENS = 3 * 52002 * 120.0
"""Three epochs of Alpaca: 52,002 records of some 120 tokens. 78 are the record's (mean of 5,000 records, GPT-2's
tokenizer), the rest is the prompt around it."""


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """Cost of training to the loss that full training reaches on a number of tokens."""

    tokens: float
    """Read by full training."""
    multiplier: float
    """B-F multiplier at this number of blocks; 1 where all parameters are active."""
    multiplier_source: str
    iterations: int
    days: float
    gpu_hours: float
    dollars: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory, time and cost of a recipe."""

    recipe: Recipe
    parameters: int
    """Of the model, unpadded."""
    ranks: tuple[RankMemory, ...]
    """Data-parallel rank 0 of every stage, in every phase."""
    host_bytes: int
    """Per rank, of an optimizer on the host, or of momenta that blocks keep; else 0."""
    largest_micro_batch: int | None
    """The largest that fits and divides the batch; None if none does."""
    phases: tuple[PhaseTime, ...]
    iteration_seconds: float
    """Mean over a cycle."""
    bubble: float
    """Mean over a cycle."""
    tokens_per_second: float
    mfu: float
    """FLOPs of full training on the same tokens over the GPUs' peak: work that BCD skips counts as done."""
    cost: TrainingCost

    @property
    def peak(self) -> RankMemory:
        return peak(self.ranks)

    @property
    def orthogonalization_share(self) -> float:
        """Of the time of an iteration; 0 without Muon and resting layers."""
        return sum(phase.orthogonalization for phase in self.phases) / sum(phase.total for phase in self.phases)

    @property
    def fits(self) -> bool:
        return self.peak.total <= self.recipe.cluster.memory_gib * GIB

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON. Bytes, seconds, dollars."""
        recipe = self.recipe
        return {
            "model": asdict(recipe.model) | {"parameters": self.parameters},
            "cluster": asdict(recipe.cluster),
            "recipe": {
                "method": recipe.method,
                "num_gpus": recipe.num_gpus,
                "num_nodes": recipe.num_nodes,
                "pipeline_size": recipe.pipeline_size,
                "context_size": recipe.context_size,
                "data_size": recipe.data_size,
                "num_blocks": recipe.partition.num_blocks,
                "layout": recipe.partition.layout,
                "precision": recipe.precision,
                "sequence": recipe.tokens,
                "micro_batch_size": recipe.micro_batch_size,
                "global_batch_size": recipe.global_batch_size,
                "num_microbatches": recipe.num_microbatches,
                "recompute": recipe.recompute,
                "pipeline_cut": recipe.cut,
                "num_chunks": recipe.partition.num_chunks,
            },
            "memory": {
                "fits": self.fits,
                "available_bytes": int(recipe.cluster.memory_gib * GIB),
                "peak_bytes": self.peak.total,
                "host_bytes": self.host_bytes,
                "largest_micro_batch": self.largest_micro_batch,
                "ranks": [asdict(rank) | {"model_state": rank.model_state, "total": rank.total} for rank in self.ranks],
            },
            "time": {
                "phases": [asdict(phase) | {"total": phase.total} for phase in self.phases],
                "iteration_seconds": self.iteration_seconds,
                "orthogonalization_share": self.orthogonalization_share,
                "bubble": self.bubble,
                "tokens_per_second": self.tokens_per_second,
                "mfu": self.mfu,
            },
            "bill": asdict(self.cost),
        }


def make_estimate(recipe: Recipe, *, tokens: float | None = None, multiplier: float | None = None) -> Estimate:
    """Estimate a recipe.

    ``tokens`` is what full training would read, by default 20 per parameter, for fine-tuning three epochs of Alpaca;
    ``multiplier`` is the B-F multiplier at
    three blocks, by default the method's. Raises ValueError if either is out of range.
    """
    if tokens is not None and not 0 < tokens < 1e18:
        raise ValueError(f"--tokens {tokens:g}: must be more than 0 and less than 1e18")
    parameters = recipe.shape.num_parameters
    phases = cycle_seconds(recipe)
    seconds = mean_seconds(phases)
    tokens_per_iteration = recipe.global_batch_size * recipe.tokens
    return Estimate(
        recipe=recipe,
        parameters=parameters,
        ranks=rank_memory(recipe),
        host_bytes=host_bytes(recipe),
        largest_micro_batch=largest_micro_batch(recipe),
        phases=phases,
        iteration_seconds=seconds,
        bubble=sum(phase.bubble for phase in phases) / len(phases),
        tokens_per_second=tokens_per_iteration / seconds,
        mfu=_full_flops(recipe) / seconds / (recipe.num_gpus * recipe.cluster.peak_flops_per_s(recipe.precision)),
        cost=training_cost(recipe, seconds, tokens=tokens, multiplier=multiplier),
    )


def training_cost(recipe: Recipe, seconds: float, *, tokens: float | None, multiplier: float | None) -> TrainingCost:
    """The cost at ``seconds`` per iteration."""
    if tokens is None and recipe.task == "sft":
        tokens = DEFAULT_SFT_TOKENS
    elif tokens is None:
        tokens = DEFAULT_TOKENS_PER_PARAMETER * recipe.shape.num_parameters
    scaled = multiplier_of(recipe.method, recipe.partition.num_blocks, multiplier)
    iterations = -int(-tokens * scaled.value // (recipe.global_batch_size * recipe.tokens))
    hours = iterations * seconds / 3600
    gpu_hours = hours * recipe.num_gpus
    return TrainingCost(
        tokens=tokens,
        multiplier=scaled.value,
        multiplier_source=scaled.source,
        iterations=iterations,
        days=hours / 24,
        gpu_hours=gpu_hours,
        dollars=gpu_hours * recipe.cluster.usd_per_gpu_hour,
    )


def largest_micro_batch(recipe: Recipe) -> int | None:
    """The largest micro-batch that fits and divides the batch of a data-parallel rank."""
    per_rank = recipe.global_batch_size // recipe.data_size
    sizes = [size for size in range(per_rank, 0, -1) if per_rank % size == 0]
    if recipe.partition.num_chunks > 1:  # a plan for each size takes a while, and a larger one needs more
        return max(takewhile(lambda size: fits(replace(recipe, micro_batch_size=size)), reversed(sizes)), default=None)
    return next((size for size in sizes if fits(replace(recipe, micro_batch_size=size))), None)


def _full_flops(recipe: Recipe) -> float:
    """FLOPs of one iteration of full training without recomputation: three passes through layers and head."""
    layers = recipe.model.layers * layer_pass(recipe).flops
    return 3 * (layers + head_pass(recipe).flops) * recipe.num_microbatches * recipe.num_replicas
