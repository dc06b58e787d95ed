"""Choose recipes: the shortest pipeline, the cheapest layouts, methods side by side, and remedies if a plan misfits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.bcd.config import DEFAULT_NUM_BLOCKS
from megatron.bcd.planner.estimate import Estimate, make_estimate, training_cost
from megatron.bcd.planner.measured import LARGE_STEP, finding, whole_rules
from megatron.bcd.planner.memory import fits, node_bytes
from megatron.bcd.planner.recipe import DEFAULTS, MAX_GPUS, PRESET_OF, STREAMED, WHOLE, Recipe, build_recipe
from megatron.bcd.planner.step_time import mean_seconds
from megatron.bcd.planner.tables import Cluster, Model, Placement

SEARCHED_BLOCKS = (2, 3, 4, 5, 6)
"""Layout submodel tries only the first two, because it has that many blocks on every stage."""
_SIMULATED = 3
"""The number of layouts, cheapest by rough time, whose pipeline is simulated."""
MOST_GPUS = 512
_PLANNED_SHARE = 0.95
"""The part of a GPU's memory that a plan fills. The estimate is a formula, and an out-of-memory error costs more than
recomputing a layer."""
_STREAMED_SLOWER, _SLOWER = 1.05, 1.02
"""How much longer a step may take: with fewer blocks, if frozen layers are on the host; if it needs less memory."""
BLOCK_FLAGS = (
    "bcd_num_blocks", "bcd_layout", "bcd_frozen", "bcd_always_active", "bcd_head_phase",
    "num_virtual_stages_per_pipeline_rank", "bcd_main_params", "bcd_inactive_update", "bcd_layers_on",
    "bcd_resident_layers", "bcd_schedule", "bcd_layers_per_pass", "bcd_saved_inputs", "bcd_saved_activations",
)  # fmt: skip
"""Flags that only methods with blocks have. Inactive updates of all layers have the last six, too."""
_PLACES = ("device", "host")
CAN_STREAM = ("bcd", "finetune")
"""Methods whose blocks can be trained beside frozen layers in host memory."""
_Changes = dict[str, Any]
"""Other values of a recipe's attributes and flags."""
_HEADS: tuple[_Changes, ...] = (
    {},
    {"bcd_head_phase": True},
    {"bcd_head_phase": True, "adam_moments_dtype": "int8"},
    {"bcd_frozen": "embedding,head"},
)
"""How preset finetune with blocks may train an untied head: always active, then with less and less memory. A frozen
head comes last, because some model lost by it (docs/fine_tuning.md, The head)."""
COMPARED = {
    "pretrain": ("full", "muon", *STREAMED, "offload", "bcd", "pretrain"),
    "sft": ("full", *STREAMED, "offload", *WHOLE, "finetune", "bcd", "pretrain"),
}
"""The compared methods by task."""
_OTHER_METHODS = {"pretrain": ("pretrain", "bcd", "offload"), "sft": (*WHOLE, "finetune", "offload")}
"""The methods that are offered if a plan does not fit."""

# ---------------------------------------------------------------- a pipeline that fits


def pipelines(**values: Any) -> list[Recipe]:
    """Return the recipe with every allowed pipeline size, shortest first, or with the given size.

    If no size is allowed, return the first one, whose `fault` says why. ``values`` are those of `build_recipe`.
    """
    size = values.pop("pipeline_model_parallel_size", None)
    sizes = _divisors(min(max(1, values["num_gpus"]), MAX_GPUS)) if size is None else [size]
    recipes = [build_recipe(**values, pipeline_model_parallel_size=each) for each in sizes]
    return [recipe for recipe in recipes if not recipe.fault] or recipes[:1]


def shortest_that_fits(recipes: Sequence[Recipe]) -> Recipe:
    """Return the shortest pipeline that fits, which has the most data-parallel ranks; the longest if none fits."""
    return next((recipe for recipe in recipes if fits(recipe)), recipes[-1])


