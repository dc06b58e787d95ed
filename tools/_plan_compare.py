"""tools/plan.py --search and --compare: full training and block coordinate descent, each in its cheapest layouts."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from _plan_output import is_priced, table, unit_of_price, without_price

from megatron.bcd.planner.estimate import Estimate
from megatron.bcd.planner.memory import fits
from megatron.bcd.planner.paper import TimeError
from megatron.bcd.planner.recipe import PRESET_OF, Recipe
from megatron.bcd.planner.search import fewest_gpus, layouts, search
from megatron.bcd.planner.tables import GIB

_COMPARED = {"pretrain": ("full", "offload", "bcd", "pretrain"), "sft": ("full", "offload", "finetune")}
"""By task."""
_FITTED_CLUSTER = "rtx4090"
_WIDTH = 120


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A method on a number of GPUs, in its cheapest layout that fits."""

    estimate: Estimate
    asked_gpus: int
    """Of the command line."""
    fewest: bool
    """Whether no layout fits on fewer GPUs, recomputation tried too."""
    cost_ratio: float | None
    """Price to full training's loss over the least of full training; None if full training fits nowhere."""
    error: TimeError | None
    """Of times predicted for this method; None where none was ever measured or published."""

    @property
    def name(self) -> str:
        """For people: of the method, or BCD's preset."""
        return _name(self.estimate.recipe.method)

    @property
    def is_bcd(self) -> bool:
        return self.estimate.recipe.has_blocks

    @property
    def is_as_asked(self) -> bool:
        """Whether it is on the number of GPUs that was asked for."""
        return self.estimate.recipe.num_gpus == self.asked_gpus

    @property
    def price(self) -> float:
        """Dollars; where the cluster table has no price GPU hours, which have the same ratios."""
        cost = self.estimate.cost
        return cost.dollars if is_priced(self.estimate.recipe.cluster) else cost.gpu_hours

    @property
    def price_with_error(self) -> tuple[float, float] | None:
        """Least and most, if the time is as far off as known ones were."""
        if self.error is None:
            return None
        return self.price / (1 + self.error.highest), self.price / (1 + self.error.lowest)

    @property
    def state_per_parameter(self) -> float:
        """Bytes of model state per parameter on one data-parallel rank of every stage, in its largest phase."""
        ranks = self.estimate.ranks
        stages = {rank.stage for rank in ranks}
        largest = (max(rank.model_state for rank in ranks if rank.stage == stage) for stage in stages)
        return sum(largest) / self.estimate.parameters


def _name(method: str) -> str:
    return f"BCD {PRESET_OF[method]}" if method in PRESET_OF else method


def compare(
    base: Recipe,
    errors: Mapping[str, TimeError],
    *,
    num_blocks: int | None,
    pipeline_size: int | None = None,
    tokens: float | None,
    multiplier: float | None,
) -> tuple[Compared, ...]:
    """Full training, the same with the optimizer on the host, and both presets, cheapest first.

    Each is on the asked number of GPUs, and on the fewest on which it fits; one that fits on no number
    is left out. Numbers of blocks and pipeline sizes are tried as `layouts` does, or it is ``num_blocks`` and
    ``pipeline_size``; ``multiplier`` is of pretrain.
    Raises ValueError if nothing fits, or a flag is out of range.
    """
    found: list[tuple[Estimate, bool]] = []
    for method in _COMPARED[base.task]:
        blocks = None
        if method in PRESET_OF and num_blocks is not None:
            blocks = [num_blocks]
        # full training has no blocks that a layout or frozen parts could be of
        unused = () if method in PRESET_OF else ("layout", "frozen", "always_active", "num_chunks")
        without: dict[str, Any] = dict.fromkeys(unused) | (
            {"adam_moments_dtype": "fp32"} if method == "offload" else {}
        )
        number = blocks[0] if blocks else None
        try:
            recipe = replace(base, method=method, num_blocks=number, **without)
        except ValueError:  # such as fp16 with Muon, or blocks that a preset does not take; the notes name the method
            continue
        given = multiplier if method == "pretrain" else None
        sizes: dict[str, Any] = {"num_blocks": blocks, "pipeline_size": pipeline_size}
        for placed, is_fewest in _on_numbers_of_gpus(recipe, **sizes):
            best = search(placed, **sizes, tokens=tokens, multiplier=given).best[0]
            found.append((best, is_fewest))
    if not found:
        stages = "" if pipeline_size is None else f" with --pipeline-model-parallel-size {pipeline_size}"
        raise ValueError(f"--model {base.model.name}: no method fits on any number of {base.cluster.gpu}{stages}")
    full = min((each.cost.gpu_hours for each, _ in found if each.recipe.method == "full"), default=None)
    rows = [
        Compared(
            estimate=estimate,
            asked_gpus=base.num_gpus,
            fewest=is_fewest,
            cost_ratio=None if full is None else estimate.cost.gpu_hours / full,
            error=errors.get(estimate.recipe.method),
        )
        for estimate, is_fewest in found
    ]
    return tuple(sorted(rows, key=lambda row: row.price))


