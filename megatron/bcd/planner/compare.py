"""Methods side by side, each in its cheapest layouts, and layouts of blocks on one pipeline side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.bcd.config import DEFAULT_NUM_BLOCKS
from megatron.bcd.planner.estimate import Estimate
from megatron.bcd.planner.memory import fits, peak, rank_memory, recomputation
from megatron.bcd.planner.recipe import PRESET_OF, Recipe
from megatron.bcd.planner.remedies import OF_BLOCKS
from megatron.bcd.planner.search import fewest_gpus, search
from megatron.bcd.planner.step_time import mean_seconds
from megatron.bcd.planner.tables import GIB

COMPARED = {"pretrain": ("full", "offload", "bcd", "pretrain"), "sft": ("full", "offload", "finetune")}
"""Methods by task."""
PIPELINES = (("G-5.4B", 4), ("L-6.0B", 4), ("G-10B", 8), ("L-11B", 8), ("G-20B", 16), ("L-23B", 16))
"""Models of the paper and stages on which three blocks leave little memory free on a card of 24 GB."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A method on a number of GPUs, in its cheapest layout that fits."""

    estimate: Estimate
    is_as_asked: bool
    """Whether it is on the number of GPUs that was asked for; else on the fewest on which it fits."""
    cost_ratio: float | None
    """Price to full training's loss over the least of full training; None if full training fits nowhere."""
    errors: list[float]
    """Relative, of times predicted for this method; empty where none was ever measured or published."""

    @property
    def name(self) -> str:
        return name_of(self.estimate.recipe.method)

    @property
    def price_with_error(self) -> tuple[float, float] | None:
        """Least and most, if the time is as far off as known ones were."""
        if not self.errors:
            return None
        return self.estimate.price / (1 + max(self.errors)), self.estimate.price / (1 + min(self.errors))


def name_of(method: str) -> str:
    """For people: of the method, or BCD's preset."""
    return f"BCD {PRESET_OF[method]}" if method in PRESET_OF else method


def compare(
    base: Recipe,
    errors: Mapping[str, list[float]],
    *,
    num_blocks: int | None,
    pipeline_size: int | None = None,
    tokens: float | None,
    multiplier: float | None,
) -> list[Compared]:
    """Full training, the same with the optimizer on the host, and both presets, cheapest first.

    Each is on the asked number of GPUs, and on the fewest on which it fits; one that fits on no number is left out.
    ``multiplier`` is of pretrain. Raises ValueError if nothing fits, or a flag is out of range.
    """
    found: list[Estimate] = []
    for method in COMPARED[base.task]:
        changes: dict[str, Any] = {"method": method, "num_blocks": num_blocks}
        if method not in PRESET_OF:
            changes |= dict.fromkeys(("num_blocks", *OF_BLOCKS))
        if method == "offload":
            changes["adam_moments_dtype"] = "fp32"
        try:
            recipe = replace(base, **changes)
        except ValueError:  # such as fp16 with Muon, or blocks that a preset does not take
            continue
        blocks = None if changes["num_blocks"] is None else [num_blocks]
        sizes: dict[str, Any] = {"num_blocks": blocks, "pipeline_size": pipeline_size}
        costs: dict[str, Any] = {"tokens": tokens, "multiplier": multiplier if method == "pretrain" else None}
        best = search(recipe, **sizes, **costs).best[:1]
        fewest = fewest_gpus(recipe, **sizes)
        if fewest is not None and (fewest < recipe.num_gpus or not best and fewest > recipe.num_gpus):
            batch = -(-recipe.global_batch_size // fewest) * fewest
            few: dict[str, Any] = {"num_gpus": fewest, "pipeline_size": pipeline_size or 1, "global_batch_size": batch}
            best += search(replace(recipe, micro_batch_size=1, **few), **sizes, **costs).best[:1]
        found += best
    if not found:
        stages = "" if pipeline_size is None else f" with --pipeline-model-parallel-size {pipeline_size}"
        raise ValueError(f"--model {base.model.name}: no method fits on any number of {base.cluster.gpu}{stages}")
    full = min((each.cost.gpu_hours for each in found if each.recipe.method == "full"), default=None)
    return [
        Compared(
            estimate=estimate,
            is_as_asked=estimate.recipe.num_gpus == base.num_gpus,
            cost_ratio=None if full is None else estimate.cost.gpu_hours / full,
            errors=errors.get(estimate.recipe.method, []),
        )
        for estimate in sorted(found, key=lambda estimate: estimate.price)
    ]


@dataclass(frozen=True, kw_only=True)
class LayoutTime:
    """A layout on a pipeline."""

    name: str
    recipe: Recipe
    seconds: float  # of an iteration, mean over the blocks
    ratio: float  # over full training's on as many stages: 1F1B, evenly cut, no recomputation, as if it fitted
    peak_gib: float
    fits: bool
    num_recomputed: float  # layers, of the whole model, mean over the phases


def layout_times(base: Recipe) -> Iterator[LayoutTime]:
    """Layouts of ``base``'s number of blocks on its pipeline. Every microbatch is simulated."""
    number = DEFAULT_NUM_BLOCKS if base.num_blocks is None else base.num_blocks
    plain = replace(base, num_blocks=number, layout="spread", recompute="none", cut="even")
    full = replace(base, method="full", num_blocks=None, layout=None, recompute="none", cut="even")
    full_seconds = mean_seconds(full, is_whole=True)
    chunks, better = {"layout": "interleaved", "num_chunks": number}, {"recompute": "auto", "cut": "auto"}
    wanted: list[tuple[str, dict[str, Any]]] = [
        ("full training, interleaved", {"method": "full", "num_blocks": None, **chunks, "cut": "auto"}),
        ("spread", {} if fits(plain) else {"recompute": "full"}),
        *((name, {"layout": name, **better}) for name in ("spread", "strided", "submodel")),
        ("interleaved", {**chunks, **better}),
        ("interleaved", {**chunks, "num_chunks": 2 * (number or 1), **better}),
    ]
    for name, changes in wanted:
        try:
            recipe = replace(plain, **changes)
        except ValueError:  # too few layers for so many parts
            continue
        seconds, layers = mean_seconds(recipe, is_whole=True), 0
        for stage in recomputation(recipe):
            layers += sum(sum(choice.layers) for choice in stage)
        yield LayoutTime(
            name=name,
            recipe=recipe,
            seconds=seconds,
            ratio=seconds / full_seconds,
            peak_gib=peak(rank_memory(recipe)).total / GIB,
            fits=fits(recipe),
            num_recomputed=layers / recipe.partition.num_blocks,
        )
