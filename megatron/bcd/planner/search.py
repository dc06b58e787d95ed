"""Which recipe: the shortest pipeline, the cheapest layouts, methods side by side, what fits where a plan does not."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron.bcd.config import DEFAULT_NUM_BLOCKS
from megatron.bcd.planner.estimate import Estimate, make_estimate, training_cost
from megatron.bcd.planner.memory import fits, peak, rank_memory
from megatron.bcd.planner.recipe import FACTORED, MAX_GPUS, PRESET_OF, Recipe
from megatron.bcd.planner.step_time import mean_seconds
from megatron.bcd.planner.tables import GIB, Cluster, Model, Placement

SEARCHED_BLOCKS = (2, 3, 4, 5, 6)
"""Layout submodel tries only the first two, because it has that many blocks on every stage."""
_SIMULATED = 3
"""Number of layouts, cheapest by rough time, whose pipeline is simulated."""
MOST_GPUS = 512
_PLANNED_SHARE = 0.95
"""Of a GPU's memory: the estimate is a formula, and running out of memory costs more than recomputing a layer."""
_STREAMED_SLOWER = 1.05
"""Of a step: what fewer blocks may cost where frozen layers lie on the host."""
OF_BLOCKS = (
    "num_blocks", "layout", "frozen", "always_active", "head_phase", "num_chunks", "frozen_weights", "resident_layers",
    "low_rank", "low_rank_layers", "inactive_update",
)  # fmt: skip
"""Fields of Recipe that only methods with blocks have."""
CAN_STREAM = ("bcd", "finetune")
"""Methods that take --bcd-frozen-weights host: of full training and pretrain every step writes all layers."""
_Changes = dict[str, Any]
"""Fields of Recipe with other values."""
_HEADS: tuple[_Changes, ...] = (
    {},
    {"head_phase": True},
    {"head_phase": True, "adam_moments_dtype": "int8"},
    {"frozen": frozenset({"embedding", "head"})},
)
"""Of an untied head in preset finetune: always active, and what needs less memory; in this order, because a frozen head
is the one that some model lost by (docs/fine_tuning.md, The head)."""
COMPARED = {
    "pretrain": ("full", "muon", "offload", "bcd", "pretrain"),
    "sft": ("full", "offload", FACTORED, "finetune", "bcd", "pretrain", "finetune+lora", "lora"),
}
"""Methods by task; with adapters as `Recipe.name`."""
_OTHER_METHODS = {"pretrain": ("pretrain", "bcd", "offload"), "sft": ("lora", FACTORED, "finetune", "offload")}
"""Those offered where a plan does not fit."""
_RANK = 16
"""Of the adapters that are compared."""

# ---------------------------------------------------------------- a pipeline that fits


def valid_pipelines(*, pipeline_size: int | None = None, **fields: Any) -> list[Recipe]:
    """The recipe with every valid pipeline size, shortest first, or with the given one.

    ``fields`` are Recipe's. Raises the first ValueError if no size is valid.
    """
    if pipeline_size is not None:
        return [Recipe(pipeline_size=pipeline_size, **fields)]
    suited, reasons = list[Recipe](), list[ValueError]()
    for size in _divisors(min(max(1, fields["num_gpus"]), MAX_GPUS)):
        try:
            suited.append(Recipe(pipeline_size=size, **fields))
        except ValueError as error:
            reasons.append(error)
    if not suited:
        raise reasons[0]
    return suited


def shortest_that_fits(suited: Sequence[Recipe]) -> Recipe:
    """The shortest pipeline that fits, which has the most data-parallel ranks; the longest if none fits."""
    return next((recipe for recipe in suited if fits(recipe)), suited[-1])


