"""Estimates before a run: does a model fit on these GPUs, how fast does it train, what does it cost?

    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --method bcd --bcd-num-blocks 3
    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --bcd-preset pretrain
    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --search
    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --compare
    python tools/plan.py --paper

Nothing is run: memory and time follow from formulas and from the editable tables examples/models.csv and
examples/clusters.csv. --paper recomputes the tables of the paper (arXiv 2506.12037). See docs/planner.md.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _parser import Parser, add_json, add_precision, command, run_main, table, write_figures
from _timeline import write_timeline

from megatron.bcd.config import BcdConfig
from megatron.bcd.config.presets import PRESETS
from megatron.bcd.huggingface.architecture import CONFIG, read_architecture
from megatron.bcd.planner.command import parts_of, torchrun_command
from megatron.bcd.planner.cost import PRECISIONS
from megatron.bcd.planner.estimate import MULTIPLIERS, Estimate, make_estimate
from megatron.bcd.planner.measured import Finding, finding, learning_rate
from megatron.bcd.planner.memory import fits_on_host
from megatron.bcd.planner.paper import FITTED_MODELS, Paper
from megatron.bcd.planner.recipe import (
    FLAGS,
    LONGEST_DEFAULT,
    METHODS,
    PRESET_OF,
    SFT_DEFAULTS,
    VOCABULARY_MULTIPLE,
    Recipe,
)
from megatron.bcd.planner.search import (
    COMPARED,
    OF_BLOCKS,
    compare,
    place,
    reason_for_rule,
    remedies,
    search,
    shortest_that_fits,
    valid_pipelines,
    with_fewest_blocks,
)
from megatron.bcd.planner.tables import (
    GIB,
    Cluster,
    Model,
    Published,
    choose,
    columns_of,
    read_clusters,
    read_models,
    read_rows,
)

PROG = "tools/plan.py"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODELS = os.path.join(ROOT, "examples", "models.csv")
CLUSTERS = os.path.join(ROOT, "examples", "clusters.csv")
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_WIDTH = 120
_USUAL_HOST_GB = 64
_MOST_ROWS = 12
"""Of the tables of ranks and phases."""
_MEMORY = ("weights", "gradients", "optimizer", "activations", "optimizer_work", "communication", "framework")

# ---------------------------------------------------------------- the command line


def build_parser(task: str = "pretrain") -> argparse.ArgumentParser:
    """With the defaults of a task."""
    parser = Parser(prog=PROG, usage=f"{PROG} --model NAME --gpu NAME --num-gpus N [flags]", description=__doc__)
    add = parser.add_argument
    add("--model", metavar="NAME", help="a config.json, the folder that holds one, or a row of the model table")
    add("--gpu", metavar="NAME", help="a row of the cluster table")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--search", action="store_true", help="all methods side by side, each in its cheapest layouts that fit, and"
        " the plan of the best; with --method or --bcd-preset the layouts of that one")  # fmt: skip
    add("--compare", action="store_true", help="all methods side by side, without a plan")
    add("--paper", action="store_true", help="recompute the paper's tables")
    add("--timeline", metavar="FILE", help="with --bcd-frozen-weights host: draw computation and copies of a microbatch"
        " in the middle block's phase, as a Chrome trace (.json) or a picture (.png, .svg)")  # fmt: skip
    add("--verify", action="store_true", help="without effect: tests/unit/test_plan_verify.py compares with models")
    add_json(parser)
    group = parser.add_argument_group("recipe", "same names as the training script's flags")
    add = group.add_argument
    add("--task", choices=tuple(COMPARED), default="pretrain", help="sft: fine-tuning a published model on records;"
        " by default method finetune, bf16, packed sequences of 1,024 tokens, global batch 8, recomputation where"
        " needed, three epochs of Alpaca (default: pretrain)")  # fmt: skip
    add("--method", choices=METHODS, help="bcd: block coordinate descent as in the paper; pretrain, finetune: with that"
        " --bcd-preset; full training; offload: the same with the optimizer on the host; muon: the same with Muon"
        " (default: bcd)")  # fmt: skip
    add("--bcd-preset", choices=tuple(PRESETS), help="the method of that name; paper is --method bcd")
    add_recipe_flags(group)
    group = parser.add_argument_group("cost")
    add = group.add_argument
    add("--tokens", type=token_count, metavar="N", help="tokens that full training would read, such as 300M, 1B or 1e9"
        " (default: 20 per parameter)")  # fmt: skip
    (paper, _), (pretrain, _) = MULTIPLIERS["bcd"], MULTIPLIERS["pretrain"]
    add("--bf-multiplier", type=float, metavar="K", help="iterations of BCD with three blocks over those of full"
        " training to the same loss; with --compare pretrain's"
        f" (default: {paper}; method pretrain: {pretrain})")  # fmt: skip
    if task == "sft":
        parser.set_defaults(**SFT_DEFAULTS)
    return parser


def flag_of(name: str) -> str:
    """The flag of a field of Recipe, or of argparse's name."""
    return FLAGS.get(name, f"--{name.replace('_', '-')}")


