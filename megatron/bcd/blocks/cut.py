"""How many layers each pipeline stage gets, so that stages take equally long (`--pipeline-cut auto`). Pure.

Work is counted in passes of one layer, as in docs/concepts.md: forward, input gradient and weight gradient cost 1 each.
The output head with its loss is worth some layers. The embedding is a look-up and counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def balanced_cut(pipeline: Pipeline) -> tuple[int, ...]:
    """Layers of every virtual stage, in depth order, with the least time of the slowest stage, summed over the phases.

    Begins with an even cut and moves single layers between stages while that helps. In layout ``interleaved`` a layer
    stays in its chunk, so that blocks keep their layers. Every stage keeps a layer for each of its parts.
    """
    cut = _Cut(pipeline)
    best = cut.price()
    while True:
        price, move = min(((cut.price_after(move), move) for move in cut.moves()), default=(best, None))
        if move is None or price >= best:
            return tuple(size for sizes in cut.sizes for size in sizes)
        best = price
        cut.apply(move)


_Move = tuple[int, int, int]
"""Chunk, the stage that gives a layer, and the one that takes it."""


class _Cut:
    """Sizes by chunk and stage, and every stage's work in every phase."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._parts = 1 if pipeline.layout == "interleaved" else pipeline.num_blocks
        if pipeline.layout == "interleaved":
            pieces = divide_into_pieces(pipeline.num_layers, parts=pipeline.num_chunks, stages=pipeline.num_stages)
        else:
            pieces = (divide(pipeline.num_layers, pipeline.num_stages),)
        self.sizes = [[len(piece) for piece in chunk] for chunk in pieces]
        self._phases = range(pipeline.num_stages * self._parts if self._has_stage_blocks else pipeline.num_blocks)
        self._work = [[self._work_of(stage, phase) for stage in range(pipeline.num_stages)] for phase in self._phases]

    @property
    def _has_stage_blocks(self) -> bool:
        return self._pipeline.layout in ("stage", "submodel")

    def price(self) -> tuple[float, float]:
        """The slowest stages' work, and, to get past equal ones, the sum of squares."""
        return _price(self._work)

    def moves(self) -> list[_Move]:
        """Moves from a stage that some phase waits for; each part keeps a layer. Only the stage with the head gives
        layers to stages that have many more already."""
        stages, last = range(self._pipeline.num_stages), self._pipeline.num_stages - 1
        slowest = {stage for work in self._work for stage in stages if work[stage] == max(work)}
        return [
            (chunk, giver, taker)
            for chunk, sizes in enumerate(self.sizes)
            for giver in sorted(slowest)
            if sizes[giver] > self._parts
            for taker in stages
            if taker != giver and (giver == last or sizes[taker] <= sizes[giver] + 1)
        ]

    def price_after(self, move: _Move) -> tuple[float, float]:
        _, giver, taker = move
        self._shift(move, 1)
        changed = [list(of_phase) for of_phase in self._work]
        for phase in self._phases:
            for stage in (giver, taker):
                changed[phase][stage] = self._work_of(stage, phase)
        self._shift(move, -1)
        return _price(changed)

    def apply(self, move: _Move) -> None:
        self._shift(move, 1)
        for phase in self._phases:
            for stage in move[1:]:
                self._work[phase][stage] = self._work_of(stage, phase)

    def _shift(self, move: _Move, layers: int) -> None:
        chunk, giver, taker = move
        self.sizes[chunk][giver] -= layers
        self.sizes[chunk][taker] += layers

    def _work_of(self, stage: int, phase: int) -> float:
        pipeline, total = self._pipeline, 0.0
        is_interleaved = pipeline.layout == "interleaved"
        for chunk, sizes in enumerate(self.sizes):
            for part, layers in enumerate(divide(sizes[stage], self._parts)):
                if is_interleaved:
                    active, behind = chunk % pipeline.num_blocks == phase, chunk >= phase
                elif self._has_stage_blocks:
                    place = stage * self._parts + part
                    active, behind = place == phase, place >= phase
                else:  # strided blocks begin with one of the first layers
                    active, behind = part == phase, stage > 0 or part >= phase or pipeline.layout == "strided"
                total += len(layers) * (1 + behind + active)
        if stage == pipeline.num_stages - 1:
            owner = 0 if pipeline.tied else self._phases[-1]
            total += pipeline.head * (2 + (phase == owner))
        return total


def _price(work: Sequence[Sequence[float]]) -> tuple[float, float]:
    return sum(max(of_phase) for of_phase in work), sum(each * each for of_phase in work for each in of_phase)
