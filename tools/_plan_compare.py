"""tools/plan.py --compare: full training and the presets of block coordinate descent on the same GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from _plan_output import table

from megatron.bcd.planner.estimate import Estimate
from megatron.bcd.planner.memory import fits
from megatron.bcd.planner.recipe import PRESET_OF, Recipe
from megatron.bcd.planner.search import fewest_gpus, layouts, search
from megatron.bcd.planner.tables import GIB

_COMPARED = ("full", "offload", "bcd", "pretrain")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A method in its cheapest layout that fits."""

    estimate: Estimate
    asked_gpus: int
    """With fewer than the estimate's GPUs no layout fits, recomputation tried too."""
    cost_ratio: float | None
    """Dollars to full training's loss over those of full training; None if full training fits nowhere."""

    @property
    def state_per_parameter(self) -> float:
        """Bytes of model state per parameter on one data-parallel rank of every stage, in its largest phase."""
        ranks = self.estimate.ranks
        stages = {rank.stage for rank in ranks}
        largest = (max(rank.model_state for rank in ranks if rank.stage == stage) for stage in stages)
        return sum(largest) / self.estimate.parameters


def compare(
    base: Recipe, *, num_blocks: int | None, tokens: float | None, multiplier: float | None
) -> tuple[Compared, ...]:
    """Full training, the same with the optimizer on the host, and both presets; one that fits on no number of GPUs is
    left out.

    Blocks are three, or ``num_blocks``; ``multiplier`` is of pretrain. A method that does not fit takes the fewest GPUs
    (a power of two) on which it does. Raises ValueError if nothing fits, or a flag is out of range.
    """
    found: dict[str, Estimate] = {}
    for method in _COMPARED:
        blocks = [num_blocks or 3] if method in PRESET_OF else None
        recipe = replace(base, method=method, num_blocks=blocks[0] if blocks else None, pipeline_size=1)
        if not any(fits(each) for each in layouts(recipe, num_blocks=blocks)):
            number = fewest_gpus(recipe, num_blocks=blocks)
            if number is None or number <= recipe.num_gpus:
                continue
            batch = -(-recipe.global_batch_size // number) * number
            recipe = replace(recipe, num_gpus=number, global_batch_size=batch)
        given = multiplier if method == "pretrain" else None
        found[method] = search(recipe, num_blocks=blocks, tokens=tokens, multiplier=given).best[0]
    if not found:
        raise ValueError(f"--model {base.model.name}: no method fits on any number of {base.cluster.gpu}")
    full = found.get("full")
    return tuple(
        Compared(
            estimate=estimate,
            asked_gpus=base.num_gpus,
            cost_ratio=None if full is None else estimate.cost.dollars / full.cost.dollars,
        )
        for estimate in found.values()
    )


def comparison_as_list(rows: Sequence[Compared]) -> list[dict[str, Any]]:
    """Plain values, for JSON."""
    return [
        row.estimate.as_dict() | {"cost_ratio": row.cost_ratio, "state_per_parameter": row.state_per_parameter}
        for row in rows
    ]


def show_comparison(rows: Sequence[Compared]) -> str:
    """One line per method, and what the figures rest on."""
    head = ("method", "GPUs", "PP x DP", "micro-batch", "recompute", "GiB", "bytes/param", "iteration s", "multiplier")
    lines = [(*head, "days", "dollars", "to full")]
    for row in rows:
        estimate, recipe, cost = row.estimate, row.estimate.recipe, row.estimate.cost
        lines.append(
            (
                PRESET_OF.get(recipe.method, recipe.method),
                str(recipe.num_gpus),
                f"{recipe.pipeline_size} x {recipe.data_size}",
                str(recipe.micro_batch_size),
                recipe.recompute,
                f"{estimate.peak.total / GIB:.1f}",
                f"{row.state_per_parameter:.1f}",
                f"{estimate.iteration_seconds:.2f}",
                f"{cost.multiplier:.2f}",
                f"{cost.days:,.1f}",
                f"{cost.dollars:,.0f}",
                "-" if row.cost_ratio is None else f"{row.cost_ratio:.2f}",
            )
        )
    first = rows[0].estimate.recipe
    title = (
        f"{first.model.name} on {rows[0].asked_gpus} x {first.cluster.gpu}, {first.precision}, sequence "
        f"{first.tokens:,}, global batch {first.global_batch_size}: the cheapest layout of each method"
    )
    return "\n".join([title, table(lines), *_notes(rows)])


def _notes(rows: Sequence[Compared]) -> list[str]:
    notes = ["to full: dollars to full training's loss over those of full training"]
    for row in rows:
        recipe, asked = row.estimate.recipe, row.asked_gpus
        if recipe.num_gpus > asked:
            notes.append(
                f"{recipe.method}: no layout fits on {asked} GPUs, with recomputation either; shown on "
                f"{recipe.num_gpus}, the fewest that fit"
            )
        if recipe.has_blocks:
            cost = row.estimate.cost
            notes.append(f"multiplier of {PRESET_OF[recipe.method]}: {cost.multiplier:.2f}, {cost.multiplier_source}")
    return notes