def add_recipe_flags(group: Any) -> None:
    """Flags that the recipes (tools/recipe.py) have too: ranks, batch, blocks, and what saves memory."""
    kinds = {"int": int, "float": float}
    for each in fields(Recipe):
        if each.metadata:
            words = {key: value for key, value in each.metadata.items() if key != "name"}
            if "action" not in words:
                words["type"] = kinds.get(str(each.type).partition(" ")[0], str)
            group.add_argument(FLAGS[each.name], dest=each.name, **words)
    add_precision(group, PRECISIONS, more="; with --task sft bf16")
    add = group.add_argument
    add("--models", metavar="FILE", help="rows of your own, beside those of examples/models.csv or in their place")
    add("--clusters", metavar="FILE", default=CLUSTERS, help="the cluster table")
    add("--network-gbit", type=float, metavar="RATE", help="of a node's link to others, 10^9 bits per second (default:"
        " the cluster table's)")  # fmt: skip


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Raises ValueError for an unknown or missing flag, or an invalid value."""
    task = build_parser().parse_args(argv).task
    return build_parser(task).parse_args(argv)


def token_count(text: str) -> float:
    """1e9, 300M, 1B."""
    unit = _UNITS.get(text[-1:].upper())
    try:
        return float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no number; give one such as 300M, 1B or 1e9") from None


def method_of(arguments: argparse.Namespace) -> str:
    """--method, or the one of --bcd-preset. Raises ValueError if they differ."""
    method, preset = arguments.method, arguments.bcd_preset
    if preset is None:
        return method or ("finetune" if arguments.task == "sft" and not is_adapters_alone(arguments) else "bcd")
    # bcd is also the method of all presets in general
    if method not in (None, "bcd") and PRESET_OF.get(method) != preset:
        raise ValueError(f"--bcd-preset {preset} cannot be combined with --method {method}; give one of them")
    return next(name for name, known in PRESET_OF.items() if known == preset)


def is_adapters_alone(arguments: argparse.Namespace) -> bool:
    """Return whether nothing but adapters is trained. Preset finetune would train the head in full beside them."""
    return arguments.num_blocks == 0 and arguments.low_rank is not None


def named_model(name: str, *, models: str | None) -> Model:
    """The network of a config.json or of the folder that holds one, else a row of the file `models` or of the built-in
    table."""
    if name.endswith(".json") or os.path.isfile(os.path.join(name, CONFIG)):
        network = read_architecture(name)
        is_gpt = network.family == "gpt2"
        return Model(
            name=os.path.basename(os.path.abspath(name if os.path.isdir(name) else os.path.dirname(name))),
            form="gpt" if is_gpt else "llama",
            layers=network.num_layers,
            hidden=network.hidden_size,
            heads=network.num_attention_heads,
            groups=network.num_query_groups,
            ffn=network.ffn_hidden_size,
            vocabulary=network.vocab_size,
            sequence=min(network.plain_positions, LONGEST_DEFAULT),
            source=name,
            head_dim=network.head_size,
            tied=network.tied,
            biases="all" if network.linear_bias else "qkv" if network.qkv_bias else "none",
            qk_norm=network.qk_norm,
            positions=network.max_positions if is_gpt else 0,
        )
    rows = read_models(MODELS) | (read_models(models) if models else {})
    try:
        return choose(rows, name, flag="--model")
    except ValueError as error:
        if os.path.isdir(name):
            remedy = "Give the folder of a model in Hugging Face's format."
            raise ValueError(f"--model {name}: the folder has no {CONFIG}. {remedy}") from None
        if "/" in name:
            remedy = f"Give a folder: hf download {name} --local-dir FOLDER (for a plan {CONFIG} is enough)."
            raise ValueError(f"--model {name}: no such folder. {remedy}") from None
        raise ValueError(
            f"{error}; or give a {CONFIG}, the folder that holds one, or a row of your own with --models FILE "
            f"(columns {columns_of(Model)})"
        ) from None


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    """Of the table, with --network-gbit."""
    cluster = choose(read_clusters(arguments.clusters), arguments.gpu, flag="--gpu")
    if (rate := arguments.network_gbit) is None:
        return cluster
    if rate <= 0:
        raise ValueError(f"--network-gbit {rate:g}: must be more than 0")
    return replace(cluster, network_gb_per_s=rate / 8)


def fields_of(arguments: argparse.Namespace, method: str) -> dict[str, Any]:
    """Recipe's fields; None, also of pipeline_size, num_gpus and recompute: not given. Raises ValueError for an unknown
    name, or a flag that nothing would read."""
    if method not in PRESET_OF:
        for name in set(OF_BLOCKS) - {"num_blocks"}:
            if (value := getattr(arguments, name)) is not None:
                other = f"--method {method}, which has no blocks"
                raise ValueError(f"{flag_of(name)} {value} cannot be combined with {other}: leave it out")
    elif arguments.num_chunks and arguments.layout != "interleaved":
        raise ValueError(f"{flag_of('num_chunks')} needs --bcd-layout interleaved: give both, or leave it out")
    frozen, always = arguments.frozen, arguments.always_active
    return {name: getattr(arguments, name) for name in (*FLAGS, "precision", "task")} | {
        "model": named_model(arguments.model, models=arguments.models),
        "cluster": cluster_of(arguments),
        "method": method,
        "frozen": None if frozen is None else BcdConfig(bcd_frozen=frozen).frozen,
        "always_active": None if always is None else BcdConfig(bcd_always_active=always).always_active,
        "vocabulary_multiple": VOCABULARY_MULTIPLE[arguments.task],
    }


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """The recipe of the flags. Raises ValueError naming a missing or invalid flag."""
    for name in ("model", "gpu", "num_gpus"):
        if getattr(arguments, name) is None:
            raise ValueError(f"{flag_of(name)} is required (except with --paper)")
    given = fields_of(arguments, method_of(arguments))
    if arguments.search or arguments.compare:
        return valid_pipelines(**given | {"recompute": "none", "micro_batch_size": arguments.micro_batch_size or 1})[0]
    if arguments.task == "sft":
        return place(**given)
    return with_fewest_blocks(shortest_that_fits(valid_pipelines(**given)))


def words_of(values: Mapping[str, Any]) -> list[str]:
    """The command line of fields of a recipe, without those that are None, the default."""
    words = []
    for name, value in values.items():
        if value is not None:
            text = parts_of(value) if isinstance(value, frozenset) else value
            words.append(flag_of(name))
            if value is not True:
                words.append(f"{text:g}" if isinstance(text, float) else str(text))
    return words


# ---------------------------------------------------------------- answers

Answer = tuple[str, Any, int]
"""Text for people, plain values for programs, and the exit code: 1 for a plan that does not fit."""


def answer_to(arguments: argparse.Namespace) -> Answer:
    """Raises ValueError for a user's mistake."""
    if arguments.paper:
        published = read_rows(os.path.join(ROOT, "docs", "paper_figures.csv"), Published)
        paper = Paper(published, read_models(MODELS), read_clusters(CLUSTERS)["rtx4090"])
        names = ("table", "row", "column", "published", "recomputed", "difference", "note")
        return show_paper(paper), [{name: getattr(cell, name) for name in names} for cell in paper.cells], 0
    recipe = recipe_of(arguments)
    is_one_method = bool(arguments.method or arguments.bcd_preset)
    if arguments.compare and is_one_method:
        raise ValueError("--compare shows all methods: leave out --method and --bcd-preset")
    cost = {"tokens": arguments.tokens, "multiplier": arguments.bf_multiplier}
    if arguments.compare or arguments.search:
        find = search if is_one_method else compare
        found = find(recipe, pipeline_size=arguments.pipeline_size, **cost)
        return answer_search(arguments, recipe, found)
    if arguments.timeline:
        write_timeline(arguments.timeline, recipe)
    estimate = make_estimate(recipe, **cost)
    data = estimate.as_dict()
    if estimate.fits:
        return show_estimate(estimate), data | {"command": command_of(estimate)}, 0
    text, others = what_fits(arguments)
    return f"{show_figures(estimate)}\n\n{text}", data | {"command": None, "what_fits": others}, 1


