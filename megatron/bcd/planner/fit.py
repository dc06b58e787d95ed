"""Achieved shares of a GPU, fitted on the paper's G-1.6B and L-1.5B (tables 3, 4, 15, 16 of arXiv 2506.12037).

The paper does not state its batch. Its times grow with the model size and not with the model size per GPU, so one
microbatch passes through the pipeline at a time; one sequence of 1,024 tokens is assumed. Only the product of tokens
and achieved share can be observed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.step_time import mean_seconds, phase_seconds
from megatron.bcd.planner.tables import Cluster, Model

FITTED_MODELS = ("G-1.6B", "L-1.5B")


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """A run of the paper, and the time of its iteration."""

    recipe: Recipe
    ms: float


def paper_recipe(model: Model, cluster: Cluster, *, num_gpus: int, num_blocks: int = 3, method: str = "bcd") -> Recipe:
    """A run of the paper: all GPUs in one pipeline, fp32, one sequence, Megatron Core's own attention."""
    return Recipe(
        model=model,
        cluster=cluster,
        num_gpus=num_gpus,
        pipeline_size=num_gpus,
        method=method,
        num_blocks=num_blocks if method == "bcd" else None,
        global_batch_size=1,
        unfused_attention=True,
    )


def iteration_ms(recipe: Recipe) -> float:
    """Mean iteration time over the blocks, in milliseconds."""
    phases = tuple(phase_seconds(recipe, block.index) for block in recipe.partition.blocks)
    return 1e3 * mean_seconds(phases)


def fit_shares(runs: Sequence[TimedRun], cluster: Cluster) -> Cluster:
    """The cluster with the compute and memory shares that minimise the squared relative errors of these runs.

    With one microbatch the time is linear in the inverse of each share, so this is linear least squares. Raises
    ValueError if the runs do not separate the two.
    """
    compute, memory, left = [], [], []
    for run in runs:
        nothing = replace(
            run.recipe.cluster, compute_share=1.0, memory_share=1.0, fp32_tflops=1e12, memory_gb_per_s=1e15
        )
        base = iteration_ms(replace(run.recipe, cluster=nothing))
        with_compute = replace(nothing, fp32_tflops=cluster.fp32_tflops)
        with_memory = replace(nothing, memory_gb_per_s=cluster.memory_gb_per_s)
        compute.append((iteration_ms(replace(run.recipe, cluster=with_compute)) - base) / run.ms)
        memory.append((iteration_ms(replace(run.recipe, cluster=with_memory)) - base) / run.ms)
        left.append(1 - base / run.ms)
    determinant = _dot(compute, compute) * _dot(memory, memory) - _dot(compute, memory) ** 2
    if determinant <= 1e-12:
        raise ValueError("the runs do not separate the compute share from the memory share")
    inverse_compute = (
        _dot(memory, memory) * _dot(compute, left) - _dot(compute, memory) * _dot(memory, left)
    ) / determinant
    inverse_memory = (
        _dot(compute, compute) * _dot(memory, left) - _dot(compute, memory) * _dot(compute, left)
    ) / determinant
    return replace(cluster, compute_share=1 / inverse_compute, memory_share=1 / inverse_memory)


def fit_host(runs: Sequence[TimedRun], cluster: Cluster) -> Cluster:
    """The cluster with the host bandwidth that minimises the same errors for runs with the optimizer on the host."""
    host, left = [], []
    for run in runs:
        slow, fast = (
            iteration_ms(replace(run.recipe, cluster=replace(cluster, host_gb_per_s=speed))) for speed in (1.0, 1e12)
        )
        host.append((slow - fast) / run.ms)
        left.append(1 - fast / run.ms)
    return replace(cluster, host_gb_per_s=_dot(host, host) / _dot(host, left))


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
