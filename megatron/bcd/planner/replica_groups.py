"""Replica groups (docs/replica_groups.md): what an exchange sends, how long it takes, what it holds."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.state import ModelState

_HELD, _WORKING = 4, 16
"""Bytes of host memory for a parameter: the outer momentum, of all; the value after the last exchange, the present one,
the change and its mean, of those that the phase trains."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Between replica groups, once an interval; bytes and seconds are means over a cycle."""

    interval: int  # steps
    payload: int  # bytes of changes of the rank that has most
    sent: float  # bytes that a node sends
    seconds: float  # while no step is done
    host_bytes: int  # of the rank that has most


def exchange_of(recipe: Recipe) -> Exchange | None:
    """Every rank exchanges what its shard has changed with the ranks of its place in the other groups: it sends its
    part of the mean to each, and theirs of its own. The ranks of a node share its link."""
    if recipe.replica_groups == 1:
        return None
    blocks = range(recipe.partition.num_blocks)
    stages = range(recipe.partition.num_stages)
    trained = [[sum(recipe.state.trained(stage, block)) for block in blocks] for stage in stages]
    width = 2 if recipe.outer_compression == "bf16" else 4
    means = [width * sum(of_stage) / len(blocks) for of_stage in trained]
    sent = 2 * (1 - 1 / recipe.replica_groups) * sum(means) / recipe.num_nodes
    ever = [sum(recipe.state.trained(stage)) for stage in stages]
    held = max(_HELD * every + _WORKING * max(phases) for every, phases in zip(ever, trained, strict=True))
    return Exchange(
        interval=recipe.outer_interval or int(recipe.bcd.mean_steps),
        payload=round(max(means) / recipe.num_replicas),
        sent=sent,
        seconds=sent / (1e9 * recipe.cluster.network_gb_per_s),
        host_bytes=held // recipe.num_replicas,
    )


def exchanged(state: ModelState, stage: int, block: int, replica: int) -> int:
    """Elements that one rank exchanges in the block's phase: its parts, by `runtime.replicas.part_of`."""
    return _in_parts(state, state.trained(stage, block), replica)


def outer_bytes(state: ModelState, stage: int, block: int, replica: int) -> int:
    """What one rank holds in host memory between exchanges, from the second cycle on."""
    return _HELD * (_in_parts(state, state.trained(stage), replica) + exchanged(state, stage, block, replica))


def _in_parts(state: ModelState, sizes: list[int], replica: int) -> int:
    number = state.num_replicas
    return sum(size * (replica + 1) // number - size * replica // number for size in sizes)