def answer_search(arguments: argparse.Namespace, recipe: Recipe, found: Sequence[Estimate]) -> Answer:
    """The layouts found, cheapest first, and but with --compare the plan of the best on these GPUs."""
    if not found:
        text, others = what_fits(arguments)
        head = f"no layout of {recipe.model.name} with --method {recipe.method} fits on {recipe.num_gpus} x "
        return f"{head}{recipe.cluster.gpu}\n{text}", {"best": [], "what_fits": others}, 1
    full = min((each.cost.gpu_hours for each in found if each.recipe.method == "full"), default=None)
    ratios = [full and each.cost.gpu_hours / full if each.cost.is_to_full_loss else None for each in found]
    rows = [each.as_dict() | {"cost_ratio": ratio} for each, ratio in zip(found, ratios, strict=True)]
    text = show_search(recipe, found, ratios)
    if arguments.compare:
        return text, rows, 0
    # nothing is known of the loss of a method that was not measured
    known = [each for each in found if each.cost.is_to_full_loss or finding(each.recipe).loss is not None] or found
    best = next((each for each in known if each.recipe.num_gpus == recipe.num_gpus), None)
    if best is None:
        changes = {"num_gpus": found[0].recipe.num_gpus, "global_batch_size": found[0].recipe.global_batch_size}
        command = f"{changed_command(arguments, changes)} --search"
        text = f"{text}\n\nno method fits on {recipe.num_gpus} GPUs; plan the best with\n{command}"
        return text, {"best": None, "methods": rows}, 1
    text = f"{text}\n\nthe best on {recipe.num_gpus} GPUs\n\n{show_estimate(best)}"
    plan = best.as_dict() | {"command": command_of(best)}
    return text, {"best": plan, "methods": rows}, 0


