"""Estimate bytes, time and memory of an exchange between replica groups (docs/replica_groups.md)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.bcd.planner.recipe import Recipe

STORED, _WORKING = 4, 16
"""Bytes of host memory per parameter. All have the outer momentum. Those that the phase trains also have the value
after the last exchange, the present value, the change and its mean."""
ERROR_BYTES = {"fp32": 0, "bf16": 0, "4bit": 4}
"""Bytes per parameter of the rounding errors that wait for the next exchange. During an exchange, parameters that the
phase trains have them once more, and their sum with the change."""
ROWS = {"fp32": (1, 4), "bf16": (1, 2), "4bit": (128, 66)}
"""Elements that are compressed together, and their bytes."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """An exchange between replica groups, once an interval. Bytes and seconds are means over a cycle."""

    interval: int  # steps
    payload: int  # bytes of changes of the rank with the most
    sent: float  # bytes that a node sends
    seconds: float
    host_bytes: int  # of the rank with the most


def exchange_of(recipe: Recipe) -> Exchange | None:
    """Return the exchange of a recipe, or None if it has one replica group.

    A rank sends every other group a part of its shard's changes, and then a part of the mean. The ranks of a node share
    its link.
    """
    groups = recipe.config.groups
    if groups.replica_groups == 1:
        return None
    blocks = range(recipe.partition.num_blocks)
    stages = range(recipe.partition.num_stages)
    trained = [[sum(recipe.state.trained(stage, block)) for block in blocks] for stage in stages]
    row, row_bytes = ROWS[groups.outer_compression]
    means = [row_bytes / row * sum(phases) / len(blocks) for phases in trained]
    sent = 2 * (1 - 1 / groups.replica_groups) * sum(means) / recipe.num_nodes
    ever = [sum(recipe.state.trained(stage)) for stage in stages]
    more = ERROR_BYTES[groups.outer_compression]
    # a delayed result also needs the value from when the change was taken
    working = _WORKING + 2 * more + (4 if groups.outer_delay else 0)
    stored = max((STORED + more) * every + working * max(phases) for every, phases in zip(ever, trained, strict=True))
    return Exchange(
        interval=groups.outer_interval or int(recipe.config.bcd.mean_steps),
        payload=round(max(means) / recipe.num_replicas),
        sent=sent,
        seconds=sent / (1e9 * recipe.cluster.network_gb_per_s),
        host_bytes=stored // recipe.num_replicas,
    )


def waiting_seconds(recipe: Recipe, step: float) -> float:
    """Return how long a step of `step` seconds waits for exchanges. --outer-delay hides those within a phase."""
    exchange = exchange_of(recipe)
    if exchange is None:
        return 0.0
    at_end = min(1.0, exchange.interval / recipe.config.bcd.mean_steps)
    hidden = min(exchange.seconds, recipe.config.groups.outer_delay * step)
    return (exchange.seconds - (1 - at_end) * hidden) / exchange.interval
