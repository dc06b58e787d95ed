"""Where a recipe runs unless the user says otherwise: how many GPUs, which pipeline, with or without recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron.bcd.planner.memory import fits, peak, rank_memory
from megatron.bcd.planner.recipe import MAX_GPUS, METHODS, RECOMPUTE, Recipe
from megatron.bcd.planner.search import suited_pipelines
from megatron.bcd.planner.tables import GIB, Cluster, Model, Placement

_PLANNED_SHARE = 0.95
"""Of a GPU's memory: a plan is a formula, and a run that ends for lack of memory is dearer than a recomputed layer."""
_MOST_GPUS = 512
_TINY_LAYERS, _TINY_HIDDEN, _TINY_HEADS, _TINY_SEQUENCE = 6, 64, 4, 64
_BYTES = 257
"""ByteLevelTokenizer's tokens."""


def placed(
    *,
    model: Model,
    cluster: Cluster,
    method: str,
    placements: Sequence[Placement],
    num_gpus: int | None = None,
    **fields: Any,
) -> Recipe:
    """The recipe on ``num_gpus``; where None, on those of its row in the method table, else on the fewest that do.

    ``fields`` are Recipe's; what they leave out of ``pipeline_size`` and ``recompute`` is chosen: the row's, where the
    recipe runs on as many GPUs, or the shortest pipeline that takes at most 95 % of a GPU's memory, with recomputation
    only where none does without. Layout ``stage`` has a block for each stage, so at least two stages where it can.
    Where nothing fits at all, the longest pipeline with recomputation, on one node unless told otherwise. Raises
    ValueError as Recipe does.
    """
    rows = {(row.method, row.model, row.cluster): row for row in placements}
    row = rows.get((method, model.name, cluster.name))
    by_stage = method == "bcd" and fields.get("layout") == "stage"
    if row is not None and num_gpus in (None, row.nodes * row.gpus_per_node) and not (by_stage and row.pipeline == 1):
        if num_gpus is None:
            cluster = replace(cluster, gpus_per_node=row.gpus_per_node)
            num_gpus = row.nodes * row.gpus_per_node
        fields = {"pipeline_size": row.pipeline} | fields
    asked = {"model": model, "cluster": cluster, "method": method, **fields}
    if num_gpus is not None:
        return _laid_out(num_gpus=num_gpus, **asked)
    tried = list(on_more_and_more(placements=placements, **asked))
    if fits(tried[-1]):
        return tried[-1]
    return next((each for each in tried if each.num_gpus >= cluster.gpus_per_node), tried[-1])


def on_more_and_more(**asked: Any) -> Iterator[Recipe]:
    """What ``placed`` makes of these on 1, 2, 4, ... GPUs, or such multiples of a given pipeline, until one fits.

    Where none does, the last one is the largest. Raises ValueError, the first one's, where no number suits.
    """
    by_stage = asked["method"] == "bcd" and asked.get("layout") == "stage"
    stages = asked.get("pipeline_size") or (asked.get("num_blocks") or 2 if by_stage else 1)
    numbers = [min(max(stages, 1), MAX_GPUS)]
    while 2 * numbers[-1] <= _MOST_GPUS:
        numbers.append(2 * numbers[-1])
    reasons, found = [], False
    for number in numbers:
        try:
            recipe = placed(num_gpus=number, **asked)
        except ValueError as error:  # more stages than layers, a batch that does not divide
            reasons.append(error)
        else:
            found = True
            yield recipe
            if fits(recipe):
                return
    if not found:
        raise reasons[0]


def that_fits_on(num_gpus: int, **asked: Any) -> Recipe | None:
    """What is asked for on so many GPUs, with another method where its own does not fit; None where no method does."""
    cluster = asked["cluster"]
    asked["cluster"] = replace(cluster, gpus_per_node=max(num_gpus, cluster.gpus_per_node))
    own = asked["method"]
    for method in (own, *(each for each in METHODS if each != own)):
        blocks = {} if method == own else {"num_blocks": None}
        try:
            other = placed(num_gpus=num_gpus, **asked | {"method": method} | blocks)
        except ValueError:  # more stages than layers, a batch that does not divide
            continue
        if fits(other):
            return other
    return None


def scaled_down(recipe: Recipe, *, num_gpus: int = 2) -> Recipe:
    """The same recipe as a run of seconds: a small model of the same form, on at most ``num_gpus`` ranks.

    Method, layout, number of blocks (but in layout ``stage``, where it is that of the stages), precision and
    recomputation stay, and a pipeline stays a pipeline. One node; its vocabulary is ByteLevelTokenizer's.
    """
    model, ranks = recipe.model, min(num_gpus, recipe.num_gpus)
    stages = min(recipe.pipeline_size, ranks)
    small = replace(
        model,
        layers=max(_TINY_LAYERS, stages * (recipe.num_blocks or 3)),
        hidden=_TINY_HIDDEN,
        heads=_TINY_HEADS,
        groups=_TINY_HEADS // (2 if model.groups < model.heads else 1),
        ffn=2 * round(_TINY_HIDDEN * model.ffn / model.hidden / 2),
        vocabulary=_BYTES,
        sequence=_TINY_SEQUENCE,
    )
    return replace(
        recipe,
        model=small,
        cluster=replace(recipe.cluster, gpus_per_node=ranks),
        num_gpus=ranks,
        num_blocks=None if recipe.layout == "stage" else recipe.num_blocks,
        pipeline_size=stages,
        sequence=None,
        micro_batch_size=2,
        global_batch_size=8,
    )


def _laid_out(*, recompute: str | None = None, pipeline_size: int | None = None, **fields: Any) -> Recipe:
    """The first layout that fits with room to spare, else the first that fits, else the last one."""
    tried: list[Recipe] = []
    for choice in RECOMPUTE if recompute is None else (recompute,):
        if pipeline_size is None:
            suited = suited_pipelines(recompute=choice, **fields)
            if fields["method"] == "bcd" and fields.get("layout") == "stage":
                suited = [recipe for recipe in suited if recipe.pipeline_size > 1] or suited
            tried += suited
        else:
            tried.append(Recipe(recompute=choice, pipeline_size=pipeline_size, **fields))
    peaks = [peak(rank_memory(recipe)).total / GIB for recipe in tried]
    for share in (_PLANNED_SHARE, 1.0):
        for recipe, needed in zip(tried, peaks, strict=True):
            if needed <= share * recipe.cluster.memory_gib:
                return recipe
    return tried[-1]