def with_largest_micro_batch(recipe: Recipe, *, share: float = 1.0) -> Recipe:
    """Return a recipe with experts with the largest micro-batch that fits: every microbatch launches the same kernels.

    Others do not change.
    """
    sizes = _divisors(recipe.global_batch_size // recipe.data_size) if recipe.model.experts else []
    larger = (recipe.varied(micro_batch_size=size) for size in reversed(sizes))
    return next((each for each in larger if fits(each, share=share)), recipe)


def with_fewest_blocks(recipe: Recipe) -> Recipe:
    """Return a recipe of preset finetune with the fewest blocks that fit, but at least two, if no number was given.

    Fewer, larger blocks train every layer in more steps, and their loss is closer to full training's
    (docs/fine_tuning.md). If frozen layers are on the host, larger blocks take memory from the micro-batch, so the step
    must not become much longer. If no number fits, the recipe has one layer a block.
    """
    has_number = recipe.flag("bcd_num_blocks") is not None or recipe.flag("bcd_layout") == "stage"
    if recipe.method != "finetune" or recipe.is_whole or has_number:
        return recipe
    if recipe.recompute == "auto" and not recipe.is_streamed:  # one layer a block leaves most memory to activations
        return recipe
    longest = _STREAMED_SLOWER * mean_seconds(recipe, is_rough=True) if recipe.is_streamed else math.inf
    per_stage = recipe.model.layers // recipe.pipeline_size
    numbers = sorted({math.ceil(per_stage / size) for size in range(2, per_stage)})
    for other in (recipe.varied(bcd_num_blocks=number) for number in numbers):
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
    **values: Any,
) -> Recipe:
    """Return the recipe on ``num_gpus`` GPUs; if None, on those of its row in the method table, or the fewest that fit.

    ``values`` are those of `build_recipe`. A pipeline of None is the row's, or the shortest that fits in 95 % of a
    GPU's memory (in layout ``stage`` at least two stages). Other open settings are the first of `_savings` with which
    it fits. A micro-batch of None has one sequence; with frozen weights on the host the fastest size hides the copies.
    If nothing fits, the recipe has the longest pipeline with recomputation, by default on one node. If nothing is
    allowed, it has a fault.
    """
    rows = {(row.method, row.model, row.cluster): row for row in placements}
    row = rows.get((method, model.name, cluster.name))
    by_stage, stages = method in PRESET_OF and values.get("bcd_layout") == "stage", "pipeline_model_parallel_size"
    if row is not None and num_gpus in (None, row.nodes * row.gpus_per_node) and not (by_stage and row.pipeline == 1):
        if num_gpus is None:
            cluster = replace(cluster, gpus_per_node=row.gpus_per_node)
            num_gpus = row.nodes * row.gpus_per_node
        if values.get(stages) is None:
            values[stages] = row.pipeline
    settings = {"model": model, "cluster": cluster, "method": method, **values}
    if num_gpus is not None:
        return _choose_layout(by_stage=by_stage, num_gpus=num_gpus, **settings)
    fewest = values.get(stages) or (values.get("bcd_num_blocks") or 2 if by_stage else 1)
    tried = list[Recipe]()
    for number in _doubled(max(fewest, 1)):
        tried.append(place(placements=placements, num_gpus=number, **settings))
        if fits(tried[-1]):
            return tried[-1]
    allowed = [recipe for recipe in tried if not recipe.fault] or tried[:1]
    return next((recipe for recipe in allowed if recipe.num_gpus >= cluster.gpus_per_node), allowed[-1])


