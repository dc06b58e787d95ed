"""The cheapest layout that fits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.bcd.planner.estimate import Estimate, make_estimate, training_cost
from megatron.bcd.planner.memory import fits
from megatron.bcd.planner.recipe import MAX_GPUS, Recipe
from megatron.bcd.planner.step_time import mean_seconds, phase_seconds

SEARCHED_BLOCKS = (2, 3, 4, 5, 6)
"""Layout submodel tries only the first two, because it has that many blocks on every stage."""
_SIMULATED = 3
"""Number of layouts, cheapest by rough time, whose pipeline is simulated."""
MOST_GPUS = 512
_CHUNKS_PER_BLOCK = (1, 2)
"""Of a stage, in layout interleaved; with 2 a block is two parts of the model."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of a search."""

    num_tried: int
    num_fitting: int
    best: tuple[Estimate, ...]
    """Cheapest first."""


def layouts(
    base: Recipe, *, num_blocks: Sequence[int] | None = None, pipeline_size: int | None = None
) -> Iterator[Recipe]:
    """Every layout of the recipe on its GPUs: pipeline and data size, blocks, micro-batch, recomputation. The cut of
    the stages and how layers form blocks are ``base``'s. With ``pipeline_size`` no other size is tried."""
    if not base.has_blocks:
        choices: Sequence[int | None] = (None,)
    elif base.partition.layout == "stage" or (base.method in ("pretrain", "finetune") and not num_blocks):
        choices = (None,)  # of preset pretrain no multiplier is known at other numbers; finetune has the layers'
    else:
        choices = num_blocks or SEARCHED_BLOCKS[: 2 if base.partition.layout == "submodel" else None]
    for stages in _sizes(base.num_gpus // base.context_size, pipeline_size):
        per_rank, left = divmod(base.global_batch_size, base.num_gpus // (stages * base.context_size))
        if left:
            continue
        for blocks in choices:
            for micro_batch_size in (size for size in _divisors(per_rank) if size & (size - 1) == 0):
                with contextlib.suppress(ValueError):  # more stages or blocks than the model has layers for
                    recipe = replace(
                        base,
                        pipeline_size=stages,
                        num_blocks=blocks,
                        micro_batch_size=micro_batch_size,
                        recompute="none",
                    )
                    yield recipe
                    if not fits(recipe):
                        yield replace(recipe, recompute="auto")


def variants(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe's pipeline and batch with other cuts, and where a layout was not given, with other layouts."""
    if recipe.pipeline_size == 1:
        return
    choices: list[dict[str, object]] = [{"cut": "auto", "layout": recipe.layout}]
    is_free = recipe.layout is None and recipe.method in ("bcd", "finetune")
    if is_free:
        # strided blocks have next to no prefix: never faster than spread
        choices.append({"cut": "auto", "layout": "submodel"})
        number = recipe.partition.num_blocks
        if recipe.num_microbatches >= recipe.pipeline_size:
            choices += [
                {"cut": "auto", "layout": "interleaved", "num_chunks": times * number} for times in _CHUNKS_PER_BLOCK
            ]
    for changes in choices:
        with contextlib.suppress(ValueError):  # too few layers
            yield replace(recipe, **{"recompute": "auto", **changes})  # type: ignore[arg-type]


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
    time; the cheapest are then simulated. Raises ValueError if none fits, with the number of GPUs on which one would.
    """
    tried = list(layouts(base, num_blocks=num_blocks, pipeline_size=pipeline_size))
    fitting = [recipe for recipe in tried if fits(recipe)]
    if not fitting:
        raise ValueError(_nothing_fits(base, num_blocks, pipeline_size))

    def rough_hours(recipe: Recipe) -> float:
        phases = tuple(phase_seconds(recipe, block.index, is_rough=True) for block in recipe.partition.blocks)
        return training_cost(recipe, mean_seconds(phases), tokens=tokens, multiplier=multiplier).gpu_hours

    by_price = sorted(fitting, key=rough_hours)
    is_quick = by_price[0].partition.num_blocks <= SEARCHED_BLOCKS[-1]
    cheapest = by_price[: _SIMULATED if is_quick else 1]
    others = [other for recipe in _of_different_pipelines(cheapest) for other in variants(recipe)] if is_quick else []
    cheapest += [recipe for recipe in others if fits(recipe)]
    estimates = [make_estimate(recipe, tokens=tokens, multiplier=multiplier) for recipe in cheapest]
    return SearchResult(
        num_tried=len(tried),
        num_fitting=len(fitting),
        best=tuple(sorted(estimates, key=lambda estimate: estimate.cost.gpu_hours)[:_SIMULATED]),
    )


def _of_different_pipelines(recipes: Sequence[Recipe]) -> list[Recipe]:
    """The first of each pipeline size and number of blocks."""
    return list({(recipe.pipeline_size, recipe.num_blocks): recipe for recipe in reversed(recipes)}.values())[::-1]


def fewest_gpus(
    base: Recipe, *, num_blocks: Sequence[int] | None = None, pipeline_size: int | None = None
) -> int | None:
    """The fewest GPUs on which some layout fits; None if there are none.

    Powers of two are tried, or such multiples of a given pipeline, with a larger batch if the given one does not divide
    among them; then numbers below the first that fits which keep the batch: any on one node, of several nodes full
    ones.
    """

    def fits_on(number: int, *, batch: int) -> bool:
        return _fits_on(number, base, num_blocks, pipeline_size, batch=batch)

    number = pipeline_size or 1
    while not fits_on(number, batch=-(-base.global_batch_size // number) * number):
        number *= 2
        if number > MOST_GPUS:
            return None
    per_node = base.cluster.gpus_per_node
    between = (other for other in range(number // 2 + 1, number) if other <= per_node or other % per_node == 0)
    fewer = (other for other in between if fits_on(other, batch=base.global_batch_size))
    return next(fewer, number)


def _fits_on(
    number: int, base: Recipe, num_blocks: Sequence[int] | None, pipeline_size: int | None, *, batch: int
) -> bool:
    """Whether some layout fits on so many GPUs."""
    for stages in _sizes(number, pipeline_size):
        try:
            asked = replace(base, num_gpus=number, pipeline_size=stages, micro_batch_size=1, global_batch_size=batch)
        except ValueError:  # the batch does not divide among so many replicas
            continue
        return any(fits(each) for each in layouts(asked, num_blocks=num_blocks, pipeline_size=pipeline_size))
    return False


def valid_pipelines(**fields: Any) -> list[Recipe]:
    """The recipe with every valid pipeline size, shortest first.

    ``fields`` are Recipe's without ``pipeline_size``. Raises the first ValueError if no size is valid.
    """
    suited, reasons = [], []
    for pipeline_size in _divisors(min(max(1, fields["num_gpus"]), MAX_GPUS)):
        try:
            suited.append(Recipe(pipeline_size=pipeline_size, **fields))
        except ValueError as error:
            reasons.append(str(error))
    if not suited:
        raise ValueError(reasons[0])
    return suited


def shortest_that_fits(suited: Sequence[Recipe]) -> Recipe:
    """The shortest pipeline that fits, which has the most data-parallel ranks; the longest if none fits."""
    return next((recipe for recipe in suited if fits(recipe)), suited[-1])


def _nothing_fits(base: Recipe, num_blocks: Sequence[int] | None, pipeline_size: int | None) -> str:
    number = fewest_gpus(base, num_blocks=num_blocks, pipeline_size=pipeline_size)
    remedy = f"--num-gpus {number} would fit" if number else "take a smaller model or a GPU with more memory"
    return (
        f"--num-gpus {base.num_gpus}: no layout of {base.model.name} with --method {base.method} fits on this many "
        f"{base.cluster.gpu}; {remedy}"
    )


def _sizes(number: int, given: int | None) -> list[int]:
    """Pipeline sizes on so many GPUs: the given one alone, if it is one."""
    return [size for size in _divisors(number) if given in (None, size)]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
