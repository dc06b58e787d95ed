"""What to change in a plan that does not fit, so that it does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
OF_BLOCKS = ("layout", "frozen", "always_active", "num_chunks")
"""Fields of Recipe that only methods with blocks have, beside their number."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Changed settings with which a plan fits."""

    changes: Mapping[str, Any]  # fields of Recipe, but the pipeline's size
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
            other: dict[str, Any] = {"method": method} | dict.fromkeys(("num_blocks", *OF_BLOCKS))
            if method in PRESET_OF:
                other["frozen"] = fields.get("frozen")
            if method == "offload" and fields.get("adam_moments_dtype", "fp32") != "fp32":
                other["adam_moments_dtype"] = "fp32"
            found += _first_that_fits(fields, (other, other | {"recompute": "auto"}), kept)
        extras: list[dict[str, Any]] = [{}, {"recompute": "auto"}, {"recompute": "auto", "micro_batch_size": 1}]
        larger = [one for extra in extras for one in _first_that_fits(fields, _more_gpus(fields, extra), kept)]
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
        if fewest <= _MOST_BLOCKS:
            yield [{"num_blocks": number} for number in range(fewest, _MOST_BLOCKS + 1)]


def _settings_that_fit(fields: Mapping[str, Any], pipeline_size: int | None) -> list[Remedy]:
    """Settings that help alone, then those that help together and not with fewer; the first values of each."""
    settings, found = list(_settings(fields)), list[Remedy]()
    for number in range(1, len(settings) + 1):
        for chosen in combinations(settings, number):
            names = {name for values in chosen for name in values[0]}
            if any(each.changes.keys() <= names for each in found) or {"always_active", "frozen"} <= names:
                continue
            together = ({name: one[name] for one in each for name in one} for each in product(*chosen))
            found += _first_that_fits(fields, together, pipeline_size)
    return found


def _more_gpus(fields: Mapping[str, Any], extra: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    number = 2 * fields["num_gpus"]
    while number <= MOST_GPUS:
        batch = -(-fields["global_batch_size"] // number) * number
        more = {} if batch == fields["global_batch_size"] else {"global_batch_size": batch}
        yield {"num_gpus": number, **extra, **more}
        number *= 2


def _first_that_fits(
    fields: Mapping[str, Any], choices: Iterable[Mapping[str, Any]], pipeline_size: int | None
) -> list[Remedy]:
    """The first of these changes with which the recipe fits, if any does."""
    for changes in choices:
        changed = {**fields, **changes}
        try:
            if pipeline_size is not None:
                recipe = Recipe(pipeline_size=pipeline_size, **changed)
            else:
                recipe = shortest_that_fits(valid_pipelines(**changed))
        except ValueError:  # more stages or blocks than layers, fp16 with Muon
            continue
        if fits(recipe):
            return [Remedy(changes=changes, recipe=recipe)]
    return []