def what_fits(arguments: argparse.Namespace) -> tuple[str, list[dict[str, str]]]:
    """Changed flags with which the plan fits, and the planner's command for each."""
    given = fields_of(arguments, method_of(arguments)) | {"recompute": arguments.recompute or "auto"}
    given["micro_batch_size"] = arguments.micro_batch_size or 1
    rows, data = [], []
    for changes, recipe in remedies(given):
        if "method" in changes:
            changes["bcd_preset"] = None
        flags, command = " ".join(words_of(changes)), changed_command(arguments, changes)
        data.append({"flags": flags, "command": command})
        estimate = make_estimate(recipe)
        figures = (f"{estimate.peak.total / GIB:.1f}", f"{estimate.tokens_per_second:,.0f}")
        rows.append((flags, str(recipe.num_gpus), f"{recipe.pipeline_size} x {recipe.data_size}", *figures))
    if not data:
        return "nothing fits on any number of these GPUs: take a smaller model or a GPU with more memory", []
    fitting = table(("with", "GPUs", "PP x DP", "GiB", "tokens/s"), rows)
    loss = "what each costs in loss: docs/planner.md, What fits"
    return f"what fits\n{fitting}\n{loss}\nplan the first with\n{data[0]['command']}", data


def changed_command(arguments: argparse.Namespace, changes: Mapping[str, Any]) -> str:
    """The planner's command for the same flags, but for some values."""
    default = build_parser(arguments.task).get_default
    given = {
        name: value
        for name, value in vars(arguments).items()
        if (value != default(name) or name == "task" and value == "sft")
        and (value is not True or name == "head_phase")
        and name != "json"
    }
    return shlex.join(["python", PROG, *words_of(given | changes)])


def command_of(estimate: Estimate) -> str:
    return torchrun_command(estimate.recipe, iterations=estimate.cost.iterations)


# ---------------------------------------------------------------- text


def show_estimate(estimate: Estimate) -> str:
    """Recipe, memory, time, cost and the command of a plan that fits."""
    if estimate.recipe.task == "sft":
        advice = "put your own in place of MODEL_DIR, DATA.jsonl and OUT_DIR"
    else:
        needs = "needs a GPU; " if estimate.recipe.method == "offload" else ""
        advice = f"{needs}mock data: replace the last line by your own, and leave out -mock in --save and --load"
    return f"{show_figures(estimate)}\n\ncommand ({advice})\n{command_of(estimate)}"


