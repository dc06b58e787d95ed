"""Replica groups (docs/replica_groups.md): what an exchange sends, how long it takes, what it holds."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.bcd.planner.recipe import Recipe

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
    trained = [
        [sum(one.size for one in tensors if one.is_active(block) or one.is_stateless(block)) for block in blocks]
        for tensors in recipe.state.tensors
    ]
    width = 2 if recipe.outer_compression == "bf16" else 4
    means = [width * sum(of_stage) / len(blocks) for of_stage in trained]
    sent = 2 * (1 - 1 / recipe.replica_groups) * sum(means) / recipe.num_nodes
    ever = [
        sum(one.size for one in tensors if any(one.is_active(block) or one.is_stateless(block) for block in blocks))
        for tensors in recipe.state.tensors
    ]
    held = max(_HELD * every + _WORKING * max(phases) for every, phases in zip(ever, trained, strict=True))
    return Exchange(
        interval=recipe.outer_interval or int(recipe.bcd.mean_steps),
        payload=round(max(means) / recipe.num_replicas),
        sent=sent,
        seconds=sent / (1e9 * recipe.cluster.network_gb_per_s),
        host_bytes=held // recipe.num_replicas,
    )
