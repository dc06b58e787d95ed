"""How many layers each pipeline stage gets, so that stages take equally long (`--pipeline-cut auto`). Pure.

Work is counted in passes of one layer, as in docs/concepts.md: forward, input gradient and weight gradient cost 1 each.
The output head with its loss is worth some layers. The embedding is a look-up and counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.bcd.blocks.partition import Partition, divide

_ON_ONE_STAGE = ("stage", "submodel")
"""Layouts whose blocks lie on one stage each."""


def balanced_cut(even: Partition, *, head: float) -> tuple[int, ...]:
    """Layers of every virtual stage, in depth order, with the least time of the slowest stage, summed over the phases.

    Begins with an even cut and moves single layers between stages while that helps. In layout ``interleaved`` a layer
    stays in its chunk, so that blocks keep their layers. One pass of the output head is worth ``head`` passes of a
    layer.
    """
    stages = range(even.num_stages)
    sizes = even.layers_per_stage
    if even.layout == "interleaved":
        sizes = tuple(len(submodel.layers) for submodel in even.submodels)
    held = [list(sizes[stage :: even.num_stages]) for stage in stages]  # by stage and chunk
    work = [_work(even, head, stage, held[stage]) for stage in stages]
    best = _price(work)
    while True:
        found = None
        for chunk, giver, taker in _moves(held, work, least=_parts(even)):
            changed_sizes = {stage: list(held[stage]) for stage in (giver, taker)}
            changed_sizes[giver][chunk] -= 1
            changed_sizes[taker][chunk] += 1
            changed = list(work)
            for stage in changed_sizes:
                changed[stage] = _work(even, head, stage, changed_sizes[stage])
            price = _price(changed)
            if price < best:
                best, found = price, (changed_sizes, changed)
        if found is None:
            return tuple(held[stage][chunk] for chunk in range(len(held[0])) for stage in stages)
        for stage, of_stage in found[0].items():
            held[stage] = of_stage
        work = found[1]


def _parts(even: Partition) -> int:
    """Of each chunk of a stage; each keeps a layer."""
    if even.layout == "interleaved":
        return 1
    return even.num_layer_blocks // (even.num_stages if even.layout in _ON_ONE_STAGE else 1)


def _moves(
    held: Sequence[Sequence[int]], work: Sequence[Sequence[float]], *, least: int
) -> Iterator[tuple[int, int, int]]:
    """Chunk, the stage that gives a layer, which some phase waits for, and the one that takes it. Only the stage with
    the head gives layers to stages that have many more already. A chunk keeps ``least`` layers."""
    last = len(held) - 1
    slowest = {
        stage for of_phase in zip(*work, strict=True) for stage in range(last + 1) if of_phase[stage] == max(of_phase)
    }
    for chunk in range(len(held[0])):
        for giver in sorted(slowest):
            if held[giver][chunk] <= least:
                continue
            for taker in range(last + 1):
                if taker != giver and (giver == last or held[taker][chunk] <= held[giver][chunk] + 1):
                    yield chunk, giver, taker


def _price(work: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The slowest stages' work, and, to get past equal ones, the sum of squares."""
    by_phase = list(zip(*work, strict=True))
    return sum(map(max, by_phase)), sum(each * each for of_phase in by_phase for each in of_phase)


def _work(even: Partition, head: float, stage: int, sizes: Sequence[int]) -> list[float]:
    """Of a stage whose chunks have so many layers, in every phase."""
    parts, layout, num_phases = _parts(even), even.layout, even.num_blocks
    num_layer_blocks = even.num_layer_blocks
    divided = [[len(part) for part in divide(size, parts)] for size in sizes]
    work = []
    for phase in range(num_phases):
        total = 0.0
        for chunk, by_part in enumerate(divided):
            for part, layers in enumerate(by_part):
                if phase == num_layer_blocks:  # the head's
                    active = behind = False
                elif layout == "interleaved":
                    active, behind = chunk % num_layer_blocks == phase, chunk >= phase
                elif layout in _ON_ONE_STAGE:
                    active, behind = stage * parts + part == phase, stage * parts + part >= phase
                else:  # strided blocks begin with one of the first layers
                    active, behind = part == phase, stage > 0 or part >= phase or layout == "strided"
                total += layers * (1 + behind + active)
        if stage == even.num_stages - 1:
            total += head * (2 + (phase == (0 if even.tied else num_phases - 1)))
        work.append(total)
    return work
