"""Choose recipes: the plan of a request, the fastest layouts, methods side by side, and remedies if a plan misfits.

A request is the arguments of `build_recipe`; a value of None is open. `candidates` yields its layouts in order of
preference. A plan is the first that fits (`place`), or the cheapest (`search`).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from megatron.bcd.blocks.partition import layout_text
from megatron.bcd.config import DEFAULT_NUM_BLOCKS
from megatron.bcd.config.presets import asks_for_blocks
from megatron.bcd.pipeline.build import repeated_passes
from megatron.bcd.planner.estimate import Estimate
from megatron.bcd.planner.findings import finding
from megatron.bcd.planner.memory import fits, node_bytes
from megatron.bcd.planner.recipe import DEFAULTS, MAX_GPUS, PRESET_OF, STREAMED, WHOLE, Recipe, build_recipe
from megatron.bcd.planner.tensors import round_up

SEARCHED_BLOCKS = (2, 3, 4, 5, 6)
"""Layout submodel tries only the first two, because it has that many blocks on every stage."""
_NUM_SHOWN = 3
"""The number of layouts that a search returns."""
_MOST_RECUT = 8
"""The most stages between which a search moves single layers."""
MOST_GPUS = 512
_PLANNED_SHARE = 0.95
"""The part of a GPU's memory that a plan fills. The estimate is a formula, and an out-of-memory error costs more than
recomputing a layer."""
_PARTS = 8
"""Parts of the passes whose activations fit in host memory, of which a plan tries to keep none to all there."""
_STREAMED_SLOWER, _SLOWER = 1.05, 1.02
"""How much longer a step may take: with fewer blocks, if frozen layers are on the host; if it needs less memory."""
OF_BLOCKS = (
    "bcd_num_blocks", "bcd_layout", "bcd_frozen", "bcd_always_active", "bcd_head_phase",
    "num_virtual_stages_per_pipeline_rank", "bcd_main_params", "bcd_inactive_update",
)  # fmt: skip
"""Flags that only methods with blocks have."""
BLOCK_FLAGS = (
    *OF_BLOCKS, "bcd_layers_on", "bcd_resident_layers", "bcd_schedule", "bcd_layers_per_pass", "bcd_saved_inputs",
    "bcd_saved_activations", "bcd_passes_on_host",
)  # fmt: skip
"""These, and the flags that inactive updates of all layers and streamed full training have, too."""
CAN_STREAM = ("bcd", "finetune")
"""Methods whose blocks can be trained beside frozen layers in host memory."""
Values = Mapping[str, Any]
_Changes = dict[str, Any]
"""Other values of a request."""
COMPARED = {
    "pretrain": ("full", "muon", *STREAMED, "offload", "bcd", "pretrain"),
    "sft": ("full", *STREAMED, "offload", *WHOLE, "finetune", "bcd", "pretrain"),
}
"""The compared methods by task."""
_OTHER_METHODS = {"pretrain": ("pretrain", "bcd", "offload"), "sft": (*WHOLE, "finetune", "offload")}
"""The methods that are offered if a plan does not fit."""


def candidates(values: Values, *, is_open: bool = True) -> Iterator[Recipe]:
    """Yield the allowed layouts of a request, in order of preference.

    The first ones keep most in memory; of those the shortest pipelines come first. What saves memory is tried only
    where the pipeline, blocks and micro-batch do not fit without it, except that breadth-first tries all places of
    layers and all sizes of chunks. If not `is_open`, only the pipeline is chosen.
    """
    shapes = [*_shapes(values)]
    share, enough = values.get("memory_share") or 1.0, dict[int, str]()
    inputs = values.get("bcd_saved_inputs")
    for saving in _savings(values) if is_open else [{"recompute": values.get("recompute") or "none"}]:
        schedule = saving.get("bcd_schedule") or "plain"
        is_late = saving.get("bcd_saved_inputs") == "host" != inputs  # inputs leave the device only if they must
        for index, shape in enumerate(shapes):
            if enough.get(index) == "plain" or (is_late and index in enough):
                continue
            recipe = build_recipe(**{**values, **shape, **saving})
            if recipe.fault:
                continue
            yield recipe
            if fits(recipe, share=share):
                enough[index] = schedule
            else:
                enough.pop(index, None)  # of a smaller chunk


def _shapes(values: Values) -> Iterator[_Changes]:
    """Yield pipelines, shortest first, with numbers of blocks and micro-batches. A given value is kept.

    Layout stage has at least two stages if there are two GPUs.
    """
    stages, layout = values.get("pipeline_model_parallel_size"), values.get("bcd_layout")
    blocks: Sequence[int | None] = [values.get("bcd_num_blocks")]
    if values["method"] == "bcd" and blocks == [None] and layout != "stage":
        blocks = SEARCHED_BLOCKS[: 2 if layout == "submodel" else None]  # other methods have a default
    ranks = min(max(1, values["num_gpus"]), MAX_GPUS) // max(1, values.get("context_parallel_size") or 1)
    least = 2 if values["method"] in PRESET_OF and layout == "stage" and ranks > 1 else 1
    for size in [stages] if stages else [size for size in _divisors(ranks) if size >= least]:
        per_rank, left = divmod(_batch_size(values), max(1, ranks // size))
        if left and not stages:
            continue
        given = values.get("micro_batch_size")
        powers = [number for number in _divisors(per_rank) if number & (number - 1) == 0]
        for number, micro in itertools.product(blocks, [given] if given else powers):
            yield {"pipeline_model_parallel_size": size, "bcd_num_blocks": number, "micro_batch_size": micro}


def _savings(values: Values) -> Iterator[_Changes]:
    """Yield settings that the request leaves open, with less and less memory.

    The order is: in fine-tuning a linear loss, then recomputation; in fine-tuning then frozen layers on the host. If
    inactive updates step every layer, breadth-first comes last.
    """
    method, loss, recompute = values["method"], values.get("cross_entropy_fusion_impl"), values.get("recompute")
    schedule, place, is_whole = values.get("bcd_schedule"), values.get("bcd_layers_on"), _is_whole(values)
    updates_all = is_whole or method in ("pretrain", *STREAMED.values())
    if schedule == "breadth-first" or (updates_all and place == "host"):
        yield from _breadth_first(values)
        return
    is_sft, has_no_recompute = values["task"] == "sft", recompute in (None, "none")
    can_stream = method in CAN_STREAM and not is_whole and has_no_recompute
    can_stream &= values.get("bcd_layout") in (None, "interleaved")  # breadth-first has no other on several stages
    losses = (None, "linear") if _has_linear_loss(values) and loss is None else (loss,)
    plain: list[_Changes] = [{"recompute": recompute or "none", "cross_entropy_fusion_impl": each} for each in losses]
    if recompute is None:
        plain.append({"recompute": "auto", "cross_entropy_fusion_impl": losses[-1]})
    if place != "host":
        yield from (each | {"bcd_layers_on": place} for each in plain)
    if place == "host" or (is_sft and place is None and can_stream):
        smallest = {"bcd_layers_on": "host", "bcd_layers_per_pass": values.get("bcd_layers_per_pass") or 1}
        yield from _breadth_first({**values, **smallest})
    if updates_all and method in PRESET_OF and schedule is None and values["precision"] != "fp16" and has_no_recompute:
        yield from _breadth_first(values)


def _breadth_first(values: Values) -> Iterator[_Changes]:
    """Yield the places of layers and saved inputs, and the sizes of chunks, of which larger ones repeat fewer passes.

    None of them is always the fastest that fits. On one stage the memory that is left keeps activations.
    """
    loss = values.get("cross_entropy_fusion_impl") or ("linear" if _has_linear_loss(values) else None)
    recompute = values.get("recompute") or "none"
    fixed: _Changes = {"recompute": recompute, "bcd_schedule": "breadth-first", "cross_entropy_fusion_impl": loss}
    fixed["bcd_saved_activations"] = values.get("bcd_saved_activations") or "auto"
    fixed["memory_share"] = values.get("memory_share") or _PLANNED_SHARE
    chunks = [1]
    for size in _divisors(values["model"].layers)[:-1]:
        chunks += [size] * (size >= 2 * chunks[-1])
    places = ("device", "host")
    choices = {"bcd_layers_on": places, "bcd_layers_per_pass": chunks, "bcd_saved_inputs": places}
    given = [[values[name]] if values.get(name) else every for name, every in choices.items()]
    for chosen in itertools.product(*given):
        yield fixed | dict(zip(choices, chosen, strict=True))


def _has_linear_loss(values: Values) -> bool:
    """Return whether the planner proposes the loss without logits."""
    return bool(values["task"] == "sft" and values["model"].has_plain_head)


def _is_whole(values: Values) -> bool:
    """Return whether these values make preset finetune train every layer in every step."""
    return values.get("bcd_inactive_update") in WHOLE.values()


def _largest_with_experts(recipes: Iterable[Recipe]) -> list[Recipe]:
    """Return the recipes; with experts only those with the largest micro-batch, as their time is that of launches."""
    every = list(recipes)
    largest = max((each.micro_batch_size for each in every if each.model.experts), default=0)
    return [each for each in every if each.micro_batch_size >= largest]


def place(*, is_open: bool = True, **request: Any) -> Recipe:
    """Return the first candidate that fits in 95 % of the memory, else the first that fits, else the last.

    If nothing is allowed, the recipe has a fault. If only host memory is short, the recipe is the one that more would
    allow. A micro-batch of None has one sequence, with experts the most that fit; preset finetune with every layer in
    every step, or with frozen weights on the host, has the fastest size. A number of GPUs of None is the fewest that
    fit, or else one node.

    Args:
        is_open: whether to choose what saves memory, beside the pipeline.
    """
    values: _Changes = dict.fromkeys(("num_gpus", "micro_batch_size")) | request
    if values["method"] == "bcd" and values.get("bcd_num_blocks") is None and values.get("bcd_layout") != "stage":
        values["bcd_num_blocks"] = DEFAULT_NUM_BLOCKS
    if values["num_gpus"] is None:
        values["num_gpus"] = fewest_gpus(values) or values["cluster"].gpus_per_node
    micro_batch_size, share = values["micro_batch_size"], _PLANNED_SHARE if is_open else 1.0
    values["memory_share"] = share
    has_experts = bool(values["model"].experts) and micro_batch_size is None
    for rule in _rules(values):
        values["bcd_inactive_update"] = rule
        is_timed = has_experts or rule in WHOLE.values()
        if is_timed and (fastest := _fastest(candidates(values, is_open=is_open))):
            recut = _recut(Estimate(recipe=fastest)).recipe
            return with_passes_on_host(with_fewest_blocks(recut))
    smallest = {
        "micro_batch_size": micro_batch_size or 1,
        "bcd_layers_per_pass": values.get("bcd_layers_per_pass") or 1,
    }
    tried: list[Recipe] = []
    for recipe in candidates(values | smallest, is_open=is_open):
        tried.append(recipe)
        if fits(recipe, share=share):
            break
    else:
        recipe = next(filter(fits, tried), tried[-1] if tried else build_recipe(**values))
    if not fits(recipe) and (limit := values.get("host_memory_gb")) is not None:
        ample = place(is_open=is_open, **request | {"host_memory_gb": None})
        return replace(ample, host_memory_gb=limit) if fits(ample) else recipe
    if not fits(recipe):
        return recipe
    if is_open and recipe.is_streamed and micro_batch_size is None:
        names = ("micro_batch_size", "pipeline_model_parallel_size", "cross_entropy_fusion_impl", "recompute")
        given = {name: values.get(name) for name in names}
        recipe = _fastest(candidates(recipe.values | given)) or recipe
    return with_passes_on_host(with_fewest_blocks(recipe))


def first_allowed(values: Values) -> Recipe:
    """Return the first candidate. If none is allowed, return a recipe whose fault says why."""
    return next(candidates(values), None) or build_recipe(**values)


def _rules(values: Values) -> Sequence[str | None]:
    """Return the rules of --bcd-inactive-update to try, best first."""
    given = values.get("bcd_inactive_update")
    if given is not None or values["method"] != "finetune":
        return (given,)
    if asks_for_blocks(values) or values["precision"] == "fp16":  # inactive updates have no loss scale
        return ("none",)
    return ("factored", "none")


def _fastest(recipes: Iterable[Recipe]) -> Recipe | None:
    """Return the first of the recipes that fit in their share of the memory and take at most _SLOWER times the
    fastest's time, so layers leave the device, and chunks grow, only for a gain."""
    fitting = _largest_with_experts(recipe for recipe in recipes if fits(recipe, share=recipe.memory_share))
    seconds = [Estimate(recipe=recipe).iteration_seconds for recipe in fitting]
    within = (recipe for recipe, each in zip(fitting, seconds, strict=True) if each <= _SLOWER * min(seconds))
    return next(within, None)


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
    longest = _STREAMED_SLOWER * Estimate(recipe=recipe).iteration_seconds if recipe.is_streamed else math.inf
    per_stage = recipe.model.layers // recipe.pipeline_size
    numbers = sorted({math.ceil(per_stage / size) for size in range(2, per_stage)})
    for other in (build_recipe(**recipe.values | {"bcd_num_blocks": number}) for number in numbers):
        if fits(other, share=_PLANNED_SHARE) and Estimate(recipe=other).iteration_seconds <= longest:
            return other
    return recipe