def with_fewest_blocks(recipe: Recipe) -> Recipe:
    """Preset finetune where no number of blocks is given: the fewest within _PLANNED_SHARE of the memory, at least two.

    Fewer, larger blocks train every layer in more steps, and their loss is closer to full training's
    (docs/fine_tuning.md). Of numbers with the same largest block the least is tried; with frozen layers on the host,
    where larger blocks take memory from the micro-batch, of those at most _STREAMED_SLOWER times as long a step as one
    layer a block. If none fit: one layer a block.
    """
    if recipe.method != "finetune" or recipe.is_factored or recipe.num_blocks is not None or recipe.layout == "stage":
        return recipe
    if recipe.recompute == "auto" and not recipe.is_streamed:  # one layer a block leaves most memory to activations
        return recipe
    longest = _STREAMED_SLOWER * mean_seconds(recipe, is_rough=True) if recipe.is_streamed else math.inf
    per_stage = recipe.model.layers // recipe.pipeline_size
    for num_blocks in sorted({math.ceil(per_stage / size) for size in range(2, per_stage)}):
        with contextlib.suppress(ValueError):  # a layout that cannot have so many
            other = replace(recipe, num_blocks=num_blocks)
            if fits(other, share=_PLANNED_SHARE) and mean_seconds(other, is_rough=True) <= longest:
                return other
    return recipe


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

    ``fields`` are Recipe's. A ``pipeline_size`` or ``recompute`` of None is chosen: the row's pipeline if the number
    of GPUs is the row's, else the shortest pipeline that takes at most 95 % of a GPU's memory, only if none does with
    a linear loss too (fine-tuning only), then with recomputation (auto: the least that takes), then with less for the
    head (_HEADS), where nothing was said of it, then with frozen weights on the host, then with a frozen head. A
    ``micro_batch_size`` of None is 1, but with frozen weights on the host, where larger ones hide the copies, the
    fastest. Layout ``stage`` has one
    block per stage, so it gets at least two stages if possible. If nothing fits: the longest pipeline with
    recomputation, on one node by default. Raises ValueError as Recipe does.
    """
    rows = {(row.method, row.model, row.cluster): row for row in placements}
    row = rows.get((method, model.name, cluster.name))
    by_stage = method in PRESET_OF and fields.get("layout") == "stage"
    if row is not None and num_gpus in (None, row.nodes * row.gpus_per_node) and not (by_stage and row.pipeline == 1):
        if num_gpus is None:
            cluster = replace(cluster, gpus_per_node=row.gpus_per_node)
            num_gpus = row.nodes * row.gpus_per_node
        if fields.get("pipeline_size") is None:
            fields["pipeline_size"] = row.pipeline
    settings = {"model": model, "cluster": cluster, "method": method, **fields}
    if num_gpus is not None:
        return _choose_layout(by_stage=by_stage, num_gpus=num_gpus, **settings)
    fewest = fields.get("pipeline_size") or (fields.get("num_blocks") or 2 if by_stage else 1)
    tried, reasons = list[Recipe](), list[ValueError]()
    for number in _doubled(max(fewest, 1)):
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


def _choose_layout(
    *, by_stage: bool, recompute: str | None = None, micro_batch_size: int | None = None, **fields: Any
) -> Recipe:
    """The first layout within _PLANNED_SHARE of the memory, else the first that fits, else the last one."""
    fields |= {"micro_batch_size": micro_batch_size or 1, "memory_share": _PLANNED_SHARE}
    if (factored := _factored_that_fits(fields, recompute)) is not None:
        return factored
    tried: list[Recipe] = []
    for way in _ways(fields, recompute):
        suited = valid_pipelines(**fields | way)
        tried += [recipe for recipe in suited if recipe.pipeline_size > 1 or not by_stage] or suited
    for share in (_PLANNED_SHARE, 1.0):
        for recipe in tried:
            if fits(recipe, share=share):
                if recipe.is_streamed and micro_batch_size is None:
                    pipeline_size = recipe.pipeline_size if by_stage else fields.get("pipeline_size")
                    base = replace(recipe, cross_entropy_fusion_impl=fields.get("cross_entropy_fusion_impl"))
                    suited = list(layouts(base, pipeline_size=pipeline_size, recompute=recompute))
                    suited = [each for each in suited if fits(each, share=share)]
                    recipe = min(suited, key=lambda each: mean_seconds(each, is_rough=True), default=recipe)
                return with_fewest_blocks(recipe)
    return tried[-1]


def _factored_that_fits(fields: Mapping[str, Any], recompute: str | None) -> Recipe | None:
    """Return the first layout of preset finetune without blocks within _PLANNED_SHARE of the memory; None if none is,
    or if a field asks for blocks."""
    asked = {name for name in OF_BLOCKS if fields.get(name) not in (None, 0, "device", "factored")}
    if fields["method"] != "finetune" or fields["task"] != "sft" or asked:
        return None
    fields = {**fields, "inactive_update": "factored"}
    for way in _ways(fields, recompute):
        with contextlib.suppress(ValueError):  # fp16
            recipe = shortest_that_fits(valid_pipelines(**{**fields, **way}))
            if fits(recipe, share=_PLANNED_SHARE):
                return recipe
    return None


def reason_for_rule(recipe: Recipe) -> str:
    """Return why a plan of preset finetune has blocks or none, in one line."""
    if recipe.is_factored:
        return "every layer in every step by the factored update, which fits: no blocks"
    changes = dict.fromkeys(OF_BLOCKS) | {"inactive_update": "factored", "recompute": "full", "micro_batch_size": 1}
    least: Recipe | None = None
    for stages in _divisors(recipe.num_gpus // recipe.context_size):
        with contextlib.suppress(ValueError):
            fields: _Changes = changes | {"pipeline_size": stages, "cross_entropy_fusion_impl": "linear"}
            other = replace(recipe, **fields)
            least = min(filter(None, (least, other)), key=lambda each: peak(rank_memory(each)).total)
    if least is None:
        return "blocks: the factored update cannot be combined with the given flags"
    needed, there = peak(rank_memory(least)).total / GIB, recipe.cluster.memory_gib
    if needed > _PLANNED_SHARE * there:
        return f"blocks: every layer by the factored update would take {needed:.1f} of {there:g} GiB"
    return "blocks, as the flags ask; without them every layer by the factored update, which fits"


def _ways(fields: Mapping[str, Any], recompute: str | None) -> Iterator[_Changes]:
    """Less and less memory by what these fields of Recipe and ``recompute`` leave open: recomputation; of fine-tuning
    first a linear loss, then the head, frozen layers on the host, and a frozen head."""
    where, given, is_sft = (
        fields.get("frozen_weights"),
        fields.get("cross_entropy_fusion_impl"),
        fields["task"] == "sft",
    )
    can_stream = fields["method"] in CAN_STREAM and fields.get("inactive_update") != "factored"
    places = (None, "host") if is_sft and where is None and can_stream else (where,)
    losses = (None, "linear") if is_sft and given is None else (given,)
    choices = ("none", "auto") if recompute is None else (recompute,)
    saving = [(choices[0], loss) for loss in losses] + [(choice, losses[-1]) for choice in choices[1:]]
    heads = _heads(fields) if is_sft else _HEADS[:1]
    # in host memory not an always active head: one in a phase of its own leaves more to the micro-batch
    states = [(where, head) for where in places for head in (heads[1:] if where == "host" else heads) or heads]
    states.sort(key=lambda state: "frozen" in state[1])
    for (where, head), (choice, loss) in itertools.product(states, saving):
        yield {"recompute": choice, "frozen_weights": where, "cross_entropy_fusion_impl": loss} | head


def _heads(fields: Mapping[str, Any]) -> Sequence[_Changes]:
    """_HEADS, where the user has left the choice."""
    given = [fields.get(name) for name in ("head_phase", "frozen", "always_active")]
    has_blocks = fields["method"] == "finetune" and fields.get("inactive_update") != "factored"
    is_free = has_blocks and not any(value is not None for value in given)
    if not is_free or fields["model"].shape().tied or fields.get("num_blocks") == 0:
        return _HEADS[:1]
    return _HEADS if fields.get("adam_moments_dtype", "fp32") == "fp32" else (*_HEADS[:2], _HEADS[3])


# ---------------------------------------------------------------- the cheapest


def layouts(base: Recipe, *, pipeline_size: int | None = None, recompute: str | None = None) -> Iterator[Recipe]:
    """Every layout of the recipe on its GPUs: pipeline and data size, blocks, micro-batch, and what saves memory until
    it fits. The cut of the stages, how layers form blocks, and a number of blocks that was given are ``base``'s. With
    ``pipeline_size`` or ``recompute`` no other is tried."""
    choices: Sequence[int | None] = SEARCHED_BLOCKS[: 2 if base.partition.layout == "submodel" else None]
    if not base.has_blocks or base.partition.layout == "stage":
        choices = (None,)
    elif base.num_blocks is not None or base.method != "bcd":
        # of preset pretrain no multiplier is known at other numbers; finetune has the layers'
        choices = (base.num_blocks,)
    for stages in _sizes(base.num_gpus // base.context_size, pipeline_size):
        per_rank, left = divmod(base.global_batch_size, base.num_gpus // (stages * base.context_size))
        if left:
            continue
        for blocks in choices:
            for micro_batch_size in (size for size in _divisors(per_rank) if size & (size - 1) == 0):
                changes: dict[str, Any] = {"num_blocks": blocks, "micro_batch_size": micro_batch_size}
                with contextlib.suppress(ValueError):  # more stages or blocks than the model has layers for
                    for way in _ways(vars(base), recompute):
                        yield (recipe := replace(base, pipeline_size=stages, **changes | way))
                        if fits(recipe, share=base.memory_share):
                            break


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
    base: Recipe, *, pipeline_size: int | None = None, tokens: float | None = None, multiplier: float | None = None
) -> list[Estimate]:
    """The layouts with the lowest cost, of those that fit; none if none does. By GPU hours: all have one price, which
    may not be known.

    All layouts get a rough time; the cheapest are then simulated, and of each of their pipelines other cuts and
    layouts.
    """

    def rough_hours(recipe: Recipe) -> float:
        seconds = mean_seconds(recipe, is_rough=True)
        return training_cost(recipe, seconds, tokens=tokens, multiplier=multiplier).gpu_hours

    by_price = sorted(filter(fits, layouts(base, pipeline_size=pipeline_size)), key=rough_hours)
    if by_price and by_price[0].partition.num_blocks > SEARCHED_BLOCKS[-1]:  # so many phases take long to simulate
        cheapest = by_price[:1]
    else:
        cheapest = by_price[:_SIMULATED]
        pipelines = {(recipe.pipeline_size, recipe.num_blocks): recipe for recipe in reversed(cheapest)}
        others = [other for recipe in reversed(pipelines.values()) for other in _variants(recipe)]
        cheapest += filter(fits, others)
    estimates = [make_estimate(recipe, tokens=tokens, multiplier=multiplier) for recipe in cheapest]
    return sorted(estimates, key=lambda estimate: estimate.cost.gpu_hours)[:_SIMULATED]


def _changes_to(method: str, *, rank: int, keeps_blocks: bool) -> _Changes:
    """Fields of Recipe of a method of COMPARED, which `keeps_blocks`: what was asked of them, if it has some."""
    changes: _Changes = dict.fromkeys(("inactive_update",) if keeps_blocks and method in PRESET_OF else OF_BLOCKS)
    if method == "offload":
        changes["adam_moments_dtype"] = "fp32"
    if method == FACTORED:
        return dict.fromkeys(OF_BLOCKS) | {"method": "finetune", "inactive_update": "factored"}
    if method == "finetune":
        changes["inactive_update"] = "none"
    if method == "lora":
        return changes | {"method": "bcd", "num_blocks": 0, "low_rank": rank}
    if method == "finetune+lora":
        return changes | {"method": "finetune", "low_rank": rank}
    return changes | {"method": method}


def fewest_gpus(base: Recipe, *, pipeline_size: int | None = None) -> int | None:
    """The fewest GPUs on which some layout fits; None if there are none.

    Powers of two are tried, or such multiples of a given pipeline, with a larger batch if the given one does not divide
    among them; then numbers below the first that fits which keep the batch: any on one node, of several nodes full
    ones.
    """

    def fits_on(number: int, *, batch: int) -> bool:
        for stages in _sizes(number, pipeline_size):
            changes: dict[str, Any] = {"pipeline_size": stages, "micro_batch_size": 1, "global_batch_size": batch}
            with contextlib.suppress(ValueError):  # the batch does not divide among so many replicas
                asked = replace(base, num_gpus=number, **changes)
                return any(map(fits, layouts(asked, pipeline_size=pipeline_size)))
        return False

    per_node, batch = base.cluster.gpus_per_node, base.global_batch_size
    for number in _doubled(pipeline_size or 1):
        if fits_on(number, batch=_multiple(batch, number)):
            between = (other for other in range(number // 2 + 1, number) if other <= per_node or other % per_node == 0)
            return next((other for other in between if fits_on(other, batch=batch)), number)
    return None


def compare(base: Recipe, *, pipeline_size: int | None = None, **cost: float | None) -> list[Estimate]:
    """Full training, the same with the optimizer on the host, and the presets, cheapest first.

    Each is on the asked number of GPUs, and on the fewest on which it fits; one that fits on no number is left out.
    ``cost`` is what `make_estimate` takes; the multiplier is pretrain's. Raises ValueError if nothing fits, or a flag
    is out of range.
    """
    found: list[Estimate] = []
    rank = base.low_rank or _RANK
    if base.low_rank is not None:
        base = replace(base, **_changes_to("full", rank=rank, keeps_blocks=False))
    for method in COMPARED[base.task]:
        try:
            recipe = replace(base, **_changes_to(method, rank=rank, keeps_blocks=True))
        except ValueError:  # such as fp16 with Muon, or blocks that a preset does not take
            continue
        costs = cost if method == "pretrain" else cost | {"multiplier": None}
        best = search(recipe, pipeline_size=pipeline_size, **costs)[:1]
        fewest = fewest_gpus(recipe, pipeline_size=pipeline_size)
        if fewest is not None and (fewest < recipe.num_gpus or not best and fewest > recipe.num_gpus):
            batch = _multiple(recipe.global_batch_size, fewest)
            few: dict[str, Any] = {"num_gpus": fewest, "pipeline_size": pipeline_size or 1, "global_batch_size": batch}
            best += search(replace(recipe, micro_batch_size=1, **few), pipeline_size=pipeline_size, **costs)[:1]
        found += best
    if not found:
        stages = "" if pipeline_size is None else f" with --pipeline-model-parallel-size {pipeline_size}"
        raise ValueError(f"--model {base.model.name}: no method fits on any number of {base.cluster.gpu}{stages}")
    return sorted(found, key=lambda estimate: estimate.cost.gpu_hours)


# ---------------------------------------------------------------- where a plan does not fit

_MOST_BLOCKS = 12
Remedy = tuple[_Changes, Recipe]
"""Changes, and the recipe that fits with them."""


def remedies(fields: Mapping[str, Any]) -> list[Remedy]:
    """Changes that make a recipe of these fields (`valid_pipelines`) fit; empty if none does.

    Settings that help alone; of the others those that help together and not with fewer; another method; more GPUs, a
    power of two times as many. Recomputation comes with these where they need it.
    """
    found, others = list[Remedy](), list[list[_Changes]]()
    for values in filter(None, _settings(fields)):
        alone = _first_that_fits(fields, values)
        found += alone
        others += [] if alone else [values]
    found += _fewest_together(fields, others)
    extras: list[_Changes] = [{}, {"recompute": "auto"}, {"recompute": "auto", "micro_batch_size": 1}]
    for method in _OTHER_METHODS[fields["task"]]:
        if method.split(",")[0] == fields["method"] or method == "lora" and fields.get("low_rank"):
            continue
        other = _changes_to(method, rank=_RANK, keeps_blocks=False)
        if method in PRESET_OF:
            other["frozen"] = fields.get("frozen")
        if other.get("adam_moments_dtype") == fields.get("adam_moments_dtype", "fp32"):
            del other["adam_moments_dtype"]
        found += _first_that_fits(fields, [other | extra for extra in extras])
    more = []
    for number in _doubled(2 * fields["num_gpus"]):
        batch = _multiple(fields["global_batch_size"], number)
        larger: _Changes = {"num_gpus": number, "global_batch_size": batch}
        if batch == fields["global_batch_size"]:
            del larger["global_batch_size"]
        more += [larger | extra for extra in extras]
    return found + _first_that_fits(fields, more)


def _settings(fields: Mapping[str, Any]) -> Iterator[list[_Changes]]:
    """The values of each setting that need less memory, the nearest first; those first that change the loss least."""
    method, given = fields["method"], fields["num_blocks"]
    if fields.get("inactive_update") == "factored":
        yield [{"inactive_update": "none", "num_blocks": None}]
    if fields["micro_batch_size"] > 1:
        yield [{"micro_batch_size": 1}]
    if fields.get("cross_entropy_fusion_impl") != "linear":
        yield [{"cross_entropy_fusion_impl": "linear"}]
    if fields["recompute"] == "none":
        yield [{"recompute": "auto"}]
    if method != "offload" and fields.get("adam_moments_dtype", "fp32") != "int8":
        yield [{"adam_moments_dtype": "int8"}]
    if fields["precision"] == "fp32":
        yield [{"precision": "bf16"}]
    if method in CAN_STREAM and fields.get("frozen_weights") != "host":
        yield [{"frozen_weights": "host"}]
    if method == "finetune" and "head" not in (always := fields.get("always_active") or ()):
        can_move = not (always or fields.get("head_phase") or fields["model"].shape().tied)
        frozen: _Changes = {"frozen": (fields.get("frozen") or frozenset({"embedding"})) | {"head"}, "head_phase": None}
        yield [*([{"head_phase": True}] if can_move else []), frozen]
    # without a number, fine-tuning has as many as there are
    if method in PRESET_OF and fields.get("layout") != "stage" and not (method == "finetune" and given is None):
        fewest = (DEFAULT_NUM_BLOCKS if given is None else given) + 1
        yield [{"num_blocks": number} for number in range(fewest, _MOST_BLOCKS + 1)]
    if (stages := fields.get("pipeline_size")) is not None:
        yield [{"pipeline_size": size} for size in _divisors(fields["num_gpus"]) if size > stages]


def _fewest_together(fields: Mapping[str, Any], settings: Sequence[Sequence[_Changes]]) -> list[Remedy]:
    """All of these settings, less those that are not needed, each with the nearest value that will do."""

    def fitting(chosen: Sequence[_Changes]) -> list[Remedy]:
        return _first_that_fits(fields, [{name: value for one in chosen for name, value in one.items()}])

    chosen: list[_Changes] = [values[-1] for values in settings]
    found = fitting(chosen)
    for index in reversed(range(len(settings))) if found else ():
        for value in ({}, *settings[index]):
            trial = [*chosen[:index], value, *chosen[index + 1 :]]
            if better := fitting(trial):
                chosen, found = trial, better
                break
    return found


def _first_that_fits(fields: Mapping[str, Any], choices: Sequence[_Changes]) -> list[Remedy]:
    """The first of these changes with which the recipe fits, if any does."""
    for changes in choices:
        with contextlib.suppress(ValueError):  # more stages or blocks than layers, fp16 with Muon
            recipe = shortest_that_fits(valid_pipelines(**{**fields, **changes}))
            if fits(recipe):
                return [(changes, recipe)]
    return []


# ---------------------------------------------------------------- numbers


def _sizes(number: int, given: int | None) -> list[int]:
    """Pipeline sizes on so many GPUs: the given one alone, if it is one."""
    return [size for size in _divisors(number) if given in (None, size)]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _multiple(least: int, of: int) -> int:
    return -(-least // of) * of


def _doubled(first: int) -> Iterator[int]:
    """The number, and powers of two times as many, up to MOST_GPUS."""
    yield first
    while 2 * first <= MOST_GPUS:
        first *= 2
        yield first