def _on_numbers_of_gpus(recipe: Recipe, **sizes: Any) -> Iterator[tuple[Recipe, bool]]:
    """The recipe on its own GPUs and on the fewest, each if it fits; and whether these are the fewest. `sizes` are of
    `layouts`."""
    fitting = any(fits(each) for each in layouts(recipe, **sizes))
    fewest = fewest_gpus(recipe, **sizes)
    if fitting:
        yield recipe, fewest is None or fewest >= recipe.num_gpus
    if fewest is not None and (fewest < recipe.num_gpus or not fitting and fewest > recipe.num_gpus):
        batch = -(-recipe.global_batch_size // fewest) * fewest
        stages = sizes["pipeline_size"] or 1
        yield replace(recipe, num_gpus=fewest, pipeline_size=stages, micro_batch_size=1, global_batch_size=batch), True


def gpus(number: int) -> str:
    """In words."""
    return f"{number} GPU{'s' if number > 1 else ''}"


def as_asked(rows: Sequence[Compared]) -> Compared | None:
    """The cheapest on the number of GPUs that was asked for."""
    return next((row for row in rows if row.is_as_asked), None)


def comparison_as_list(rows: Sequence[Compared]) -> list[dict[str, Any]]:
    """Plain values, for JSON."""
    return [
        row.estimate.as_dict()
        | {
            "cost_ratio": row.cost_ratio,
            "state_per_parameter": row.state_per_parameter,
            "dollars_with_error": row.price_with_error if is_priced(row.estimate.recipe.cluster) else None,
        }
        for row in rows
    ]


def show_comparison(rows: Sequence[Compared]) -> str:
    """One line per method and number of GPUs, cheapest first; what is best; what the figures rest on."""
    head = ("method", "GPUs", "PP x DP", "blocks", "recompute", "GiB", "B/param", "s/step", "B-F")
    first = rows[0].estimate.recipe
    lines = [(*head, "days", unit_of_price(first.cluster), "with error", "to full")]
    for row in rows:
        estimate, recipe, cost = row.estimate, row.estimate.recipe, row.estimate.cost
        ends = row.price_with_error
        lines.append(
            (
                row.name,
                str(recipe.num_gpus),
                f"{recipe.pipeline_size} x {recipe.data_size}",
                str(recipe.partition.num_blocks) if recipe.has_blocks else "-",
                recipe.recompute,
                f"{estimate.peak.total / GIB:.1f}",
                f"{row.state_per_parameter:.1f}",
                f"{estimate.iteration_seconds:.2f}",
                f"{cost.multiplier:.2f}",
                f"{cost.days:,.1f}",
                f"{row.price:,.0f}",
                "unknown" if ends is None else f"{ends[0]:,.0f}-{ends[1]:,.0f}",
                "-" if row.cost_ratio is None else f"{row.cost_ratio:.2f}",
            )
        )
    title = (
        f"{first.model.name} on {rows[0].asked_gpus} x {first.cluster.gpu}, {first.precision}, sequence "
        f"{first.tokens:,}, global batch {first.global_batch_size}: the cheapest layout of each method, best first"
    )
    notes = (textwrap.fill(line, _WIDTH, subsequent_indent="  ") for line in (*verdict(rows), *_notes(rows)))
    return "\n".join([title, table(lines), *notes])


def verdict(rows: Sequence[Compared]) -> list[str]:
    """Whether block coordinate descent is the best choice, and what speaks for it where it is not."""
    others = [row for row in rows if not row.is_bcd]
    lines = []
    for name in dict.fromkeys(row.name for row in rows if row.is_bcd):
        mine = [row for row in rows if row.name == name]
        row = as_asked(mine) or mine[0]
        if not others:
            lines.append(
                f"{name}: full training fits on no number of these GPUs, with the optimizer on the host either"
            )
            continue
        best = as_asked(others) if row.is_as_asked else None
        best = best or others[0]
        ratio = row.price / best.price
        limit, cost = row.estimate.cost.multiplier / ratio, row.estimate.cost
        which = "there" if best.estimate.recipe.num_gpus == row.estimate.recipe.num_gpus else "that fits"
        against = f"{best.name} on {gpus(best.estimate.recipe.num_gpus)}, the cheapest full training {which}"
        if ratio < 1:
            lines.append(
                f"{name} costs {ratio:.2f} of {against}, if its multiplier of {cost.multiplier:.2f} holds; above "
                f"{limit:.2f} it costs more"
            )
            continue
        lines.append(
            f"{name} is NOT the best choice: it costs {ratio:.2f} x {against}, and would cost less with a multiplier "
            f"below {limit:.2f} only" + (_may_overlap(row, best))
        )
        if reasons := _reasons(mine, others):
            lines.append(f"what speaks for {name} all the same: {'; '.join(reasons)}")
    return lines


def _may_overlap(row: Compared, best: Compared) -> str:
    mine, theirs = row.price_with_error, best.price_with_error
    if mine is None or theirs is None or mine[0] > theirs[1]:
        return ""
    return "; with the known errors the two overlap"


def _reasons(mine: Sequence[Compared], others: Sequence[Compared]) -> list[str]:
    """GPUs, memory, host memory and time of a method against full training."""
    row, reasons = as_asked(mine) or mine[0], []
    full, offload = ([other for other in others if other.name == name] for name in ("full", "offload"))
    needed, fewest = (min((each.estimate.recipe.num_gpus for each in rows), default=0) for rows in (full, mine))
    if needed > fewest:
        reasons.append(f"full training needs at least {gpus(needed)}, this {fewest}")
    if full and row.state_per_parameter < (state := (as_asked(full) or full[0]).state_per_parameter):
        own = f"{row.state_per_parameter:.1f} bytes of model state per parameter"
        reasons.append(f"{own}, full training {state:.1f}")
    beside = next((each for each in offload if each.estimate.recipe.num_gpus == row.estimate.recipe.num_gpus), None)
    if beside is not None and beside.estimate.host_bytes > row.estimate.host_bytes:
        size = f"{beside.estimate.host_bytes / GIB:.0f} GiB"
        reasons.append(f"offload needs {size} of host memory for each GPU, and a fast way to it")
    if beside is not None and row.estimate.iteration_seconds < beside.estimate.iteration_seconds:
        share = row.estimate.iteration_seconds / beside.estimate.iteration_seconds
        reasons.append(f"an iteration takes {share:.2f} of offload's")
    return reasons


def _notes(rows: Sequence[Compared]) -> list[str]:
    cluster = rows[0].estimate.recipe.cluster
    unit = unit_of_price(cluster)
    notes = [f"to full: {unit} to full training's loss over the least of full training; with error: {unit} if times"
    " are as far off as known ones were; B/param: bytes of model state per parameter"]  # fmt: skip
    if not is_priced(cluster):
        notes.append(without_price(cluster))
    for name in dict.fromkeys(row.name for row in rows):
        mine = [row for row in rows if row.name == name]
        row = mine[0]
        recipe, asked = row.estimate.recipe, row.asked_gpus
        if as_asked(mine) is None:
            notes.append(
                f"{name}: no layout fits on {gpus(asked)}, with recomputation either; shown on {recipe.num_gpus}, the "
                "fewest that fit"
            )
        if recipe.has_blocks:
            cost = row.estimate.cost
            notes.append(f"B-F multiplier of {name}: {cost.multiplier:.2f}, {cost.multiplier_source}")
    compared, found = _COMPARED[rows[0].estimate.recipe.task], {row.estimate.recipe.method for row in rows}
    missing = [method for method in compared if method not in found]
    notes += [f"{_name(method)}: left out, it cannot be had with these flags or fits nowhere" for method in missing]
    return [*notes, *_error_notes(rows)]


def _error_notes(rows: Sequence[Compared]) -> list[str]:
    named = {row.name: row.error for row in rows}
    known = [
        f"{name} {100 * error.lowest:+.0f} to {100 * error.highest:+.0f} % ({error.num_times} times)"
        for name, error in named.items()
        if error is not None
    ]
    recipe = rows[0].estimate.recipe
    notes = [
        "known error: of the iteration time, against the paper's times on RTX 4090 in fp32 that no fit has seen: "
        + ", ".join(known)
    ]
    unknown = [name for name, error in named.items() if error is None]
    if recipe.precision != "fp32":
        unknown.append(recipe.precision)
    if recipe.cluster.name != _FITTED_CLUSTER:
        unknown.append(recipe.cluster.gpu)
    if unknown:
        notes.append(f"no time was ever published or measured for {', '.join(unknown)}; multipliers have errors too")
    return notes
