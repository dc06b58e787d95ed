"""Computation and copies of one microbatch, layer by layer, where frozen layers lie in host memory.

The order is that of `model.frozen_weights`: two buffers; when a layer's turn comes, the copy of the next one that is in
none of them starts, over the layer that was used longest ago, and not before what was launched earlier has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.bcd.planner.memory import recomputation
from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.step_time import copy_seconds, exchange_seconds, pass_seconds, passes_of_head, streamed_layers


@dataclass(frozen=True, kw_only=True)
class Span:
    """Seconds from the microbatch's start."""

    kind: str
    """forward, backward, head or copy: the last has a stream of its own."""
    layer: int | None
    start: float
    end: float


def microbatch(recipe: Recipe, block: int) -> list[Span]:
    """Of a stage that is no pipeline, after another one of the block's phase, with the copies that start in it."""
    streamed, copy = streamed_layers(recipe, 0, block), copy_seconds(recipe, 0)
    uses = list(_uses(recipe, block))
    order = [layer for layer, _, _ in uses if layer in streamed]
    coming = iter(order[1:] + order + order[:1])
    there = dict.fromkeys(order[:1], 0.0)
    """When the layers in the buffers are there; the one that was used last is the last one."""
    spans, begin, now, copied = list[Span](), 0.0, 0.0, 0.0
    for index, (layer, kind, seconds) in enumerate(uses * 2):
        if index == len(uses):
            spans, begin = [], now
        if layer in streamed:
            launched, now = now, max(now, there[layer])
            there[layer] = there.pop(layer)
            following = next(coming)
            if following not in there:
                if len(there) == 2:
                    del there[next(iter(there))]
                start = max(copied, launched)
                there[following] = copied = start + copy
                spans.append(Span(kind="copy", layer=following, start=start - begin, end=copied - begin))
        spans.append(Span(kind=kind, layer=layer, start=now - begin, end=now + seconds - begin))
        now += seconds
    return spans


def _uses(recipe: Recipe, block: int) -> Iterator[tuple[int | None, str, float]]:
    """Layer, what is computed, and its seconds."""
    layer, adapter, head, core = pass_seconds(recipe)
    exchange, num_layers = exchange_seconds(recipe), recipe.model.layers
    for number in range(num_layers):
        yield number, "forward", layer + adapter + exchange
    yield None, "head", sum(passes_of_head(recipe, block)) * head
    num_behind, choice = len(recipe.partition.behind_prefix[0][block]), recomputation(recipe)[0][block]
    for index in reversed(range(num_behind)):
        number = num_layers - num_behind + index
        passes = 1 + (index < choice.num_whole(0))
        more = (
            recipe.partition.trains_matrices(number, block) * layer
            + adapter
            + (choice.granularity == "selective") * core
        )
        yield number, "backward", passes * (layer + adapter + exchange) + more