def with_passes_on_host(recipe: Recipe) -> Recipe:
    """Return a breadth-first recipe that keeps activations in host memory, too, if no number was given, and host memory
    has room, whose size is known, and PCIe has time: with the fewest passes within _SLOWER of the fastest."""
    is_open = recipe.host_memory_gb is not None and recipe.flag("bcd_passes_on_host") is None
    if not is_open or not recipe.config.is_breadth_first or recipe.flag("bcd_saved_activations") != "auto":
        return recipe

    def with_passes(number: int) -> Recipe:
        return build_recipe(**recipe.values | {"bcd_passes_on_host": number})

    numbers = range(1, 1 + len(repeated_passes(recipe.memory.schedule_shape(0), 0)) - recipe.memory.num_kept)
    most = bisect_left(numbers, True, key=lambda number: not fits(with_passes(number), share=recipe.memory_share))
    tried = sorted({most * part // _PARTS for part in range(1, _PARTS + 1)} - {0})
    return _fastest([recipe, *map(with_passes, tried)]) or recipe


def search(values: Values, *, tokens: float | None = None) -> list[Estimate]:
    """Return the candidates of a request that fit and have the lowest cost, an empty list if none fits.

    Costs are GPU hours: all layouts have the same price, which may not be known. The pipelines of the cheapest are also
    cut by work.
    """

    def gpu_hours(estimate: Estimate) -> float:
        return float(f"{estimate.cost.gpu_hours:.6g}")  # of equals the first, which keeps most memory free

    for rule in _rules(values):
        fitting = _largest_with_experts(filter(fits, candidates({**values, "bcd_inactive_update": rule})))
        estimates = [Estimate(recipe=recipe, tokens=tokens) for recipe in fitting]
        for each in sorted(estimates, key=gpu_hours)[:_NUM_SHOWN]:
            cut = build_recipe(**each.recipe.values | {"recompute": "auto", "pipeline_cut": "auto"})
            others = [cut] * (each.recipe.pipeline_size > 1 and fits(cut)) + [with_passes_on_host(each.recipe)]
            estimates += (Estimate(recipe=other, tokens=tokens) for other in others if other != each.recipe)
        if estimates:
            best, *rest = sorted(estimates, key=gpu_hours)[:_NUM_SHOWN]
            return [_recut(best), *rest]
    return []


def _recut(best: Estimate) -> Estimate:
    """Return the plan with single layers moved between pipeline stages while that makes it faster.

    Unlike --pipeline-cut auto this counts the recomputation of a stage with little memory, such as the embedding's.
    """
    values, sizes = best.recipe.values | {"recompute": "auto"}, [*map(len, best.recipe.partition.virtual_stages)]
    if (
        len(sizes) != best.recipe.pipeline_size
        or not 1 < len(sizes) <= _MOST_RECUT
        or best.recipe.config.is_breadth_first
    ):
        return best
    tried, is_better = {tuple(sizes)}, True
    while is_better:
        is_better = False
        for giver, taker in itertools.permutations(range(len(sizes)), 2):
            moved = [size + (stage == taker) - (stage == giver) for stage, size in enumerate(sizes)]
            if not all(moved) or tuple(moved) in tried:
                continue
            tried.add(tuple(moved))
            cut = {"pipeline_cut": None, "pipeline_model_parallel_layout": layout_text(moved)}
            recipe = build_recipe(**values | cut)
            if recipe.fault or not fits(recipe, share=recipe.memory_share):
                continue
            other = replace(best, recipe=recipe)
            if other.iteration_seconds < 0.999 * best.iteration_seconds:
                best, sizes, is_better = other, moved, True
    return best


def _changes_to(method: str, *, keeps_blocks: bool) -> _Changes:
    """Return the changes that turn a request into a method of COMPARED. With `keeps_blocks` the blocks stay."""
    if method in WHOLE:
        return dict.fromkeys(BLOCK_FLAGS) | {"method": "finetune", "bcd_inactive_update": WHOLE[method]}
    if method in STREAMED:
        streamed: _Changes = {"bcd_layers_on": "host", "bcd_schedule": "breadth-first", "adam_moments_dtype": "int8"}
        return dict.fromkeys(BLOCK_FLAGS) | streamed | {"method": STREAMED[method]}
    keeps_blocks = keeps_blocks and method in PRESET_OF
    changes: _Changes = dict.fromkeys(("bcd_inactive_update",) if keeps_blocks else BLOCK_FLAGS)
    if method == "offload":
        changes["adam_moments_dtype"] = "fp32"
    if method == "finetune":
        changes["bcd_inactive_update"] = "none"
    return changes | {"method": method}


def fewest_gpus(values: Values, *, below: int | None = None) -> int | None:
    """Return the fewest GPUs on which a candidate of the request fits, or None. With `below`, which fits, only fewer
    count.

    Powers of two are tried, or such multiples of a given pipeline, if needed with a larger batch; then smaller numbers
    that keep the batch: any number on one node, otherwise full nodes.
    """
    per_node, batch = values["cluster"].gpus_per_node, _batch_size(values)
    fewest = values.get("pipeline_model_parallel_size") or 1
    if values["method"] in PRESET_OF and values.get("bcd_layout") == "stage":
        fewest = max(fewest, values.get("bcd_num_blocks") or 2)

    def fits_on(number: int, *, batch: int) -> bool:
        on_these = {"num_gpus": number, "global_batch_size": batch, "micro_batch_size": 1}
        return any(map(fits, candidates({**values, **on_these})))

    for number in _doubled(fewest):
        is_last = below is not None and number >= below
        if is_last or fits_on(number, batch=round_up(batch, number)):
            between = range(number // 2 + 1, below if below is not None and is_last else number)
            even = (other for other in between if other <= per_node or other % per_node == 0)
            return next((other for other in even if fits_on(other, batch=batch)), None if is_last else number)
    return None


def compare(values: Values, *, tokens: float | None = None) -> list[Estimate]:
    """Estimate the methods of the task. Sort them by time: first on the given number of GPUs, then on others; there
    first methods that are known to reach full training's loss.

    Each is estimated on the given number of GPUs, and on the fewest on which it fits. Raises ValueError if nothing
    fits, or a flag is out of range.
    """
    estimates: list[Estimate] = []
    for method in COMPARED[values["task"]]:
        request = {**values, **_changes_to(method, keeps_blocks=True)}
        if method == "muon, streamed" and values["task"] == "pretrain":  # fine-tuned losses are those of bf16
            request["muon_momentum_dtype"] = values.get("muon_momentum_dtype") or "int8"
        if first_allowed(request).fault:
            continue
        best = search(request, tokens=tokens)[:1]
        fewest = fewest_gpus(request, below=values["num_gpus"] if best else None)
        if fewest not in (None, values["num_gpus"]):
            request |= {"num_gpus": fewest, "global_batch_size": round_up(_batch_size(values), fewest)}
            best += search(request, tokens=tokens)[:1]
        estimates += best
    if not estimates:
        stages = values.get("pipeline_model_parallel_size")
        pipeline = "" if stages is None else f" with --pipeline-model-parallel-size {stages}"
        raise ValueError(
            f"--model {values['model'].name}: no method fits on any number of {values['cluster'].gpu}{pipeline}. "
            "Take a smaller model or a GPU with more memory."
        )

    def order(each: Estimate) -> tuple[bool, bool, float]:
        reaches_full_loss = each.cost.is_to_full_loss or max(finding(each.recipe).loss, default=1) <= 0
        return each.recipe.num_gpus != values["num_gpus"], not reaches_full_loss, each.cost.days

    return sorted(estimates, key=order)


_MOST_BLOCKS = 12
Remedy = tuple[_Changes, Recipe]
"""Changes, and the recipe that fits with them."""


def remedies(values: Values, plan: Callable[..., Recipe]) -> list[Remedy]:
    """Return changes of a request with which the recipe that `plan` makes of it fits; none if nothing helps.

    They are settings that help alone, the fewest others that help together, another method, and more GPUs.
    """

    @cache
    def planned(changes: frozenset[tuple[str, Any]]) -> Recipe:
        return plan(**{**values, **dict(changes)})

    def first_that_fits(*choices: _Changes) -> list[Remedy]:
        for changes in choices:
            if fits(recipe := planned(frozenset(changes.items()))):
                if changes.get("host_memory_gb", 0) is None:
                    changes = changes | {"host_memory_gb": math.ceil(node_bytes(recipe) / 1e9)}
                return [(changes, recipe)]
        return []

    helpful, others = list[Remedy](), list[list[_Changes]]()
    for choices in _settings(values):
        alone = first_that_fits(*choices)
        helpful += alone
        others += [choices] * (not alone)
    together = [choices[-1] for choices in others if choices]
    if first_that_fits(_joined(together)):
        for index, choices in reversed([*enumerate(filter(None, others))]):  # the fewest, with the nearest values
            trials = ([*together[:index], choice, *together[index + 1 :]] for choice in ({}, *choices))
            together = next(trial for trial in trials if first_that_fits(_joined(trial)))
        helpful += first_that_fits(_joined(together))
    extras: list[_Changes] = [{}, {"recompute": "auto"}, {"recompute": "auto", "micro_batch_size": 1}]
    for method in _OTHER_METHODS[values["task"]]:
        if method.split(",")[0] == values["method"]:
            continue
        other = _changes_to(method, keeps_blocks=False)
        if method in PRESET_OF:
            other["bcd_frozen"] = values.get("bcd_frozen")
        if other.get("adam_moments_dtype") == (values.get("adam_moments_dtype") or "fp32"):
            del other["adam_moments_dtype"]
        helpful += first_that_fits(*(other | extra for extra in extras))
    more, batch = list[_Changes](), _batch_size(values)
    for number in _doubled(2 * values["num_gpus"]):
        larger = {"num_gpus": number}
        if round_up(batch, number) != batch:
            larger["global_batch_size"] = round_up(batch, number)
        more += [larger | extra for extra in extras]
    return helpful + first_that_fits(*more)


def _joined(changes: Iterable[_Changes]) -> _Changes:
    return {name: value for each in changes for name, value in each.items()}


def _settings(values: Values) -> Iterator[list[_Changes]]:
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
    if method in ("muon", "pretrain") and values.get("muon_momentum_dtype") != "int8":
        yield [{"muon_momentum_dtype": "int8"}]
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


def _batch_size(values: Values) -> int:
    return int(values.get("global_batch_size") or DEFAULTS["global_batch_size"])


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _doubled(first: int) -> Iterator[int]:
    """Yield the number, and powers of two times it, up to MOST_GPUS."""
    yield first
    while 2 * first <= MOST_GPUS:
        first *= 2
        yield first
