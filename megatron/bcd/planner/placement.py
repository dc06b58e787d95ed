"""Default placement of a recipe: number of GPUs, pipeline size, with or without recomputation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron.bcd.planner.memory import fits, peak, rank_memory
from megatron.bcd.planner.recipe import MAX_GPUS, METHODS, PRESET_OF, Recipe
from megatron.bcd.planner.search import MOST_GPUS, valid_pipelines
from megatron.bcd.planner.tables import GIB, Cluster, Model, Placement

_PLANNED_SHARE = 0.95
"""Of a GPU's memory: the estimate is a formula, and running out of memory costs more than recomputing a layer."""
_TINY_LAYERS, _TINY_HIDDEN, _TINY_HEADS, _TINY_SEQUENCE = 6, 64, 4, 64
_BYTES = 257
"""Vocabulary of ByteLevelTokenizer."""


def place(
    *,
    model: Model,
    cluster: Cluster,
    method: str,
    placements: Sequence[Placement],
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
    tried = list(grow_until_fits(placements=placements, **settings))
    if fits(tried[-1]):
        return tried[-1]
    return next((each for each in tried if each.num_gpus >= cluster.gpus_per_node), tried[-1])


def grow_until_fits(**settings: Any) -> Iterator[Recipe]:
    """``place`` on 1, 2, 4, ... GPUs (or such multiples of a given pipeline) until a recipe fits.

    If none fits, the last one has the most GPUs. Raises the first ValueError if no number of GPUs is valid.
    """
    by_stage = settings["method"] in PRESET_OF and settings.get("layout") == "stage"
    stages = settings.get("pipeline_size") or (settings.get("num_blocks") or 2 if by_stage else 1)
    numbers = [min(max(stages, 1), MAX_GPUS)]
    while 2 * numbers[-1] <= MOST_GPUS:
        numbers.append(2 * numbers[-1])
    reasons, found = [], False
    for number in numbers:
        try:
            recipe = place(num_gpus=number, **settings)
        except ValueError as error:  # more stages than layers, a batch that does not divide
            reasons.append(error)
        else:
            found = True
            yield recipe
            if fits(recipe):
                return
    if not found:
        raise reasons[0]


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
            if peak(rank_memory(other)).total <= _PLANNED_SHARE * other.cluster.memory_gib * GIB:
                return other
    return recipe


def fit_on(num_gpus: int, **settings: Any) -> Recipe | None:
    """The recipe on ``num_gpus`` of one node, with another method if its own does not fit; None if no method fits."""
    cluster = settings["cluster"]
    settings["cluster"] = replace(cluster, gpus_per_node=max(num_gpus, cluster.gpus_per_node))
    own = settings["method"]
    for method in (own, *(each for each in METHODS if each not in (own, "finetune"))):
        blocks = {} if method == own else {"num_blocks": None}
        try:
            other = place(num_gpus=num_gpus, **settings | {"method": method} | blocks)
        except ValueError:  # more stages than layers, a batch that does not divide
            continue
        if fits(other):
            return other
    return None


def scaled_down(recipe: Recipe, *, num_gpus: int = 2) -> Recipe:
    """The same recipe with a small model of the same family, on at most ``num_gpus`` ranks of one node.

    Method, layout, number of blocks (in layout ``stage``: one per stage), precision and recomputation stay, and a
    pipeline stays a pipeline. The vocabulary is ByteLevelTokenizer's.
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
        head_dim=0,
        positions=0,
    )
    return replace(
        recipe,
        model=small,
        cluster=replace(recipe.cluster, gpus_per_node=ranks),
        num_gpus=ranks,
        num_blocks=None if recipe.layout == "stage" else recipe.num_blocks,
        pipeline_size=stages,
        context_size=1,
        sequence=None,
        micro_batch_size=2,
        global_batch_size=8,
    )


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
    peaks = [peak(rank_memory(recipe)).total / GIB for recipe in tried]
    for share in (_PLANNED_SHARE, 1.0):
        for recipe, needed in zip(tried, peaks, strict=True):
            if needed <= share * recipe.cluster.memory_gib:
                return with_fewest_blocks(recipe)
    return tried[-1]