def show_figures(estimate: Estimate) -> str:
    """Recipe, memory, time, cost."""
    recipe = estimate.recipe
    nodes = f"{recipe.num_nodes} node{'s' if recipe.num_nodes > 1 else ''} of {recipe.gpus_per_node}"
    settings = (
        f"{_layout(recipe)}, {recipe.precision}, sequence {recipe.tokens:,}, global batch {recipe.global_batch_size} "
        f"({recipe.num_microbatches} microbatches)"
    )
    if recipe.method == "finetune" and recipe.task == "sft":
        settings = f"{textwrap.fill(settings, _WIDTH)}\n{reason_for_rule(recipe)}"
    else:
        settings = textwrap.fill(settings, _WIDTH)
    return (
        f"{recipe.model.name}: {estimate.parameters:,} parameters, {recipe.name}, on {_groups(recipe)}"
        f"{recipe.num_gpus} x {recipe.cluster.gpu} ({nodes})\n{settings}\n\n"
        f"memory per rank, GiB (of {recipe.cluster.memory_gib:g})\n{_memory(estimate)}\n\n"
        f"time of an iteration, ms\n{_time(estimate)}\n\n{_cost(estimate)}\n{learning_rate(recipe).text}"
    )


def _groups(recipe: Recipe) -> str:
    return f"{recipe.replica_groups} replica groups of " if recipe.replica_groups > 1 else ""


def _layout(recipe: Recipe) -> str:
    partition = recipe.partition
    context = f" x context {recipe.context_size}" if recipe.context_size > 1 else ""
    parts = [f"pipeline {recipe.pipeline_size}{context} x data {recipe.data_size}"]
    if recipe.has_blocks and recipe.asked_blocks != 0:
        parts.append(f"{partition.num_blocks} block{'s' if partition.num_blocks > 1 else ''} ({partition.layout})")
    if partition.num_chunks > 1:
        parts.append(f"{partition.num_chunks} chunks a stage")
    if recipe.cut == "auto":
        parts.append("cut by work")
    if recipe.is_streamed:
        kept = f", {recipe.resident_layers} stay on the device" if recipe.resident_layers else ""
        parts.append(f"frozen layers in host memory{kept}")
    if recipe.has_blocks and not recipe.is_factored and (head := partition.describe_head()):
        moments = "" if recipe.adam_moments_dtype == "fp32" else f", moments in {recipe.adam_moments_dtype}"
        parts.append(f"{head}{moments}")
    parts.append(f"micro-batch {recipe.micro_batch_size}")
    if recipe.has_linear_loss:
        parts.append("loss without logits")
    if recipe.recompute != "none":
        parts.append(f"recomputation {recipe.recompute}")
    return ", ".join(parts)


def _memory(estimate: Estimate) -> str:
    ranks = sorted(estimate.ranks, key=lambda rank: rank.total)[-_MOST_ROWS:]
    rows = []
    for rank in sorted(ranks, key=lambda rank: (rank.stage, rank.block)):
        figures = (*(getattr(rank, name) for name in _MEMORY), rank.total)
        rows.append((str(rank.stage), str(rank.block), *(f"{figure / GIB:.2f}" for figure in figures)))
    columns = ("stage", "block", *(name.replace("_", " ") for name in _MEMORY), "peak")
    lines = [table(columns, rows, num_left=0)]
    if len(ranks) < len(estimate.ranks):
        lines.append(f"the {len(ranks)} largest of {len(estimate.ranks)}")
    lines.append("peak: model state and framework, and the larger of activations with communication and optimizer work")
    if estimate.host_bytes:
        lines.append(f"on the host, per rank: {estimate.host_bytes / GIB:.1f} GiB")
        lines += _host_warning(estimate)
    largest, peak = estimate.largest_micro_batch, estimate.peak
    where = f"{peak.total / GIB:.1f} GiB on stage {peak.stage} in the phase of block {peak.block}"
    if estimate.fits:
        lines.append(f"fits: {where}; the largest micro-batch that fits is {largest}")
    elif not fits_on_host(estimate.recipe):
        recipe = estimate.recipe
        need = f"a node needs {recipe.gpus_per_node * estimate.host_bytes / 1e9:,.0f} GB of host memory"
        lines.append(f"does NOT fit: {need}, more than --host-memory-gb {recipe.host_memory_gb:g}")
    else:
        what = f"micro-batch {largest} would fit" if largest else "no micro-batch fits"
        lines.append(f"does NOT fit: {where}; {what}")
    return "\n".join(lines)