def _choose_layout(
    *, by_stage: bool, recompute: str | None = None, micro_batch_size: int | None = None, **values: Any
) -> Recipe:
    """Return the first layout that fits in _PLANNED_SHARE of the memory, else the first that fits, else the last."""
    values |= {"micro_batch_size": micro_batch_size or 1, "memory_share": _PLANNED_SHARE}
    if values["method"] == "finetune" and values.get("bcd_inactive_update") != "none":
        if not asks_for_blocks(values) and (whole := _whole_that_fits(values, recompute, micro_batch_size)):
            return whole
        values["bcd_inactive_update"] = values.get("bcd_inactive_update") or "none"
    tried: list[Recipe] = []
    smallest = {"bcd_layers_per_pass": values.get("bcd_layers_per_pass") or 1}
    for saving in _savings(values | smallest, recompute):
        recipes = pipelines(**values | saving)
        if recipes[0].fault:
            if not tried:
                return recipes[0]
            continue
        tried += [recipe for recipe in recipes if recipe.pipeline_size > 1 or not by_stage] or recipes
    for share in (_PLANNED_SHARE, 1.0):
        for recipe in tried:
            if fits(recipe, share=share):
                if recipe.is_streamed and micro_batch_size is None:
                    stages = recipe.pipeline_size if by_stage else values.get("pipeline_model_parallel_size")
                    base = recipe.changed(cross_entropy_fusion_impl=values.get("cross_entropy_fusion_impl"))
                    others = layouts(base, stages=stages, recompute=recompute)
                    fitting = _largest_with_experts(other for other in others if fits(other, share=share))
                    recipe = min(fitting, key=lambda each: mean_seconds(each, is_rough=True), default=recipe)
                recipe = with_fewest_blocks(recipe)
                return recipe if micro_batch_size else with_largest_micro_batch(recipe, share=share)
    return tried[-1]


def _largest_with_experts(recipes: Iterable[Recipe]) -> list[Recipe]:
    """Return the recipes; with experts only those with the largest micro-batch, as their time is that of launches."""
    every = list(recipes)
    largest = max((each.micro_batch_size for each in every if each.model.experts), default=0)
    return [each for each in every if each.micro_batch_size >= largest]


def asks_for_blocks(values: Mapping[str, Any]) -> bool:
    """Return whether a flag asks preset finetune for blocks."""
    return any(values.get(name) not in (None, 0, *WHOLE.values()) for name in BLOCK_FLAGS[:-6])


def _is_whole(values: Mapping[str, Any]) -> bool:
    """Return whether these values make preset finetune train every layer in every step."""
    return values.get("bcd_inactive_update") in WHOLE.values()


def _whole_that_fits(values: Mapping[str, Any], recompute: str | None, size: int | None) -> Recipe | None:
    """Return the layout of preset finetune without blocks, with micro-batches of `size` if given. None if none fits.

    It has the given rule, or the first of `whole_rules` that fits. Of its layouts within _PLANNED_SHARE of the memory
    it is the first that takes at most _SLOWER times the fastest's time, so layers leave the device, and chunks grow,
    only for a gain.
    """
    given = values.get("bcd_inactive_update")
    first = {**values, "bcd_inactive_update": given or "factored"}
    base, stages = pipelines(**first)[0], values.get("pipeline_model_parallel_size")
    if base.fault:  # in fp16
        return None
    for rule in (given,) if given else whole_rules(base.step_tokens):
        recipes = layouts(
            base.varied(bcd_inactive_update=rule), stages=stages, recompute=recompute, micro_batch_size=size
        )
        fitting = _largest_with_experts(recipe for recipe in recipes if fits(recipe, share=_PLANNED_SHARE))
        seconds = [mean_seconds(recipe, is_rough=True) for recipe in fitting]
        within = (recipe for recipe, each in zip(fitting, seconds, strict=True) if each <= _SLOWER * min(seconds))
        if fastest := next(within, None):
            return fastest
    return None


def reason_for_rule(recipe: Recipe) -> str:
    """Return in one line why a plan of preset finetune has blocks or not."""
    if recipe.is_whole:
        rule, why = recipe.config.bcd.bcd_inactive_update, ""
        if recipe.step_tokens >= LARGE_STEP:
            why = f"\n{recipe.step_tokens:,} tokens a step: from {LARGE_STEP:,} on the orthogonal update "
            if rule == "orthogonal":
                why += "learns more; --bcd-inactive-update factored has shorter steps and forgets less"
            else:
                why += "learns more, but needs more memory and longer steps"
        return f"every layer in every step by the {rule} update, which fits: no blocks{_describe_places(recipe)}{why}"
    changes: _Changes = dict.fromkeys(BLOCK_FLAGS) | {"bcd_inactive_update": "factored", "recompute": "none"}
    whole = [*layouts(recipe.varied(**changes), micro_batch_size=1)]
    if not whole:
        return "blocks: the factored update cannot be combined with the given flags"
    if any(fits(each, share=_PLANNED_SHARE) for each in whole):
        return "blocks, as the flags ask; without them every layer by the factored update, which fits"
    return "blocks: every layer by the factored update does not fit"


