"""Divide layers over the pipeline stages so that stages take equally long (`--pipeline-cut auto`). Pure.

Work is counted in passes of one layer (docs/concepts.md): forward, input gradient and weight gradient cost 1 each. The
output head with its loss costs as much as some layers. The embedding is a look-up and costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.bcd.blocks.partition import Partition, divide

_ON_ONE_STAGE = ("stage", "submodel")
"""Layouts in which each block lies on one stage."""


def balanced_cut(even: Partition, *, head: float) -> tuple[int, ...]:
    """Return the number of layers of every virtual stage, in depth order.

    The cut minimizes the work of the slowest stage, summed over the phases. It starts from the `even` cut and moves
    single layers between stages while that helps. In layout ``interleaved`` a layer stays in its chunk, so that blocks
    keep their layers. One pass of the output head costs as much as ``head`` passes of a layer.
    """
    stages = range(even.num_stages)
    sizes = [*map(len, even.virtual_stages)]
    layers = [list(sizes[stage :: even.num_stages]) for stage in stages]  # by stage and chunk
    work = [_stage_work(even, head, stage, layers[stage]) for stage in stages]
    best_cost = _cost(work)
    while True:
        best = None
        for chunk, giver, taker in _moves(layers, work, least=_num_parts(even)):
            new_layers = {stage: list(layers[stage]) for stage in (giver, taker)}
            new_layers[giver][chunk] -= 1
            new_layers[taker][chunk] += 1
            new_work = list(work)
            for stage in new_layers:
                new_work[stage] = _stage_work(even, head, stage, new_layers[stage])
            cost = _cost(new_work)
            if cost < best_cost:
                best_cost, best = cost, (new_layers, new_work)
        if best is None:
            return tuple(layers[stage][chunk] for chunk in range(len(layers[0])) for stage in stages)
        for stage, sizes_of_stage in best[0].items():
            layers[stage] = sizes_of_stage
        work = best[1]


def _num_parts(even: Partition) -> int:
    """Return the number of parts of each chunk of a stage. Each part keeps a layer."""
    if even.layout == "interleaved":
        return 1
    return even.num_layer_blocks // (even.num_stages if even.layout in _ON_ONE_STAGE else 1)


def _moves(
    layers: Sequence[Sequence[int]], work: Sequence[Sequence[float]], *, least: int
) -> Iterator[tuple[int, int, int]]:
    """Yield single-layer moves that may help, as (chunk, stage that gives, stage that takes).

    The giver is the slowest stage of some phase. Only the stage with the head gives layers to stages that already have
    many more. A chunk keeps at least ``least`` layers.
    """
    last = len(layers) - 1
    slowest = {
        stage for by_stage in zip(*work, strict=True) for stage in range(last + 1) if by_stage[stage] == max(by_stage)
    }
    for chunk in range(len(layers[0])):
        for giver in sorted(slowest):
            if layers[giver][chunk] <= least:
                continue
            for taker in range(last + 1):
                if taker != giver and (giver == last or layers[taker][chunk] <= layers[giver][chunk] + 1):
                    yield chunk, giver, taker


def _cost(work: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the work of the slowest stages, summed over the phases, and the sum of squares to decide ties."""
    by_phase = list(zip(*work, strict=True))
    return sum(map(max, by_phase)), sum(each * each for by_stage in by_phase for each in by_stage)


def _stage_work(even: Partition, head: float, stage: int, sizes: Sequence[int]) -> list[float]:
    """Return the work of a stage in each phase, given the number of layers in each of its chunks."""
    parts, layout, num_phases = _num_parts(even), even.layout, even.num_blocks
    num_layer_blocks = even.num_layer_blocks
    divided = [[len(part) for part in divide(size, parts)] for size in sizes]
    work = []
    for phase in range(num_phases):
        total = 0.0
        for chunk, by_part in enumerate(divided):
            for part, layers in enumerate(by_part):
                if phase == num_layer_blocks:  # the phase of the head
                    active = behind = False
                elif layout == "interleaved":
                    active, behind = chunk % num_layer_blocks == phase, chunk >= phase
                elif layout in _ON_ONE_STAGE:
                    active, behind = stage * parts + part == phase, stage * parts + part >= phase
                else:  # every strided block has one of the first layers of the stage
                    active, behind = part == phase, stage > 0 or part >= phase or layout == "strided"
                total += layers * (1 + behind + active)
        if stage == even.num_stages - 1:
            total += head * (2 + (phase == (0 if even.tied else num_phases - 1)))
        work.append(total)
    return work
