"""Layouts of a recipe: the one that fits, the cheapest that fits, the fewest GPUs, the default placement."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.bcd.planner.estimate import Estimate, make_estimate, training_cost
from megatron.bcd.planner.memory import fits, peak, rank_memory
from megatron.bcd.planner.recipe import MAX_GPUS, PRESET_OF, Recipe
from megatron.bcd.planner.step_time import mean_seconds
from megatron.bcd.planner.tables import GIB, Cluster, Model, Placement

SEARCHED_BLOCKS = (2, 3, 4, 5, 6)
"""Layout submodel tries only the first two, because it has that many blocks on every stage."""
_SIMULATED = 3
"""Number of layouts, cheapest by rough time, whose pipeline is simulated."""
MOST_GPUS = 512
_PLANNED_SHARE = 0.95
"""Of a GPU's memory: the estimate is a formula, and running out of memory costs more than recomputing a layer."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    num_tried: int
    num_fitting: int
    best: tuple[Estimate, ...]  # cheapest first; empty if none fits


def layouts(
    base: Recipe, *, num_blocks: Sequence[int] | None = None, pipeline_size: int | None = None
) -> Iterator[Recipe]:
    """Every layout of the recipe on its GPUs: pipeline and data size, blocks, micro-batch, recomputation. The cut of
    the stages and how layers form blocks are ``base``'s. With ``pipeline_size`` no other size is tried."""
    choices: Sequence[int | None]
    if not base.has_blocks or base.partition.layout == "stage":
        choices = (None,)
    elif base.method in ("pretrain", "finetune") and not num_blocks:
        choices = (None,)  # of preset pretrain no multiplier is known at other numbers; finetune has the layers'
    else:
        choices = num_blocks or SEARCHED_BLOCKS[: 2 if base.partition.layout == "submodel" else None]
    for stages in _sizes(base.num_gpus // base.context_size, pipeline_size):
        per_rank, left = divmod(base.global_batch_size, base.num_gpus // (stages * base.context_size))
        if left:
            continue
        for blocks in choices:
            for micro_batch_size in (size for size in _divisors(per_rank) if size & (size - 1) == 0):
                changes = {"num_blocks": blocks, "micro_batch_size": micro_batch_size, "recompute": "none"}
                with contextlib.suppress(ValueError):  # more stages or blocks than the model has layers for
                    recipe = replace(base, pipeline_size=stages, **changes)  # type: ignore[arg-type]
                    yield recipe
                    if not fits(recipe):
                        yield replace(recipe, recompute="auto")


def _variants(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe's pipeline and batch with another cut, and where a layout was not given, with other layouts."""
    if recipe.pipeline_size == 1:
        return
    choices: list[dict[str, Any]] = [{}]
    if recipe.layout is None and recipe.method in ("bcd", "finetune"):
        choices.append({"layout": "submodel"})  # strided blocks have next to no prefix: never faster than spread
        if recipe.num_microbatches >= recipe.pipeline_size:
            number = recipe.partition.num_blocks  # with twice as many chunks a block is two parts of the model
            choices += [{"layout": "interleaved", "num_chunks": times * number} for times in (1, 2)]
    for changes in choices:
        with contextlib.suppress(ValueError):  # too few layers
            yield replace(recipe, recompute="auto", cut="auto", **changes)


def search(
    base: Recipe,
    *,
    num_blocks: Sequence[int] | None = None,
    pipeline_size: int | None = None,
    tokens: float | None = None,
    multiplier: float | None = None,
) -> SearchResult:
    """The layouts with the lowest cost, of those that fit. By GPU hours: all have one price, which may not be known.

    ``num_blocks`` are the numbers of blocks to try, ``pipeline_size`` is the only pipeline. All layouts get a rough
    time; the cheapest are then simulated, and of each of their pipelines other cuts and layouts.
    """
    tried = list(layouts(base, num_blocks=num_blocks, pipeline_size=pipeline_size))
    fitting = [recipe for recipe in tried if fits(recipe)]

    def rough_hours(recipe: Recipe) -> float:
        seconds = mean_seconds(recipe, is_rough=True)
        return training_cost(recipe, seconds, tokens=tokens, multiplier=multiplier).gpu_hours

    by_price = sorted(fitting, key=rough_hours)
    if by_price and by_price[0].partition.num_blocks > SEARCHED_BLOCKS[-1]:  # so many phases take long to simulate
        cheapest = by_price[:1]
    else:
        cheapest = by_price[:_SIMULATED]
        pipelines = {(recipe.pipeline_size, recipe.num_blocks): recipe for recipe in reversed(cheapest)}
        others = [other for recipe in reversed(pipelines.values()) for other in _variants(recipe)]
        cheapest += [recipe for recipe in others if fits(recipe)]
    estimates = [make_estimate(recipe, tokens=tokens, multiplier=multiplier) for recipe in cheapest]
    return SearchResult(
        num_tried=len(tried),
        num_fitting=len(fitting),
        best=tuple(sorted(estimates, key=lambda estimate: estimate.cost.gpu_hours)[:_SIMULATED]),
    )


def fewest_gpus(base: Recipe, **sizes: Any) -> int | None:
    """The fewest GPUs on which some layout fits; None if there are none. ``sizes`` are those of `layouts`.

    Powers of two are tried, or such multiples of a given pipeline, with a larger batch if the given one does not divide
    among them; then numbers below the first that fits which keep the batch: any on one node, of several nodes full
    ones.
    """

    def fits_on(number: int, *, batch: int) -> bool:
        for stages in _sizes(number, sizes.get("pipeline_size")):
            changes: dict[str, Any] = {"pipeline_size": stages, "micro_batch_size": 1, "global_batch_size": batch}
            with contextlib.suppress(ValueError):  # the batch does not divide among so many replicas
                asked = replace(base, num_gpus=number, **changes)
                return any(fits(each) for each in layouts(asked, **sizes))
        return False

    number = sizes.get("pipeline_size") or 1
    while not fits_on(number, batch=-(-base.global_batch_size // number) * number):
        number *= 2
        if number > MOST_GPUS:
            return None
    per_node = base.cluster.gpus_per_node
    between = (other for other in range(number // 2 + 1, number) if other <= per_node or other % per_node == 0)
    return next((other for other in between if fits_on(other, batch=base.global_batch_size)), number)


def valid_pipelines(**fields: Any) -> list[Recipe]:
    """The recipe with every valid pipeline size, shortest first.

    ``fields`` are Recipe's without ``pipeline_size``. Raises the first ValueError if no size is valid.
    """
    suited, reasons = [], []
    for pipeline_size in _divisors(min(max(1, fields["num_gpus"]), MAX_GPUS)):
        try:
            suited.append(Recipe(pipeline_size=pipeline_size, **fields))
        except ValueError as error:
            reasons.append(error)
    if not suited:
        raise reasons[0]
    return suited


def shortest_that_fits(suited: Sequence[Recipe]) -> Recipe:
    """The shortest pipeline that fits, which has the most data-parallel ranks; the longest if none fits."""
    return next((recipe for recipe in suited if fits(recipe)), suited[-1])


def place(
    *,
    model: Model,
    cluster: Cluster,
    method: str,
    placements: Sequence[Placement] = (),
    num_gpus: int | None = None,
    **fields: Any,
) -> Recipe:
    """The recipe on ``num_gpus``; if None, on the GPUs of its row in the method table, else on the fewest that fit.

    ``fields`` are Recipe's. A missing ``pipeline_size`` or ``recompute`` is chosen: the row's pipeline if the number
    of GPUs is the row's, else the shortest pipeline that takes at most 95 % of a GPU's memory, only if none does with
    recomputation (auto: the least that takes). Layout ``stage`` has one block per stage, so it gets at least two stages
    if possible. If nothing fits: the longest pipeline with recomputation, on one node by default. Raises ValueError as
    Recipe does.
    """
    rows = {(row.method, row.model, row.cluster): row for row in placements}
    row = rows.get((method, model.name, cluster.name))
    by_stage = method in PRESET_OF and fields.get("layout") == "stage"
    if row is not None and num_gpus in (None, row.nodes * row.gpus_per_node) and not (by_stage and row.pipeline == 1):
        if num_gpus is None:
            cluster = replace(cluster, gpus_per_node=row.gpus_per_node)
            num_gpus = row.nodes * row.gpus_per_node
        fields = {"pipeline_size": row.pipeline} | fields
    settings = {"model": model, "cluster": cluster, "method": method, **fields}
    if num_gpus is not None:
        return _choose_layout(num_gpus=num_gpus, **settings)
    fewest = fields.get("pipeline_size") or (fields.get("num_blocks") or 2 if by_stage else 1)
    numbers = [min(max(fewest, 1), MAX_GPUS)]
    while 2 * numbers[-1] <= MOST_GPUS:
        numbers.append(2 * numbers[-1])
    tried, reasons = list[Recipe](), []
    for number in numbers:
        try:
            tried.append(place(num_gpus=number, placements=placements, **settings))
        except ValueError as error:  # more stages than layers, a batch that does not divide
            reasons.append(error)
        else:
            if fits(tried[-1]):
                return tried[-1]
    if not tried:
        raise reasons[0]
    return next((each for each in tried if each.num_gpus >= cluster.gpus_per_node), tried[-1])


def _choose_layout(*, recompute: str | None = None, pipeline_size: int | None = None, **fields: Any) -> Recipe:
    """The first layout within _PLANNED_SHARE of the memory, else the first that fits, else the last one."""
    tried: list[Recipe] = []
    fields["memory_share"] = _PLANNED_SHARE
    for choice in ("none", "auto") if recompute is None else (recompute,):
        if pipeline_size is None:
            suited = valid_pipelines(recompute=choice, **fields)
            if fields["method"] in PRESET_OF and fields.get("layout") == "stage":
                suited = [recipe for recipe in suited if recipe.pipeline_size > 1] or suited
            tried += suited
        else:
            tried.append(Recipe(recompute=choice, pipeline_size=pipeline_size, **fields))
    for share in (_PLANNED_SHARE, 1.0):
        for recipe in tried:
            if _takes_at_most(share, recipe):
                return with_fewest_blocks(recipe)
    return tried[-1]


def with_fewest_blocks(recipe: Recipe) -> Recipe:
    """Preset finetune where no number of blocks is given: the fewest within _PLANNED_SHARE of the memory, at least two.

    Fewer, larger blocks train every layer in more steps, and their loss is closer to full training's
    (docs/fine_tuning.md). Of numbers with the same largest block the least is tried. If none fit: one layer a block.
    """
    if recipe.method != "finetune" or recipe.num_blocks is not None or recipe.layout == "stage":
        return recipe
    if recipe.recompute == "auto":  # one layer a block leaves most memory to activations
        return recipe
    per_stage = recipe.model.layers // recipe.pipeline_size
    for num_blocks in sorted({math.ceil(per_stage / size) for size in range(2, per_stage)}):
        with contextlib.suppress(ValueError):  # a layout that cannot have so many
            other = replace(recipe, num_blocks=num_blocks)
            if _takes_at_most(_PLANNED_SHARE, other):
                return other
    return recipe


def _takes_at_most(share: float, recipe: Recipe) -> bool:
    return peak(rank_memory(recipe)).total / GIB <= share * recipe.cluster.memory_gib


def _sizes(number: int, given: int | None) -> list[int]:
    """Pipeline sizes on so many GPUs: the given one alone, if it is one."""
    return [size for size in _divisors(number) if given in (None, size)]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