def _describe_places(recipe: Recipe) -> str:
    """Return in words what lies where with --bcd-schedule breadth-first."""
    if not recipe.config.is_breadth_first:
        return ""
    inputs = " and saved inputs" * (recipe.config.bcd.bcd_saved_inputs == "host")
    if not recipe.is_streamed:
        return f"; gradients of one chunk of the model at a time{', saved inputs in host memory' * bool(inputs)}"
    number = recipe.state.num_layer_buffers(0)
    return (
        f";\non the device: embedding, head, norms and {number} layers at a time; in host memory: weights and low bits "
        f"of all layers{inputs}"
    )


def _savings(values: Mapping[str, Any], recompute: str | None) -> Iterator[_Changes]:
    """Yield settings that these values and ``recompute`` leave open, with less and less memory.

    The order is: in fine-tuning a linear loss, then recomputation; in fine-tuning then _HEADS, frozen layers on the
    host, and a frozen head. If inactive updates step every layer, breadth-first comes last.
    """
    schedule, on_host = values.get("bcd_schedule"), values.get("bcd_layers_on") == "host"
    updates_all = values["method"] in ("pretrain", *STREAMED.values())
    updates_all |= _is_whole(values)
    if schedule == "breadth-first" or (updates_all and on_host):
        yield from _breadth_first_savings(values)
        return
    yield from _savings_with_blocks(values, recompute)
    can_change = updates_all and schedule is None and values["precision"] != "fp16"
    if can_change and values["method"] in PRESET_OF and recompute in (None, "none"):
        yield from _breadth_first_savings(values)


def _breadth_first_savings(values: Mapping[str, Any]) -> Iterator[_Changes]:
    """Yield the places of layers and saved inputs, and the sizes of chunks, of which larger ones repeat fewer passes.

    None of them is always the fastest that fits.
    """
    loss = values.get("cross_entropy_fusion_impl") or ("linear" if _has_linear_loss(values) else None)
    fixed = {"recompute": "none", "bcd_schedule": "breadth-first", "cross_entropy_fusion_impl": loss}
    chunks = [1]
    for size in _divisors(values["model"].layers)[:-1]:
        chunks += [size] * (size >= 2 * chunks[-1])
    choices = {"bcd_layers_on": _PLACES, "bcd_layers_per_pass": chunks, "bcd_saved_inputs": _PLACES}
    given = [[values[name]] if values.get(name) else every for name, every in choices.items()]
    for chosen in itertools.product(*given):
        yield fixed | dict(zip(choices, chosen, strict=True))


def _has_linear_loss(values: Mapping[str, Any]) -> bool:
    """Return whether the planner proposes the loss without logits."""
    return bool(values["task"] == "sft" and not values["model"].layer_kinds)


