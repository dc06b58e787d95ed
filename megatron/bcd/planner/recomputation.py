"""The least recomputation with which a stage fits, in one phase (`--recompute auto`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from megatron.bcd.planner.activations import Recomputed

MOST_ROUNDS = 4
"""Microbatches per stage of an interleaved plan after which what is kept has reached its peak."""


def least_recomputation(numbers: Sequence[int], fits: Callable[[Recomputed], bool], *, core_share: float) -> Recomputed:
    """Nothing if that fits; else the core of attention in every layer, or the first few whole layers, whichever is less
    work and fits; all layers if nothing fits.

    ``numbers`` are the layers after the prefix, by chunk. The first layers of the first chunks are recomputed: their
    activations are kept longest. ``core_share`` is the part of a layer's arithmetic that is the core of attention.
    """
    total = sum(numbers)
    if not total or fits(Recomputed()):
        return Recomputed()
    whole = 1 + bisect_left(range(1, total), True, key=lambda number: fits(_first_layers(numbers, number)))
    selective = Recomputed(granularity="selective")
    return selective if core_share * total < whole and fits(selective) else _first_layers(numbers, whole)


def _first_layers(numbers: Sequence[int], whole: int) -> Recomputed:
    layers = []
    for number in numbers:
        layers.append(min(number, whole))
        whole -= layers[-1]
    return Recomputed(granularity="full", layers=tuple(layers))