def memory_here() -> int:
    """Return the bytes of host memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _host_warning(estimate: Estimate) -> list[str]:
    """Return a line if a node needs more host memory than this machine has, or many others. --host-memory-gb says what
    there is."""
    recipe, here = estimate.recipe, memory_here()
    need = recipe.gpus_per_node * estimate.host_bytes
    limits = {f"this machine's {here / 1e9:,.0f} GB": here, f"{_USUAL_HOST_GB} GB": 1e9 * _USUAL_HOST_GB}
    passed = " and ".join(name for name, limit in limits.items() if need > limit)
    if not passed or recipe.host_memory_gb is not None:
        return []
    return [f"warning: a node needs {need / 1e9:,.0f} GB of host memory, more than {passed}"]


def _time(estimate: Estimate) -> str:
    rows, phases = [], estimate.phases
    for phase in phases[:: -(-len(phases) // _MOST_ROWS)]:
        seconds = (phase.pipeline, phase.optimizer, phase.reductions, phase.total)
        rows.append((str(phase.block), *(f"{1e3 * second:,.0f}" for second in seconds), _percent(phase.bubble)))
    rows.append(("mean", "", "", "", f"{1e3 * estimate.iteration_seconds:,.0f}", _percent(estimate.bubble)))
    if exchange := estimate.exchange:
        seconds = exchange.seconds / exchange.interval
        rows.insert(-1, ("exchange", "", "", "", f"{1e3 * seconds:,.0f}", ""))
    share = f"{100 * estimate.full_training_share:.1f} % of the GPUs' peak"
    speed = f"{estimate.tokens_per_second:,.0f} tokens/s, as many as full training at {share}"
    if estimate.recipe.is_streamed:
        speed += f"; {_percent(estimate.copy_share)} of the time are copies of frozen layers that no computation hides"
    if exchange:
        speed += (
            f"\nevery {exchange.interval} steps replica groups exchange up to {exchange.payload / 1e6:,.0f} MB a rank:"
            f" {exchange.sent / 1e9:,.2f} GB over a node's link, {exchange.seconds:,.1f} s"
        )
    return f"{table(('block', 'pipeline', 'optimizer', 'reductions', 'total', 'bubble'), rows)}\n{speed}"


def _percent(share: float) -> str:
    return f"{abs(round(100 * share)):d} %"  # rounding errors may make it less than nothing


def _cost(estimate: Estimate) -> str:
    cost, cluster = estimate.cost, estimate.recipe.cluster
    more = ""
    if not cost.is_to_full_loss:
        more = f", equal epochs; loss {_loss(finding(estimate.recipe))}"
    elif cost.multiplier != 1.0:
        more = f" x B-F multiplier {cost.multiplier:.2f} ({cost.multiplier_source})"
    tokens = f"{cost.tokens / 1e9:,.1f} G" if cost.tokens >= 1e9 else f"{cost.tokens / 1e6:,.1f} M"
    is_small = cost.gpu_hours < 100
    hours, dollars = f"{cost.gpu_hours:,.{is_small:d}f}", f"{cost.dollars:,.{2 * is_small:d}f}"
    days = f"{cost.days:,.1f} days" if cost.days >= 1 else f"{24 * cost.days:,.1f} hours"
    price = f"${dollars} (${cluster.usd_per_gpu_hour:g} per GPU hour)"
    if not cluster.usd_per_gpu_hour:
        price = f"no price known (usd_per_gpu_hour of {cluster.name} is 0)"
    return f"{tokens} tokens{more}:\n{cost.iterations:,} iterations, {days}, {hours} GPU hours, {price}"


def _loss(found: Finding) -> str:
    """Return what was measured of a method that costs equal epochs, and where."""
    return (
        "not measured" if found.loss is None else f"{found.loss} beside full training's ({found.runs}, {found.model})"
    )


def _to_full(found: Finding, ratio: float | None, *, is_to_full_loss: bool) -> str:
    """Return a cost over full training's, or why there is none."""
    if is_to_full_loss:
        return "-" if ratio is None else f"{ratio:.2f}"
    if found.loss is None:
        return "not measured"
    missed = "not always " if found.loss.startswith("-") else "not "
    return f"{missed if '+' in found.loss else ''}reached (measured: {found.loss})"


