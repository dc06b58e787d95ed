"""Replica groups (docs/replica_groups.md): what an exchange sends, how long it takes, what it holds."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.state import ModelState

_HELD, _WORKING = 4, 16
"""Bytes of host memory for a parameter: the outer momentum, of all; the value after the last exchange, the present one,
the change and its mean, of those that the phase trains; with --outer-delay also the value when the change was taken."""
_OF_ERRORS = {"fp32": 0, "bf16": 0, "4bit": 4}
"""More: what the groups have missed of this one's changes, of all; while an exchange lasts once more, and its sum with
the change, of those that the phase trains."""
_ROWS = {"fp32": (1, 4), "bf16": (1, 2), "4bit": (128, 66)}
"""Elements that are sent together, and their bytes."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Between replica groups, once an interval; bytes and seconds are means over a cycle."""

    interval: int  # steps
    payload: int  # bytes of changes of the rank that has most
    sent: float  # bytes that a node sends
    seconds: float
    host_bytes: int  # of the rank that has most


def exchange_of(recipe: Recipe) -> Exchange | None:
    """Every rank exchanges what its shard has changed with the ranks of its place in the other groups: it sends its
    part of the mean to each, and theirs of its own. The ranks of a node share its link."""
    if recipe.replica_groups == 1:
        return None
    blocks = range(recipe.partition.num_blocks)
    stages = range(recipe.partition.num_stages)
    trained = [[sum(recipe.state.trained(stage, block)) for block in blocks] for stage in stages]
    row, row_bytes = _ROWS[recipe.outer_compression]
    means = [row_bytes / row * sum(of_stage) / len(blocks) for of_stage in trained]
    sent = 2 * (1 - 1 / recipe.replica_groups) * sum(means) / recipe.num_nodes
    ever = [sum(recipe.state.trained(stage)) for stage in stages]
    more = _OF_ERRORS[recipe.outer_compression]
    working = _WORKING + 2 * more + (4 if recipe.outer_delay else 0)
    held = max((_HELD + more) * every + working * max(phases) for every, phases in zip(ever, trained, strict=True))
    return Exchange(
        interval=recipe.outer_interval or int(recipe.bcd.mean_steps),
        payload=round(max(means) / recipe.num_replicas),
        sent=sent,
        seconds=sent / (1e9 * recipe.cluster.network_gb_per_s),
        host_bytes=held // recipe.num_replicas,
    )


def waiting_seconds(recipe: Recipe, step: float) -> float:
    """Of a step of `step` seconds, for exchanges: those that end a phase are waited for, --outer-delay hides others."""
    exchange = exchange_of(recipe)
    if exchange is None:
        return 0.0
    at_end = min(1.0, exchange.interval / recipe.bcd.mean_steps)
    hidden = min(exchange.seconds, recipe.outer_delay * step)
    return (exchange.seconds - (1 - at_end) * hidden) / exchange.interval


def exchanged(state: ModelState, stage: int, block: int, replica: int, *, replica_groups: int, compression: str) -> int:
    """Bytes that one rank sends in an exchange of the block's phase: of its parts, by `replicas.shard_slice`, whole
    rows to each group, and as many for the mean."""
    row, row_bytes = _ROWS[compression]
    parts = _parts(state, state.trained(stage, block), replica)
    return 2 * (replica_groups - 1) * row_bytes * sum(-(-part // (row * replica_groups)) for part in parts)


def outer_bytes(state: ModelState, stage: int, block: int, replica: int, *, compression: str) -> int:
    """What one rank holds in host memory between exchanges, from the second cycle on."""
    ever, now = (sum(_parts(state, sizes, replica)) for sizes in (state.trained(stage), state.trained(stage, block)))
    return (_HELD + _OF_ERRORS[compression]) * ever + _HELD * now


def _parts(state: ModelState, sizes: list[int], replica: int) -> list[int]:
    number = state.num_replicas
    return [size * (replica + 1) // number - size * replica // number for size in sizes]
