"""Lay out the computation and the copies of one microbatch, layer by layer, if frozen layers are in host memory.

The order is that of `model.frozen_weights`, which has two buffers. When a layer's turn comes, it starts the copy of the
next layer that is in neither buffer. The copy replaces the layer that was used longest ago, and it waits for earlier
kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.bcd.planner.memory import recomputation
from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.step_time import (
    copy_seconds,
    exchange_seconds,
    num_head_passes,
    pass_seconds,
    streamed_layers,
)


@dataclass(frozen=True, kw_only=True)
class Span:
    """A computation or copy. Times are seconds from the microbatch's start."""

    kind: str
    """forward, backward, head or copy. Copies have a stream of their own."""
    layer: int | None
    start: float
    end: float


def microbatch(recipe: Recipe, block: int) -> list[Span]:
    """Return the spans of a microbatch that follows another one, including its copies. The run must have one stage."""
    streamed, copy = streamed_layers(recipe, 0, block), copy_seconds(recipe, 0)
    uses = list(_uses(recipe, block))
    order = [layer for layer, _, _ in uses if layer in streamed]
    coming = iter(order[1:] + order + order[:1])
    ready = dict.fromkeys(order[:1], 0.0)
    """By layer in a buffer, when its copy ends. The layer that was used last comes last."""
    spans, begin, now, copied = list[Span](), 0.0, 0.0, 0.0
    for index, (layer, kind, seconds) in enumerate(uses * 2):
        if index == len(uses):
            spans, begin = [], now
        if layer in streamed:
            launched, now = now, max(now, ready[layer])
            ready[layer] = ready.pop(layer)
            following = next(coming)
            if following not in ready:
                if len(ready) == 2:
                    del ready[next(iter(ready))]
                start = max(copied, launched)
                ready[following] = copied = start + copy
                spans.append(Span(kind="copy", layer=following, start=start - begin, end=copied - begin))
        spans.append(Span(kind=kind, layer=layer, start=now - begin, end=now + seconds - begin))
        now += seconds
    return spans


def _uses(recipe: Recipe, block: int) -> Iterator[tuple[int | None, str, float]]:
    """Yield the layers in the order of their passes, with the kind and the seconds of each."""
    layer, head, core = pass_seconds(recipe)
    exchange, num_layers = exchange_seconds(recipe), recipe.model.layers
    for number in range(num_layers):
        yield number, "forward", layer + exchange
    yield None, "head", sum(num_head_passes(recipe, block)) * head
    num_behind, choice = len(recipe.partition.behind_prefix[0][block]), recomputation(recipe)[0][block]
    for index in reversed(range(num_behind)):
        number = num_layers - num_behind + index
        passes = 1 + (index < choice.num_whole(0))
        more = recipe.partition.trains_matrices(number, block) * layer + (choice.granularity == "selective") * core
        yield number, "backward", passes * (layer + exchange) + more
