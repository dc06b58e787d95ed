"""Where a recipe runs unless the user says otherwise: how many GPUs, which pipeline, with or without recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.bcd.planner.memory import fits, peak, rank_memory
from megatron.bcd.planner.recipe import METHODS, RECOMPUTE, Recipe
from megatron.bcd.planner.search import fewest_gpus, suited_pipelines
from megatron.bcd.planner.tables import GIB, Cluster, Model, Placement

_PLANNED_SHARE = 0.95
"""Of a GPU's memory: a plan is a formula, and a run that ends for lack of memory is dearer than a recomputed layer."""
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

    ``fields`` are Recipe's; what they leave out of ``pipeline_size`` and ``recompute`` is chosen: the row's or the
    shortest pipeline that takes at most 95 % of a GPU's memory, with recomputation only where none does without. Where
    nothing fits at all, the longest pipeline with recomputation. Raises ValueError where no number of GPUs fits, or as
    Recipe does.
    """
    rows = {(row.method, row.model, row.cluster): row for row in placements}
    row = rows.get((method, model.name, cluster.name))
    if num_gpus is None and row is not None:
        cluster = replace(cluster, gpus_per_node=row.gpus_per_node)
        num_gpus = row.nodes * row.gpus_per_node
        fields = {"pipeline_size": row.pipeline} | fields
    if num_gpus is None:
        alone = Recipe(
            model=model,
            cluster=cluster,
            method=method,
            num_gpus=1,
            **fields | {"pipeline_size": 1, "recompute": "none"},
        )
        num_gpus = fewest(alone)
        if num_gpus is None:
            raise ValueError(f"--model {model.name}: no number of {cluster.gpu} fits it with --method {method}")
    return _laid_out(model=model, cluster=cluster, method=method, num_gpus=num_gpus, **fields)


def fewest(recipe: Recipe) -> int | None:
    """The fewest GPUs, powers of two, on which the recipe fits with the same blocks; None where none do."""
    return fewest_gpus(recipe, num_blocks=[recipe.num_blocks or 3])


def that_fits_on(recipe: Recipe, num_gpus: int) -> Recipe | None:
    """The recipe on so many GPUs, with another method where its own does not fit; None where no method does."""
    for method in (recipe.method, *(each for each in METHODS if each != recipe.method)):
        try:
            other = _laid_out(
                model=recipe.model,
                cluster=replace(recipe.cluster, gpus_per_node=max(num_gpus, recipe.cluster.gpus_per_node)),
                method=method,
                num_gpus=num_gpus,
                num_blocks=recipe.num_blocks if method == recipe.method else None,
                layout=recipe.layout,
                precision=recipe.precision,
                sequence=recipe.sequence,
                micro_batch_size=recipe.micro_batch_size,
                global_batch_size=recipe.global_batch_size,
            )
        except ValueError:  # more stages than layers, a batch that does not divide
            continue
        if fits(other):
            return other
    return None


def scaled_down(recipe: Recipe, *, num_gpus: int = 2) -> Recipe:
    """The same recipe as a run of seconds: a small model of the same form, on at most ``num_gpus`` ranks.

    Method, layout, number of blocks, precision and recomputation stay, and a pipeline stays a pipeline. Its vocabulary
    is ByteLevelTokenizer's.
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
        num_gpus=ranks,
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
            tried += suited_pipelines(recompute=choice, **fields)
        else:
            tried.append(Recipe(recompute=choice, pipeline_size=pipeline_size, **fields))
    peaks = [peak(rank_memory(recipe)).total / GIB for recipe in tried]
    for share in (_PLANNED_SHARE, 1.0):
        for recipe, needed in zip(tried, peaks, strict=True):
            if needed <= share * recipe.cluster.memory_gib:
                return recipe
    return tried[-1]
