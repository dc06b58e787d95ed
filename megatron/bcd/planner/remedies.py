"""What to change in a plan that does not fit, so that it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.bcd.config import DEFAULT_NUM_BLOCKS
from megatron.bcd.planner.memory import fits
from megatron.bcd.planner.recipe import PRESET_OF, Recipe
from megatron.bcd.planner.search import MOST_GPUS, shortest_that_fits, valid_pipelines

_MOST_BLOCKS = 12
_OTHERS = {
    "full": ("offload", "pretrain", "bcd"),
    "offload": ("pretrain", "bcd"),
    "bcd": ("pretrain", "offload"),
    "pretrain": ("offload", "bcd"),
    "finetune": ("offload",),
}
"""Other methods, the nearest first."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Changed settings with which a plan fits."""

    changes: Mapping[str, Any]
    """Fields of Recipe, but the pipeline's size."""
    recipe: Recipe


def remedies(fields: Mapping[str, Any], *, pipeline_size: int | None) -> list[Remedy]:
    """Changes that make a recipe of these fields fit, those first that keep method and GPUs; empty if none does.

    Each is the smallest of its kind: a setting alone, the settings together where none helps alone, another method,
    more GPUs (a power of two times as many), with
    recomputation if that needs fewer. ``pipeline_size`` is kept where it was
    given, unless no other change helps.
    """
    for kept in dict.fromkeys((pipeline_size, None)):
        settings = list(_settings(fields))
        found = _those_that_fit(fields, settings, kept)
        if not found:
            together = [dict(pair) for pair in _together(settings)]
            found = _those_that_fit(fields, together, kept)[:1]
        for method in _OTHERS[fields["method"]]:
            other = {"method": method, "num_blocks": None, "layout": None}
            found += _those_that_fit(fields, [other, other | {"recompute": "auto"}], kept)[:1]
        more: list[dict[str, Any]] = [{}, {"recompute": "auto"}, {"recompute": "auto", "micro_batch_size": 1}]
        larger = [each for extra in more if (each := _on_more_gpus(fields, extra, kept))]
        found += sorted(larger, key=lambda each: each.recipe.num_gpus)[:1]
        if found:
            return found
    return []


def _settings(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if fields["micro_batch_size"] > 1:
        yield {"micro_batch_size": 1}
    if fields["recompute"] == "none":
        yield {"recompute": "auto"}
    if fields["precision"] == "fp32":
        yield {"precision": "bf16"}
    if fields["method"] in PRESET_OF and fields.get("layout") != "stage":
        given = fields["num_blocks"]
        for number in range((DEFAULT_NUM_BLOCKS if given is None else given) + 1, _MOST_BLOCKS + 1):
            yield {"num_blocks": number}


def _together(settings: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One more of the settings each time; of the numbers of blocks each in turn."""
    merged: dict[str, Any] = {}
    for setting in settings:
        merged = merged | setting
        if len(merged) > 1:
            yield merged


def _those_that_fit(
    fields: Mapping[str, Any], settings: list[dict[str, Any]], pipeline_size: int | None
) -> list[Remedy]:
    """At most one for each name of a setting."""
    found: dict[tuple[str, ...], Remedy] = {}
    for changes in settings:
        if tuple(changes) not in found and (recipe := _fitting({**fields, **changes}, pipeline_size)) is not None:
            found[tuple(changes)] = Remedy(changes=changes, recipe=recipe)
    return list(found.values())


def _on_more_gpus(fields: Mapping[str, Any], extra: Mapping[str, Any], pipeline_size: int | None) -> Remedy | None:
    number = 2 * fields["num_gpus"]
    while number <= MOST_GPUS:
        changes = {"num_gpus": number, **extra}
        if fields["global_batch_size"] % number:
            changes["global_batch_size"] = -(-fields["global_batch_size"] // number) * number
        recipe = _fitting({**fields, **changes}, pipeline_size)
        if recipe is not None:
            return Remedy(changes=changes, recipe=recipe)
        number *= 2
    return None


def _fitting(fields: Mapping[str, Any], pipeline_size: int | None) -> Recipe | None:
    try:
        if pipeline_size is not None:
            recipe = Recipe(pipeline_size=pipeline_size, **fields)
        else:
            recipe = shortest_that_fits(valid_pipelines(**fields))
    except ValueError:  # more stages or blocks than layers, fp16 with Muon
        return None
    return recipe if fits(recipe) else None
