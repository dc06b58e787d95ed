"""Layouts of blocks on one pipeline: iteration time, memory, and what they change in learning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.bcd.config import DEFAULT_NUM_BLOCKS
from megatron.bcd.planner.memory import fits, peak, rank_memory, recomputation
from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.step_time import mean_seconds, phase_seconds
from megatron.bcd.planner.tables import GIB

PIPELINES = (("G-5.4B", 4), ("L-6.0B", 4), ("G-10B", 8), ("L-11B", 8), ("G-20B", 16), ("L-23B", 16))
"""Models of the paper and stages on which three blocks leave little memory free on a card of 24 GB."""


@dataclass(frozen=True, kw_only=True)
class LayoutTime:
    """A layout on a pipeline."""

    name: str
    recipe: Recipe
    seconds: float
    """Of an iteration, mean over the blocks."""
    ratio: float
    """Over full training's on as many stages: 1F1B, evenly cut, without recomputation, as if it fitted."""
    peak_gib: float
    fits: bool
    num_recomputed: float
    """Layers, of the whole model, mean over the phases."""


def layout_times(base: Recipe) -> list[LayoutTime]:
    """Layouts of ``base``'s number of blocks on its pipeline. Every microbatch is simulated."""
    full = iteration_seconds(replace(base, method="full", num_blocks=None, layout=None, recompute="none", cut="even"))
    return [
        LayoutTime(
            name=name,
            recipe=recipe,
            seconds=(seconds := iteration_seconds(recipe)),
            ratio=seconds / full,
            peak_gib=peak(rank_memory(recipe)).total / GIB,
            fits=fits(recipe),
            num_recomputed=_num_recomputed(recipe),
        )
        for name, recipe in _variants(base)
    ]


def _variants(base: Recipe) -> Iterator[tuple[str, Recipe]]:
    number = DEFAULT_NUM_BLOCKS if base.num_blocks is None else base.num_blocks
    plain = replace(base, num_blocks=number, layout="spread", recompute="none", cut="even")
    chunks = {"layout": "interleaved", "num_chunks": number}
    wanted: list[tuple[str, dict[str, object]]] = [
        ("full training, interleaved", {"method": "full", "num_blocks": None, **chunks, "cut": "auto"}),
        ("spread", {} if fits(plain) else {"recompute": "full"}),
    ]
    better = {"recompute": "auto", "cut": "auto"}
    wanted += [(name, {"layout": name, **better}) for name in ("spread", "strided", "submodel")]
    wanted += [
        ("interleaved", {**chunks, **better}),
        ("interleaved", {**chunks, "num_chunks": 2 * (number or 1), **better}),
    ]
    for name, changes in wanted:
        try:
            recipe = replace(plain, **changes)  # type: ignore[arg-type]
        except ValueError:  # too few layers for so many parts
            continue
        yield name, recipe


def iteration_seconds(recipe: Recipe) -> float:
    """Mean over the blocks, every microbatch simulated."""
    blocks: Sequence[int] = range(recipe.partition.num_blocks)
    return mean_seconds(tuple(phase_seconds(recipe, block, is_whole=True) for block in blocks))


def _num_recomputed(recipe: Recipe) -> float:
    choices = recomputation(recipe)
    return sum(sum(choice.layers) for stage in choices for choice in stage) / recipe.partition.num_blocks