def show_search(recipe: Recipe, found: Sequence[Estimate], ratios: Sequence[float | None]) -> str:
    """A line per layout, cheapest first, and what the figures rest on. `ratios`: costs over full training's."""
    columns = ("method", "GPUs", "PP x DP", "blocks", "micro", "recompute", "GiB", "host", "s/step", "B-F", "days")
    rows, sources = [], {}
    for each, ratio in zip(found, ratios, strict=True):
        one, cost, name, seen = each.recipe, each.cost, each.recipe.name, finding(each.recipe)
        partition = one.partition
        blocks = f"{partition.num_blocks} {partition.layout}" if one.has_blocks and one.asked_blocks != 0 else "-"
        figures = (each.peak.total / GIB, each.host_bytes / GIB, each.iteration_seconds)
        if not cost.is_to_full_loss:
            sources[name] = f"{name}, at equal epochs: loss {_loss(seen)}"
        elif one.method in MULTIPLIERS:
            sources[name] = f"B-F multiplier of {name}: {cost.multiplier_source}"
        rows.append(
            (
                name,
                str(one.num_gpus),
                f"{one.pipeline_size} x {one.data_size}",
                blocks,
                str(one.micro_batch_size),
                one.recompute,
                *map(format, figures, (".1f", ".0f", ".2f")),
                f"{cost.multiplier:.2f}" if cost.is_to_full_loss else "-",
                f"{cost.days:,.1f}",
                f"{cost.gpu_hours:,.0f}",
                f"{cost.dollars:,.0f}" if cost.dollars else "unknown",
                _to_full(seen, ratio, is_to_full_loss=cost.is_to_full_loss),
            )
        )
    title = (
        f"{recipe.model.name} on {recipe.num_gpus} x {recipe.cluster.gpu}, {recipe.precision}, sequence "
        f"{recipe.tokens:,}, global batch {recipe.global_batch_size}: the cheapest layouts, best first"
    )
    notes = [
        "GPUs: those asked for, and the fewest that fit; host: GiB of host memory per GPU",
        "to full: cost to full training's loss over the least of full training",
        *sources.values(),
        "blocks, layout and chunks decide which layers learn together: they change what is learned",
        "times are estimates, and multipliers and losses have errors too: docs/planner.md, docs/fine_tuning.md",
    ]
    return "\n".join([title, table((*columns, "GPU hours", "dollars", "to full"), rows), *notes])


def show_paper(paper: Paper) -> str:
    """Every cell that was recomputed, and what was fitted."""
    rows, notes = [], ["note"]
    for cell in paper.cells:
        if cell.recomputed is not None and cell.difference is not None:
            figures = (f"{cell.published:.3f}", f"{cell.recomputed:.3f}", f"{cell.difference:+.3f}")
            rows.append((str(cell.table), cell.row, cell.column, *figures))
            notes.append(cell.note)
    columns = ("table", "row", "column", "published", "recomputed", "difference")
    body, cluster = table(columns, rows, num_left=3).splitlines(), paper.cluster
    errors = (f"table {number} {100 * paper.mean_error(number):.1f} %" for number in (4, 15, 16, 3))
    return "\n".join(
        [
            *(f"{line}  {note}" for line, note in zip(body, notes, strict=True)),
            "",
            f"difference: published less recomputed. {len(paper.cells) - len(rows)} further cells (layers, sizes, "
            "numbers of GPUs) are settings and were taken as given.",
            f"Times: fitted on {' and '.join(FITTED_MODELS)} alone (tables 4, 15, 16; 8 cells): share of the peak "
            f"{cluster.compute_share:.3f}, share of the memory bandwidth {cluster.memory_share:.3f};",
            f"offload: on the same two models in table 3, {cluster.host_gb_per_s:.1f} GB/s through the host.",
            f"Mean absolute error of the times that no fit has seen: {', '.join(errors)}",
        ]
    )


@command(PROG)
def main(argv: list[str]) -> int:
    arguments = parse_arguments(argv)
    text, values, code = answer_to(arguments)
    write_figures(arguments.json, values, lambda: print(text))
    return code


if __name__ == "__main__":
    run_main(main)