def _savings_with_blocks(values: Mapping[str, Any], recompute: str | None) -> Iterator[_Changes]:
    place, loss = values.get("bcd_layers_on"), values.get("cross_entropy_fusion_impl")
    is_sft, has_blocks = values["task"] == "sft", not _is_whole(values)
    can_stream = values["method"] in CAN_STREAM and has_blocks and recompute in (None, "none")
    can_stream &= values.get("bcd_layout") in (None, "interleaved")  # breadth-first has no other on several stages
    places = (None, "host") if is_sft and place is None and can_stream else (place,)
    losses = (None, "linear") if _has_linear_loss(values) and loss is None else (loss,)
    choices = ("none", "auto") if recompute is None else (recompute,)
    memory_savers = [(choices[0], loss) for loss in losses] + [(choice, losses[-1]) for choice in choices[1:]]
    heads = _heads(values) if is_sft else _HEADS[:1]
    # on the host the head is not always active: in a separate phase it leaves more to the micro-batch
    states = [(place, head) for place in places for head in (heads[1:] if place == "host" else heads) or heads]
    states.sort(key=lambda state: "bcd_frozen" in state[1])
    for place, head in states:
        if place == "host":
            smallest = {"bcd_layers_per_pass": values.get("bcd_layers_per_pass") or 1}
            given = {} if recompute is None else {"recompute": recompute}
            every = _breadth_first_savings({**values, "bcd_layers_on": place} | smallest)
            yield from (each | head | given for each in every)
            continue
        for choice, loss in memory_savers:
            yield {"recompute": choice, "bcd_layers_on": place, "cross_entropy_fusion_impl": loss} | head


def _heads(values: Mapping[str, Any]) -> Sequence[_Changes]:
    """Return those of _HEADS that the user has left open."""
    has_blocks = values["method"] == "finetune" and not _is_whole(values)
    is_given = any(values.get(name) is not None for name in ("bcd_head_phase", "bcd_frozen", "bcd_always_active"))
    if not has_blocks or is_given or values["model"].is_tied or values.get("bcd_num_blocks") == 0:
        return _HEADS[:1]
    return _HEADS if values.get("adam_moments_dtype") in (None, "fp32") else (*_HEADS[:2], _HEADS[3])


# ---------------------------------------------------------------- the cheapest


