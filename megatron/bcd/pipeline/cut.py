"""Divide layers over the pipeline stages so that stages take equally long (`--pipeline-cut auto`). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.bcd.blocks.partition import Partition

_Work = Sequence[Sequence[float]]
"""The work of each stage by phase, in passes of a layer."""


def balanced_cut(even: Partition, *, head: float, layers: Sequence[float] | None = None) -> tuple[int, ...]:
    """Return the number of layers of every virtual stage, in depth order.

    The cut minimizes the work of the slowest stage, summed over the phases. It starts from the `even` cut and moves
    single layers between stages while that helps. In layout ``interleaved`` a layer stays in its chunk, so that blocks
    keep their layers. One pass of the output head costs as much as ``head`` passes of a layer. `layers` has the cost of
    each layer, relative to the mean; by default all are equal.
    """
    layers = layers or [1.0] * even.num_layers
    cut, work = even, _stage_work(even, head, layers)
    while True:
        cuts = [even.resized(sizes) for sizes in _moves(cut, work)]
        works = [_stage_work(each, head, layers) for each in cuts]
        costs = [*map(_cost, works)]
        if min(costs, default=_cost(work)) >= _cost(work):
            return tuple(map(len, cut.virtual_stages))
        best = costs.index(min(costs))
        cut, work = cuts[best], works[best]


def _stage_work(cut: Partition, head: float, costs: Sequence[float]) -> _Work:
    """Return the work of each stage by phase, in passes of a layer.

    Forward, input gradient and weight gradient cost 1 each. The embedding is a look-up and costs nothing.
    """
    work = []
    for block in range(cut.num_blocks):
        first, by_stage = len(cut.prefix_layers(block)), [0.0] * cut.num_stages
        for virtual, layers in enumerate(cut.virtual_stages):
            passes = sum(costs[each] * (1 + (each >= first) + cut.trains_matrices(each, block)) for each in layers)
            by_stage[virtual % cut.num_stages] += passes
        by_stage[-1] += head * (2 + cut.head_active(block))
        work.append(by_stage)
    return work


def _cost(work: _Work) -> tuple[float, float]:
    """Return the work of the slowest stages, summed over the phases, and the sum of squares to decide ties."""
    return sum(map(max, work)), sum(each * each for by_stage in work for each in by_stage)


def _moves(cut: Partition, work: _Work) -> Iterator[list[int]]:
    """Yield the sizes of virtual stages after single-layer moves that may help.

    The giver is the slowest stage of some phase, and the taker has less work over all phases. A virtual stage keeps a
    layer for each of its blocks.
    """
    sizes, stages = [*map(len, cut.virtual_stages)], range(cut.num_stages)
    slowest = [stage for stage in stages if any(by_stage[stage] == max(by_stage) for by_stage in work)]
    totals = [sum(by_stage[stage] for by_stage in work) for stage in stages]
    least = 1 if cut.layout == "interleaved" else cut.num_parts
    for first in range(0, len(sizes), cut.num_stages):
        for giver in slowest:
            for taker in stages:
                given, taken = sizes[first + giver], sizes[first + taker]
                if given > least and totals[taker] < totals[giver]:
                    moved = list(sizes)
                    moved[first + giver], moved[first + taker] = given - 1, taken + 1
                    yield moved
