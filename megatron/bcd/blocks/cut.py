"""How many layers each pipeline stage gets, so that stages take equally long (`--pipeline-cut auto`). Pure.

Work is counted in passes of one layer, as in docs/concepts.md: forward, input gradient and weight gradient cost 1 each.
The output head with its loss is worth some layers. The embedding is a look-up and counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.bcd.blocks.partition import divide, divide_into_pieces


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What is cut, in the terms of ``partition``."""

    num_layers: int
    num_stages: int
    num_blocks: int
    """Parts of every stage, or of the model in layout ``interleaved``; 1 in layout ``stage``."""
    layout: str
    num_chunks: int = 1
    """Of every stage: more than 1 in layout ``interleaved`` only."""
    tied: bool
    head: float
    """Passes of a layer that one pass of the output head is worth."""

    @property
    def parts(self) -> int:
        """Of each chunk of a stage; each keeps a layer."""
        return 1 if self.layout == "interleaved" else self.num_blocks

    @property
    def has_stage_blocks(self) -> bool:
        """Whether a block lies on one stage."""
        return self.layout in ("stage", "submodel")


def balanced_cut(pipeline: Pipeline) -> tuple[int, ...]:
    """Layers of every virtual stage, in depth order, with the least time of the slowest stage, summed over the phases.

    Begins with an even cut and moves single layers between stages while that helps. In layout ``interleaved`` a layer
    stays in its chunk, so that blocks keep their layers.
    """
    stages = range(pipeline.num_stages)
    if pipeline.layout == "interleaved":
        pieces = divide_into_pieces(pipeline.num_layers, parts=pipeline.num_chunks, stages=pipeline.num_stages)
    else:
        pieces = (divide(pipeline.num_layers, pipeline.num_stages),)
    held = [[len(chunk[stage]) for chunk in pieces] for stage in stages]  # by stage and chunk
    work = [_work(pipeline, stage, held[stage]) for stage in stages]
    best = _price(work)
    while True:
        found = None
        for chunk, giver, taker in _moves(pipeline, held, work):
            sizes = {stage: list(held[stage]) for stage in (giver, taker)}
            sizes[giver][chunk] -= 1
            sizes[taker][chunk] += 1
            changed = list(work)
            for stage in sizes:
                changed[stage] = _work(pipeline, stage, sizes[stage])
            price = _price(changed)
            if price < best:
                best, found = price, (sizes, changed)
        if found is None:
            return tuple(held[stage][chunk] for chunk in range(len(pieces)) for stage in stages)
        for stage, of_stage in found[0].items():
            held[stage] = of_stage
        work = found[1]


def _moves(
    pipeline: Pipeline, held: Sequence[Sequence[int]], work: Sequence[Sequence[float]]
) -> Iterator[tuple[int, int, int]]:
    """Chunk, the stage that gives a layer, which some phase waits for, and the one that takes it. Only the stage with
    the head gives layers to stages that have many more already."""
    last = pipeline.num_stages - 1
    slowest = {
        stage for of_phase in zip(*work, strict=True) for stage in range(last + 1) if of_phase[stage] == max(of_phase)
    }
    for chunk in range(len(held[0])):
        for giver in sorted(slowest):
            if held[giver][chunk] <= pipeline.parts:
                continue
            for taker in range(last + 1):
                if taker != giver and (giver == last or held[taker][chunk] <= held[giver][chunk] + 1):
                    yield chunk, giver, taker


def _price(work: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The slowest stages' work, and, to get past equal ones, the sum of squares."""
    by_phase = list(zip(*work, strict=True))
    return sum(map(max, by_phase)), sum(each * each for of_phase in by_phase for each in of_phase)


def _work(pipeline: Pipeline, stage: int, sizes: Sequence[int]) -> list[float]:
    """Of a stage whose chunks have so many layers, in every phase."""
    parts, layout = pipeline.parts, pipeline.layout
    divided = [[len(part) for part in divide(size, parts)] for size in sizes]
    num_phases = pipeline.num_stages * parts if pipeline.has_stage_blocks else pipeline.num_blocks
    work = []
    for phase in range(num_phases):
        total = 0.0
        for chunk, by_part in enumerate(divided):
            for part, layers in enumerate(by_part):
                if layout == "interleaved":
                    active, behind = chunk % pipeline.num_blocks == phase, chunk >= phase
                elif pipeline.has_stage_blocks:
                    active, behind = stage * parts + part == phase, stage * parts + part >= phase
                else:  # strided blocks begin with one of the first layers
                    active, behind = part == phase, stage > 0 or part >= phase or layout == "strided"
                total += layers * (1 + behind + active)
        if stage == pipeline.num_stages - 1:
            total += pipeline.head * (2 + (phase == (0 if pipeline.tied else num_phases - 1)))
        work.append(total)
    return work