def layouts(
    base: Recipe, *, stages: int | None = None, recompute: str | None = None, micro_batch_size: int | None = None
) -> Iterator[Recipe]:
    """Yield every layout of the recipe on its GPUs, each with as many `_savings` as it needs to fit.

    Breadth-first tries all places of layers and all sizes of chunks.
    A given number of blocks, ``stages``, ``recompute`` and ``micro_batch_size`` are kept.
    """
    layout = base.flag("bcd_layout")
    choices: Sequence[int | None] = SEARCHED_BLOCKS[: 2 if layout == "submodel" else None]
    number = base.flag("bcd_num_blocks")
    if not base.has_blocks or layout == "stage":
        choices = (None,)
    elif number is not None or base.method != "bcd":
        # pretrain has a multiplier for three blocks only; finetune has one layer a block
        choices = (number,)
    for size in _divisors(base.num_gpus // base.config.context_size):
        if stages not in (None, size):
            continue
        per_rank, left = divmod(base.global_batch_size, base.num_gpus // (size * base.config.context_size))
        if left:
            continue
        powers = [number for number in _divisors(per_rank) if number & (number - 1) == 0]
        for blocks, micro in itertools.product(choices, powers if micro_batch_size is None else [micro_batch_size]):
            changes: _Changes = {"bcd_num_blocks": blocks, "micro_batch_size": micro}
            changes["pipeline_model_parallel_size"], is_enough = size, False
            for saving in _savings(base.values | changes, recompute):
                if is_enough and saving.get("bcd_saved_inputs") == "host" != base.flag("bcd_saved_inputs"):
                    continue  # inputs leave the device only if they must
                recipe = base.varied(**changes | saving)
                if not recipe.fault:
                    yield recipe
                    is_enough = fits(recipe, share=base.memory_share)
                if is_enough and saving.get("bcd_schedule") != "breadth-first":
                    break


def _variants(recipe: Recipe) -> Iterator[Recipe]:
    """Yield the recipe's pipeline and batch with other cuts and, if no layout was given, with other layouts."""
    if recipe.pipeline_size == 1:
        return
    choices: list[_Changes] = [{}]
    if recipe.flag("bcd_layout") is None and recipe.method in ("bcd", "finetune") and not recipe.is_whole:
        choices.append({"bcd_layout": "submodel"})  # strided blocks have next to no prefix: never faster than spread
        if recipe.num_microbatches >= recipe.pipeline_size:
            number = recipe.partition.num_blocks  # with twice as many chunks a block is two parts of the model
            chunks = "num_virtual_stages_per_pipeline_rank"
            choices += [{"bcd_layout": "interleaved", chunks: times * number} for times in (1, 2)]
    yield from (recipe.varied(recompute="auto", pipeline_cut="auto", **choice) for choice in choices)


def search(
    base: Recipe, *, stages: int | None = None, tokens: float | None = None, multiplier: float | None = None
) -> list[Estimate]:
    """Return the layouts that fit and have the lowest cost, an empty list if none fits.

    Costs are GPU hours: all layouts have the same price, which may not be known. All get a rough time; the cheapest are
    then simulated, and so are other cuts and layouts of their pipelines.
    """

    def rough_hours(recipe: Recipe) -> float:
        seconds = mean_seconds(recipe, is_rough=True)
        return training_cost(recipe, seconds, tokens=tokens, multiplier=multiplier).gpu_hours

    by_price = sorted(_largest_with_experts(filter(fits, layouts(base, stages=stages))), key=rough_hours)
    if by_price and by_price[0].partition.num_blocks > SEARCHED_BLOCKS[-1]:  # more phases take long to simulate
        cheapest = by_price[:1]
    else:
        cheapest = by_price[:_SIMULATED]
        pipelines = {(recipe.pipeline_size, recipe.flag("bcd_num_blocks")): recipe for recipe in reversed(cheapest)}
        others = [other for recipe in reversed(pipelines.values()) for other in _variants(recipe)]
        cheapest += filter(fits, others)
    estimates = [make_estimate(recipe, tokens=tokens, multiplier=multiplier) for recipe in cheapest]
    return sorted(estimates, key=lambda estimate: estimate.cost.gpu_hours)[:_SIMULATED]


def _changes_to(method: str, *, keeps_blocks: bool) -> _Changes:
    """Return the changes that turn a recipe into a method of COMPARED. With `keeps_blocks` the blocks stay."""
    if method in WHOLE:
        return dict.fromkeys(BLOCK_FLAGS) | {"method": "finetune", "bcd_inactive_update": WHOLE[method]}
    if method in STREAMED:
        streamed: _Changes = {"bcd_layers_on": "host", "bcd_schedule": "breadth-first"}
        moments = {"adam_moments_dtype": "int8"}
        return dict.fromkeys(BLOCK_FLAGS) | streamed | moments | {"method": STREAMED[method]}
    keeps_blocks = keeps_blocks and method in PRESET_OF
    changes: _Changes = dict.fromkeys(("bcd_inactive_update",) if keeps_blocks else BLOCK_FLAGS)
    if method == "offload":
        changes["adam_moments_dtype"] = "fp32"
    if method == "finetune":
        changes["bcd_inactive_update"] = "none"
    return changes | {"method": method}


def fewest_gpus(base: Recipe, *, stages: int | None = None, below: int | None = None) -> int | None:
    """Return the fewest GPUs on which some layout fits, or None. With `below`, which fits, only fewer count.

    Powers of two are tried, or such multiples of a given pipeline, if needed with a larger batch; then smaller numbers
    that keep the batch: any number on one node, otherwise full nodes.
    """

    def fits_on(number: int, *, batch: int) -> bool:
        on_these = base.varied(num_gpus=number, global_batch_size=batch, micro_batch_size=1)
        return any(map(fits, layouts(on_these, stages=stages, micro_batch_size=1)))

    per_node, batch = base.cluster.gpus_per_node, base.global_batch_size
    for number in _doubled(stages or 1):
        is_last = below is not None and number >= below
        if is_last or fits_on(number, batch=_multiple(batch, number)):
            between = range(number // 2 + 1, below if below is not None and is_last else number)
            even = (other for other in between if other <= per_node or other % per_node == 0)
            return next((other for other in even if fits_on(other, batch=batch)), None if is_last else number)
    return None


def compare(base: Recipe, *, stages: int | None = None, **cost: float | None) -> list[Estimate]:
    """Estimate the methods of the task. Sort them by time: first on the given number of GPUs, then on others; there
    first methods that are known to reach full training's loss.

    Each is estimated on the given number of GPUs, and on the fewest on which it fits. ``cost`` is passed to
    `make_estimate`; its multiplier is pretrain's. Raises ValueError if nothing fits, or a flag is out of range.
    """
    estimates: list[Estimate] = []
    for recipe in (base.varied(**_changes_to(method, keeps_blocks=True)) for method in COMPARED[base.task]):
        if recipe.fault:
            continue
        costs = cost if recipe.method == "pretrain" else cost | {"multiplier": None}
        best = search(recipe, stages=stages, **costs)[:1]
        fewest = fewest_gpus(recipe, stages=stages, below=recipe.num_gpus if best else None)
        if fewest not in (None, recipe.num_gpus):
            few: _Changes = {"num_gpus": fewest, "pipeline_model_parallel_size": stages or 1, "micro_batch_size": 1}
            few["global_batch_size"] = _multiple(recipe.global_batch_size, fewest)
            best += search(recipe.changed(**few), stages=stages, **costs)[:1]
        estimates += best
    if not estimates:
        pipeline = "" if stages is None else f" with --pipeline-model-parallel-size {stages}"
        raise ValueError(
            f"--model {base.model.name}: no method fits on any number of {base.cluster.gpu}{pipeline}. "
            "Take a smaller model or a GPU with more memory."
        )

    def order(each: Estimate) -> tuple[bool, bool, float]:
        reaches_full_loss = each.cost.is_to_full_loss or finding(each.recipe).always_reaches_full
        return each.recipe.num_gpus != base.num_gpus, not reaches_full_loss, each.cost.days

    return sorted(estimates, key=order)


# ---------------------------------------------------------------- if a plan does not fit

_MOST_BLOCKS = 12
Remedy = tuple[_Changes, Recipe]
"""Changes, and the recipe that fits with them."""


def remedies(values: Mapping[str, Any], plan: Callable[..., Recipe]) -> list[Remedy]:
    """Return changes of these values with which the recipe that `plan` makes of them fits; none if nothing helps.

    They are settings that help alone, the fewest others that help together, another method, and more GPUs.
    """
    first_that_fits, helpful, others = partial(_first_that_fits, plan), list[Remedy](), list[list[_Changes]]()
    for choices in filter(None, _settings(values)):
        alone = first_that_fits(values, choices)
        helpful += alone
        others += [] if alone else [choices]
    helpful += _fewest_together(plan, values, others)
    extras: list[_Changes] = [{}, {"recompute": "auto"}, {"recompute": "auto", "micro_batch_size": 1}]
    for method in _OTHER_METHODS[values["task"]]:
        if method.split(",")[0] == values["method"]:
            continue
        other = _changes_to(method, keeps_blocks=False)
        if method in PRESET_OF:
            other["bcd_frozen"] = values.get("bcd_frozen")
        if other.get("adam_moments_dtype") == (values.get("adam_moments_dtype") or "fp32"):
            del other["adam_moments_dtype"]
        helpful += first_that_fits(values, [other | extra for extra in extras])
    more, batch = [], int(values.get("global_batch_size") or DEFAULTS["global_batch_size"])
    for number in _doubled(2 * values["num_gpus"]):
        larger: _Changes = {"num_gpus": number}
        if _multiple(batch, number) != batch:
            larger["global_batch_size"] = _multiple(batch, number)
        more += [larger | extra for extra in extras]
    return helpful + first_that_fits(values, more)


def _settings(values: Mapping[str, Any]) -> Iterator[list[_Changes]]:
    """Yield for each setting the values that need less memory, nearest first. The first settings keep the loss.

    A --host-memory-gb of None is as much as the plan needs.
    """
    method, number, is_whole = values["method"], values.get("bcd_num_blocks"), _is_whole(values)
    has_blocks = method in PRESET_OF and not is_whole
    if is_whole:
        yield [{"bcd_inactive_update": "none", "bcd_num_blocks": None}]
    yield [{"micro_batch_size": size} for size in reversed(_divisors(values.get("micro_batch_size") or 1)[:-1])]
    if values.get("cross_entropy_fusion_impl") != "linear":
        yield [{"cross_entropy_fusion_impl": "linear"}]
    no_recompute: _Changes = {} if values.get("recompute") in (None, "none") else {"recompute": "none"}
    if values.get("recompute") == "none":
        yield [{"recompute": "auto"}]
    if values.get("host_memory_gb") is not None:
        yield [{"host_memory_gb": None}]
    if method != "offload" and values.get("adam_moments_dtype") != "int8":
        yield [{"adam_moments_dtype": "int8"}]
    if values["precision"] == "fp32":
        yield [{"precision": "bf16"}]
    if is_whole or method == "pretrain":
        on_device: _Changes = {"bcd_schedule": "breadth-first"} | no_recompute
        yield [on_device, on_device | {"bcd_layers_on": "host", "bcd_saved_inputs": "host"}]
    elif method in CAN_STREAM and values.get("bcd_layers_on") != "host":
        on_host: _Changes = {"bcd_layers_on": "host"} | no_recompute
        yield [on_host, on_host | {"bcd_saved_inputs": "host"}]
    if method in CAN_STREAM and has_blocks and values["precision"] != "fp32" and not values.get("bcd_main_params"):
        yield [{"bcd_main_params": "drop"}]
    always = (values.get("bcd_always_active") or "none").split(",")
    if method == "finetune" and "head" not in always:
        can_move = always == ["none"] and not values.get("bcd_head_phase") and not values["model"].is_tied
        frozen = {*(values.get("bcd_frozen") or "embedding").split(","), "head"} - {"none"}
        freeze: _Changes = {"bcd_frozen": ",".join(sorted(frozen)), "bcd_head_phase": None}
        yield [*([{"bcd_head_phase": True}] if can_move else []), freeze]
    # without a number, fine-tuning has the most blocks already
    if has_blocks and values.get("bcd_layout") != "stage" and not (method == "finetune" and number is None):
        fewest = (DEFAULT_NUM_BLOCKS if number is None else number) + 1
        yield [{"bcd_num_blocks": more} for more in range(fewest, _MOST_BLOCKS + 1)]
    if (stages := values.get("pipeline_model_parallel_size")) is not None:
        yield [{"pipeline_model_parallel_size": size} for size in _divisors(values["num_gpus"]) if size > stages]


def _fewest_together(
    plan: Callable[..., Recipe], values: Mapping[str, Any], settings: Sequence[Sequence[_Changes]]
) -> list[Remedy]:
    """Return these settings without those that are not needed, each with the nearest value that suffices."""

    def fitting(chosen: Sequence[_Changes]) -> list[Remedy]:
        return _first_that_fits(plan, values, [{name: value for each in chosen for name, value in each.items()}])

    chosen: list[_Changes] = [choices[-1] for choices in settings]
    remedy = fitting(chosen)
    for index in reversed(range(len(settings))) if remedy else ():
        for choice in ({}, *settings[index]):
            trial = [*chosen[:index], choice, *chosen[index + 1 :]]
            if better := fitting(trial):
                chosen, remedy = trial, better
                break
    return remedy


def _first_that_fits(
    plan: Callable[..., Recipe], values: Mapping[str, Any], choices: Sequence[_Changes]
) -> list[Remedy]:
    """Return the first of these changes with which the plan fits; an empty list if none does."""
    for changes in choices:
        if fits(recipe := plan(**{**values, **changes})):
            if changes.get("host_memory_gb", 0) is None:
                changes = {**changes, "host_memory_gb": math.ceil(node_bytes(recipe) / 1e9)}
            return [(changes, recipe)]
    return []


# ---------------------------------------------------------------- numbers


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _multiple(least: int, of: int) -> int:
    """Return the least multiple of `of` that is at least `least`."""
    return -(-least // of) * of


def _doubled(first: int) -> Iterator[int]:
    """Yield the number, and powers of two times it, up to MOST_GPUS."""
    yield first
    while 2 * first <= MOST_GPUS:
        first *= 2
        yield first
