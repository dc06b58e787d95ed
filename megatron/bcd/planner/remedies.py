"""What to change in a plan that does not fit, so that it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
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
_OF_BLOCKS = ("num_blocks", "layout", "frozen", "always_active", "num_chunks")


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Changed settings with which a plan fits."""

    changes: Mapping[str, Any]
    """Fields of Recipe, but the pipeline's size."""
    recipe: Recipe


def remedies(fields: Mapping[str, Any], *, pipeline_size: int | None) -> list[Remedy]:
    """Changes that make a recipe of these fields fit, those first that keep method and GPUs; empty if none does.

    Each is the smallest of its kind: a setting alone, settings together of which none can be left out, another
    method, more GPUs (a power of two times as many), with recomputation if that needs fewer. ``pipeline_size`` is kept
    where it was given, unless no other change helps.
    """
    for kept in dict.fromkeys((pipeline_size, None)):
        found = _settings_that_fit(fields, kept)
        for method in _OTHERS[fields["method"]]:
            other: dict[str, Any] = {"method": method} | dict.fromkeys(_OF_BLOCKS)
            if method in PRESET_OF:
                other["frozen"] = fields.get("frozen")
            if method == "offload" and fields.get("adam_moments_dtype", "fp32") != "fp32":
                other["adam_moments_dtype"] = "fp32"
            fitting = (_remedy(fields, changes, kept) for changes in (other, other | {"recompute": "auto"}))
            found += [each] if (each := next(filter(None, fitting), None)) else []
        more: list[dict[str, Any]] = [{}, {"recompute": "auto"}, {"recompute": "auto", "micro_batch_size": 1}]
        larger = list(filter(None, (_on_more_gpus(fields, extra, kept) for extra in more)))
        found += sorted(larger, key=lambda each: each.recipe.num_gpus)[:1]
        if found:
            return found
    return []


def _settings(fields: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """The values of each setting that need less memory, the nearest first; those first that change the loss least."""
    if fields["micro_batch_size"] > 1:
        yield [{"micro_batch_size": 1}]
    if fields["recompute"] == "none":
        yield [{"recompute": "auto"}]
    if fields["method"] != "offload" and fields.get("adam_moments_dtype", "fp32") != "int8":
        yield [{"adam_moments_dtype": "int8"}]
    if fields["precision"] == "fp32":
        yield [{"precision": "bf16"}]
    is_fine_tuning, given = fields["method"] == "finetune", fields["num_blocks"]
    if is_fine_tuning and fields.get("always_active") is None:
        yield [{"always_active": frozenset()}]
    if is_fine_tuning and "head" not in (fields.get("always_active") or ()):
        yield [{"frozen": (fields.get("frozen") or frozenset({"embedding"})) | {"head"}}]
    # without a number, fine-tuning has as many as there are
    if fields["method"] in PRESET_OF and fields.get("layout") != "stage" and not (is_fine_tuning and given is None):
        fewest = (DEFAULT_NUM_BLOCKS if given is None else given) + 1
        yield [{"num_blocks": number} for number in range(fewest, _MOST_BLOCKS + 1)]


def _settings_that_fit(fields: Mapping[str, Any], pipeline_size: int | None) -> list[Remedy]:
    """Settings that help alone, then those that help together and not with fewer; the first values of each."""
    settings, found = list(filter(None, _settings(fields))), list[Remedy]()
    for number in range(1, len(settings) + 1):
        for chosen in combinations(settings, number):
            names = {name for values in chosen for name in values[0]}
            if any(each.changes.keys() <= names for each in found) or {"always_active", "frozen"} <= names:
                continue
            together = ({name: one[name] for one in each for name in one} for each in product(*chosen))
            fitting = (_remedy(fields, changes, pipeline_size) for changes in together)
            found += [each] if (each := next(filter(None, fitting), None)) else []
    return found


def _on_more_gpus(fields: Mapping[str, Any], extra: Mapping[str, Any], pipeline_size: int | None) -> Remedy | None:
    number = 2 * fields["num_gpus"]
    while number <= MOST_GPUS:
        changes = {"num_gpus": number, **extra}
        if fields["global_batch_size"] % number:
            changes["global_batch_size"] = -(-fields["global_batch_size"] // number) * number
        if (found := _remedy(fields, changes, pipeline_size)) is not None:
            return found
        number *= 2
    return None


def _remedy(fields: Mapping[str, Any], changes: Mapping[str, Any], pipeline_size: int | None) -> Remedy | None:
    """The changes, if the recipe fits with them."""
    fields = {**fields, **changes}
    try:
        if pipeline_size is not None:
            recipe = Recipe(pipeline_size=pipeline_size, **fields)
        else:
            recipe = shortest_that_fits(valid_pipelines(**fields))
    except ValueError:  # more stages or blocks than layers, fp16 with Muon
        return None
    return Remedy(changes=changes, recipe=recipe) if fits(recipe) else None
