"""Estimate a run before it starts: does a model fit on these GPUs, how fast does it train, what does it cost?

    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --method bcd --bcd-num-blocks 3
    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --bcd-preset pretrain
    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --search
    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --compare

Nothing runs: memory and time follow from formulas and from the tables examples/models.csv and examples/clusters.csv,
which you can edit. See docs/planner.md.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _parser import Parser, add_json, command, run_main, table, write_figures
from _records import EPOCHS, counted, with_records
from board_views import View, bars, write_page

from megatron.bcd.config import BcdConfig, TrainingConfig
from megatron.bcd.config.presets import PRESETS
from megatron.bcd.config.sections import dashed
from megatron.bcd.huggingface.architecture import CONFIG, TRANSFORMERS
from megatron.bcd.pipeline.build import host_passes, kept_passes, repeated_passes
from megatron.bcd.planner.command import torchrun_command
from megatron.bcd.planner.cost import PRECISIONS
from megatron.bcd.planner.estimate import EQUAL_STEPS, Estimate
from megatron.bcd.planner.findings import (
    EXPERTS_SOURCE,
    EXPERTS_TIME,
    finding,
    learning_rate,
)
from megatron.bcd.planner.memory import fits, fits_on_host, host_bytes, node_bytes, saving_bytes
from megatron.bcd.planner.recipe import DEFAULTS, METHODS, PRESET_OF, STREAMED, WHOLE, Recipe
from megatron.bcd.planner.search import (
    BLOCK_FLAGS,
    COMPARED,
    OF_BLOCKS,
    compare,
    first_allowed,
    place,
    remedies,
    search,
)
from megatron.bcd.planner.tables import (
    GIB,
    Cluster,
    Model,
    choose,
    read_table,
)

PROG = "tools/plan.py"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODELS = os.path.join(ROOT, "examples", "models.csv")
CLUSTERS = os.path.join(ROOT, "examples", "clusters.csv")
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_WIDTH = 120
_MOST_ROWS = 12
"""The most rows of the tables of ranks and phases."""
_MEMORY = ("weights", "gradients", "optimizer", "chunks", "activations", "optimizer_work", "communication", "framework")
LONGEST_DEFAULT = 2048
"""The default length of sequences is config.json's, but at most this."""
SFT_DEFAULTS = {"seq_length": 1024, "global_batch_size": 8} | {"micro_batch_size": None}
"""The defaults of --task sft. None: `search.place` chooses."""
_NUMBER: dict[str, Any] = {"type": int, "metavar": "N"}
RECIPE_FLAGS: dict[str, dict[str, Any]] = {
    "num_gpus": _NUMBER | {"help": "number of GPUs"},
    "bcd_num_blocks": {"help": "number of blocks (default: 3, with finetune the fewest that fit; --search tries 2 to 6"
        " with method bcd)"},
    "bcd_layout": {},
    "bcd_frozen": {},
    "bcd_always_active": {},
    "bcd_head_phase": {},
    "bcd_inactive_update": {"choices": ("none", *WHOLE.values()), "help": "with method finetune: orthogonal, factored ="
        " every layer in every step, none = blocks (default: factored if it fits and no flag asks for blocks)"},
    "adam_moments_dtype": {},
    "muon_momentum_dtype": {},
    "muon_gram_iteration": {},
    "fp16_accumulation": {},
    "bcd_layers_on": {"choices": ("device", "host"), "help": "where inactive layers are (default: device)"},
    "bcd_resident_layers": {},
    "bcd_schedule": {"choices": ("bcd", "breadth-first")},
    "bcd_layers_per_pass": {},
    "bcd_saved_inputs": {"choices": ("device", "host"), "help": "with breadth-first: where inputs of chunks wait for"
        " the backward pass (default: device)"},
    "bcd_saved_activations": {"choices": ("auto", "recompute", "device", "host"), "help": "with breadth-first: device,"
        " host = no forward pass is repeated, auto = as few as fit (default: auto)"},
    "bcd_passes_on_host": {"help": "with auto: passes whose activations wait in host memory (default: the fastest)"},
    "bcd_main_params": {},
    "host_memory_gb": {"type": float, "metavar": "GB", "help": "host memory of a node in 10^9 bytes; a plan that needs"
        " more does not fit (default: this machine's)"},
    "pipeline_model_parallel_size": _NUMBER | {"help": "(default: the smallest that fits; --search tries all)"},
    "context_parallel_size": _NUMBER | {"help": "(default: 1)"},
    "micro_batch_size": _NUMBER | {"help": "(default: 1, with experts the largest that fits; --search tries powers of"
        " two)"},
    "global_batch_size": _NUMBER | {"default": DEFAULTS["global_batch_size"], "help": "(default: 64)"},
    "seq_length": _NUMBER | {"help": f"(default: the model's, of a config.json at most {LONGEST_DEFAULT:,})"},
    "recompute": {"choices": ("none", "full", "auto"), "nargs": "?", "const": "full", "help": "auto: on each"
        " stage and in each phase the least that fits; the bare flag means full (default: none, without a method the"
        " least that fits; --search tries none, auto)"},
    "cross_entropy_fusion_impl": {"choices": ("native", "linear"), "help": "linear: logits of a few tokens at a time"
        " (default: a loss that is not fused)"},
    "pipeline_cut": {"help": "auto: the head counts as layers (default: even; --search tries both)"},
    "num_virtual_stages_per_pipeline_rank": {},
}  # fmt: skip
"""Flags of a recipe. The training script has most of them: its types, choices and help hold where none are here."""


def build_parser(task: str = "pretrain") -> argparse.ArgumentParser:
    parser = Parser(prog=PROG, usage=f"{PROG} --model NAME --gpu NAME --num-gpus N [flags]", description=__doc__)
    add = parser.add_argument
    add("--model", metavar="NAME", help="a config.json, the folder that holds one, or a row of the model table")
    add("--gpu", metavar="NAME", help="a row of the cluster table")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--search", action="store_true", help="compare all methods, each in its cheapest layouts that fit, and plan the"
        " best; with --method or --bcd-preset compare the layouts of that one")  # fmt: skip
    add("--compare", action="store_true", help="compare all methods, without a plan")
    add("--html", metavar="FILE", help="write the plan and all methods side by side as a page (docs/board.md)")
    add_json(parser)
    group = parser.add_argument_group("recipe", "same names as the training script's flags")
    add = group.add_argument
    add("--task", choices=tuple(COMPARED), default="pretrain", help="sft: fine-tune a published model on records; by"
        " default with method finetune, packed sequences of 1,024 tokens, global batch 8, three epochs of Alpaca,"
        " and whatever saves memory if needed: recomputation, a linear loss, layers in host memory (default: pretrain)"
        )  # fmt: skip
    add("--method", choices=METHODS, help="bcd: block coordinate descent as in the paper; pretrain, finetune: with that"
        " --bcd-preset; full: full training; offload: full training with the optimizer on the host; muon: full training"
        " with Muon (default: muon if it fits and no flag asks for blocks, else pretrain; with --task sft finetune)"
        )  # fmt: skip
    add("--bcd-preset", choices=tuple(PRESETS), help="the method of that name; paper is --method bcd")
    add_recipe_flags(group)
    group = parser.add_argument_group("cost")
    add = group.add_argument
    add("--tokens", type=token_count, metavar="N", help="tokens that full training would read, such as 300M, 1B or 1e9"
        " (default: 20 per parameter)")  # fmt: skip
    add("--data", metavar="FILE", help="with --task sft: plan three epochs of these records in place of Alpaca's,"
        " counted with the tokenizer in --model's folder")  # fmt: skip
    add("--sft-ignore-keys", nargs="*", metavar="KEY", help="keys of --data that the training leaves out")
    if task == "sft":
        parser.set_defaults(**SFT_DEFAULTS)
    return parser


def add_recipe_flags(group: Any) -> None:
    """Add the flags that tools/recipe.py also has: ranks, batch, blocks and memory savings."""
    options = {each.name: each for kind in (BcdConfig, TrainingConfig) for each in fields(kind)}
    types = {"int": int, "float": float, "str": str}
    for name, words in RECIPE_FLAGS.items():
        if name in options:
            option = options[name]
            kind = str(option.type).partition(" ")[0]
            known = {key: option.metadata[key] for key in ("choices", "metavar", "help") if option.metadata[key]}
            words = ({"action": "store_true", "default": None} if kind == "bool" else {"type": types[kind]}) | words
            words = ({"metavar": "N"} if kind == "int" else {}) | known | words
        group.add_argument(dashed(name), **words)
    add = group.add_argument
    add("--precision", choices=PRECISIONS, default="bf16", help="(default: bf16)")
    for name in PRECISIONS:
        if name != "fp32":
            text = f"the same as --precision {name}"
            add(f"--{name}", dest="precision", action="store_const", const=name, help=text)
    add("--models", metavar="FILE", help="your own rows, which win over those of examples/models.csv")
    add("--clusters", metavar="FILE", default=CLUSTERS, help="the cluster table")
    add("--network-gbit", type=float, metavar="RATE", help="a node's link to others in 10^9 bits per second (default:"
        " the cluster table's)")  # fmt: skip


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Raises ValueError for an unknown or missing flag, or an invalid value."""
    task = build_parser().parse_args(argv).task
    return with_records(build_parser(task).parse_args(argv))


def token_count(text: str) -> float:
    """Read a number such as 1e9, 300M or 1B."""
    unit = _UNITS.get(text[-1:].upper())
    try:
        return float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number. Give one such as 300M, 1B or 1e9.") from None


def is_open(arguments: argparse.Namespace) -> bool:
    """Return whether the planner chooses what saves memory: in fine-tuning, and where no method is given."""
    return arguments.task == "sft" or not (arguments.method or arguments.bcd_preset)


def methods_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return --method, that of --bcd-preset, or the methods to try by default. Raises ValueError if they differ."""
    method, preset = arguments.method, arguments.bcd_preset
    if method is None and preset is None:
        if arguments.task == "sft":
            return ("finetune",)
        if arguments.precision == "fp16":  # inactive updates and Muon have no loss scale
            return ("bcd",)
        blocks_alone = OF_BLOCKS if arguments.bcd_layers_on == "host" else BLOCK_FLAGS
        is_given = any(getattr(arguments, name) is not None for name in blocks_alone)
        return ("pretrain",) if is_given else ("muon", "pretrain")
    if preset is None:
        return (method,)
    # --method bcd also goes with every preset
    if method not in (None, "bcd") and PRESET_OF.get(method) != preset:
        raise ValueError(f"--bcd-preset {preset}: cannot be combined with --method {method}. Give one of them.")
    return (next(name for name, known in PRESET_OF.items() if known == preset),)


def named_model(name: str, *, models: str | None, sequence: int | None = None) -> Model:
    """Return the model of a config.json or its folder, else the row of that name in `models` or the default table.

    Layers that Megatron Core cannot express are measured in sequences of `sequence` tokens.
    """
    if name.endswith(".json") or os.path.isfile(os.path.join(name, CONFIG)):
        from megatron.bcd.huggingface.folder import read_architecture  # slow: it imports torch
        from megatron.bcd.huggingface.measure import read_model

        network = read_architecture(name, is_quantised=True)
        flags = {**network.defaults, **network.flags}
        tokens = sequence or min(flags["max_position_embeddings"], LONGEST_DEFAULT)
        is_gpt, path = network.family == "gpt2", Path(name).resolve()
        return Model(
            name=(path.parent if path.name == CONFIG else path).name.removesuffix(".json"),
            form="gpt" if is_gpt else "llama",
            layers=flags["num_layers"],
            hidden=flags["hidden_size"],
            heads=flags["num_attention_heads"],
            groups=flags.get("num_query_groups", flags["num_attention_heads"]),
            ffn=flags["ffn_hidden_size"],
            vocabulary=network.config.vocab_size,
            sequence=tokens,
            source=name,
            head_dim=flags["kv_channels"],
            tied=not flags["untie_embeddings_and_output_weights"],
            biases="all" if flags["add_bias_linear"] else "qkv" if flags.get("add_qkv_bias") else "none",
            qk_norm=flags.get("qk_layernorm", False),
            positions=network.max_positions if is_gpt else 0,
            experts=flags.get("num_moe_experts") or 0,
            experts_per_token=flags.get("moe_router_topk", 2),
            expert_ffn=flags.get("moe_ffn_hidden_size", 0),
            measured=read_model(name, sequence=tokens) if network.family == TRANSFORMERS else None,
        )
    rows = read_table(MODELS, Model) | (read_table(models, Model) if models else {})
    try:
        return choose(rows, name, flag="--model")
    except ValueError as error:
        is_folder = os.path.isdir(name)
        if is_folder or "/" in name:
            what = f"the folder has no {CONFIG}" if is_folder else "there is no such folder"
            remedy = "Give the folder of a model in Hugging Face's format."
            if not is_folder and name.count("/") == 1 and name[0] not in "/.":
                remedy = f"Give a folder: hf download {name} --local-dir FOLDER (for a plan {CONFIG} is enough)."
            raise ValueError(f"--model {name}: {what}. {remedy}") from None
        raise ValueError(
            f"{error}. Or give a {CONFIG}, its folder, or a row of your own with --models FILE "
            f"(columns as in examples/models.csv; docs/planner.md has the optional ones)."
        ) from None


def cluster_of(arguments: argparse.Namespace) -> Cluster:
    """Return the row of the cluster table, with --network-gbit."""
    cluster = choose(read_table(arguments.clusters, Cluster), arguments.gpu, flag="--gpu")
    if (rate := arguments.network_gbit) is None:
        return cluster
    if rate <= 0:
        raise ValueError(f"--network-gbit {rate:g}: must be more than 0")
    return replace(cluster, network_gb_per_s=rate / 8)


def recipe_values(arguments: argparse.Namespace, method: str) -> dict[str, Any]:
    """Return the values for `make_recipe`; None for values that were not given.

    Raises ValueError for an unknown name, or for a flag that has no effect.
    """
    if method not in PRESET_OF:
        is_streamed = method in STREAMED.values() and arguments.bcd_layers_on == "host"
        for name in set(OF_BLOCKS if is_streamed else BLOCK_FLAGS) - {"bcd_num_blocks"}:
            if (value := getattr(arguments, name)) is not None:
                raise ValueError(f"{dashed(name)} {value}: --method {method} has no blocks. Leave it out.")
    limit = arguments.host_memory_gb
    return {name: getattr(arguments, name) for name in (*RECIPE_FLAGS, "precision", "task")} | {
        "host_memory_gb": memory_here() / 1e9 if limit is None else limit,
        "model": named_model(arguments.model, models=arguments.models, sequence=arguments.seq_length),
        "cluster": cluster_of(arguments),
        "method": method,
    }


def require_names(arguments: argparse.Namespace) -> None:
    """Raise ValueError if model, GPU or their number is missing."""
    for name in ("model", "gpu", "num_gpus"):
        if getattr(arguments, name) is None:
            raise ValueError(f"{dashed(name)}: is required")


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """Return the planned recipe of the flags. Raises ValueError naming a missing or invalid flag."""
    require_names(arguments)
    *others, method = methods_of(arguments)
    for other in others:
        if fits(recipe := place(**recipe_values(arguments, other))):
            return recipe
    return planned(is_open=is_open(arguments), **recipe_values(arguments, method)).checked()


def searched_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the values for --search and --compare, which choose micro-batch and recomputation.

    Raises ValueError naming a missing or invalid flag.
    """
    require_names(arguments)
    *others, method = methods_of(arguments)
    values = recipe_values(arguments, "bcd" if others else method)
    values |= {"recompute": None, "micro_batch_size": None}
    first_allowed(values).checked()
    return values


def planned(*, is_open: bool = False, **values: Any) -> Recipe:
    """Return the recipe of these values with the planner's choice of those that are open. It may have a fault."""
    return place(is_open=is_open or values["task"] == "sft" or values["method"] == "finetune", **values)


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Return values as words of a command line, without those that are None."""
    words = []
    for name, value in values.items():
        if value is not None:
            words.append(dashed(name))
            if value is not True:
                items = value if isinstance(value, list) else [value]
                words += [f"{item:g}" if isinstance(item, float) else str(item) for item in items]
    return words


Answer = tuple[str, Any, int]
"""Text for people, plain values for programs, and the exit code, which is 1 if a plan does not fit."""


def answer_to(arguments: argparse.Namespace) -> Answer:
    """Return the answer to a command line. Raises ValueError for a user's mistake."""
    is_one_method = bool(arguments.method or arguments.bcd_preset)
    if arguments.compare and is_one_method:
        raise ValueError("--compare: shows all methods. Leave out --method and --bcd-preset.")
    if arguments.compare or arguments.search:
        values, find = searched_values(arguments), search if is_one_method else compare
        return answer_search(arguments, first_allowed(values), find(values, tokens=arguments.tokens))
    recipe = recipe_of(arguments)
    estimate = Estimate(recipe=recipe, tokens=arguments.tokens)
    data = estimate.as_dict()
    if estimate.fits:
        return (
            reason_for_method(arguments, recipe) + show_estimate(estimate),
            data | {"command": command_of(estimate)},
            0,
        )
    text, others = what_fits(arguments)
    return f"{show_figures(estimate)}\n\n{text}", data | {"command": None, "what_fits": others}, 1


def reason_for_method(arguments: argparse.Namespace, recipe: Recipe) -> str:
    """Return in a line why a plan without --method is full Muon or has blocks."""
    reasons = {"muon": "full Muon, which fits", "pretrain": "blocks: full Muon does not fit, or flags ask for blocks"}
    if arguments.task == "sft" or not is_open(arguments) or recipe.method not in reasons:
        return ""
    return f"{reasons[recipe.method]} (README, Which method for whom; --method chooses another)\n"


def answer_search(arguments: argparse.Namespace, recipe: Recipe, estimates: Sequence[Estimate]) -> Answer:
    """Return the layouts, best first. Without --compare, also return the plan of the best one on these GPUs."""
    if not estimates:
        text, others = what_fits(arguments)
        head = f"no layout of {recipe.model.name} with --method {recipe.method} fits on {recipe.num_gpus} x "
        return f"{head}{recipe.cluster.gpu}\n{text}", {"best": [], "what_fits": others}, 1
    full = min((each.cost.gpu_hours for each in estimates if each.recipe.name == "full"), default=None)
    ratios = [full and each.cost.gpu_hours / full if each.cost.is_to_full_loss else None for each in estimates]
    rows = [each.as_dict() | {"cost_ratio": ratio} for each, ratio in zip(estimates, ratios, strict=True)]
    text = show_search(recipe, estimates, ratios)
    if arguments.compare:
        return "\n".join([text, *what_to_take(recipe, estimates)]), rows, 0
    # nothing is known of the loss of a method that was not measured
    known = [each for each in estimates if each.cost.is_to_full_loss or finding(each.recipe).loss] or estimates
    best = next((each for each in known if each.recipe.num_gpus == recipe.num_gpus), None)
    if best is None:
        first = known[0].recipe
        changes = {"num_gpus": first.num_gpus, "global_batch_size": first.global_batch_size}
        command = f"{changed_command(arguments, changes)} --search"
        text = f"{text}\n\nno method fits on {recipe.num_gpus} GPUs; plan the best with\n{command}"
        return text, {"best": None, "methods": rows}, 1
    text = f"{text}\n\nthe best on {recipe.num_gpus} GPUs\n\n{show_estimate(best)}"
    plan = best.as_dict() | {"command": command_of(best)}
    return text, {"best": plan, "methods": rows}, 0


def what_to_take(recipe: Recipe, estimates: Sequence[Estimate]) -> list[str]:
    """Return for each purpose in pretraining its row of --compare, on the given GPUs if there is one. Methods that lose
    everywhere (README, Which method for whom) are none."""
    lines = []
    for purpose, methods, figure in (
        ("the lowest loss for the money, from scratch", ("muon",), lambda each: each.cost.gpu_hours),
        ("the least memory in as many steps", ("muon", "pretrain"), lambda each: each.peak.total),
        ("reproducing the paper", ("bcd",), lambda each: each.cost.gpu_hours),
    ):
        rows = [each for each in estimates if each.recipe.method in methods] if recipe.task == "pretrain" else []
        rows = [each for each in rows if each.recipe.num_gpus == recipe.num_gpus] or rows
        if rows:
            best: Estimate = min(rows, key=figure)
            flags = {"method": "muon"} if best.recipe.method == "muon" else {"bcd_preset": best.recipe.name}
            momentum = best.recipe.config.bcd.muon_momentum_dtype
            if best.recipe.is_streamed:
                flags |= {"bcd_layers_on": "host", "muon_momentum_dtype": momentum, "adam_moments_dtype": "int8"}
            words = " ".join(words_of(flags | {"num_gpus": best.recipe.num_gpus}))
            lines.append(f"for {purpose}: {words}, {price(best)}, {best.peak.total / GIB:.1f} GiB")
            if best.recipe.method == "muon" and momentum != "int8":
                lines[-1] += "; less with --muon-momentum-dtype int8"
    return ["", "what to take (--search and these flags plan it)", *lines] if lines else []


def what_fits(arguments: argparse.Namespace) -> tuple[str, list[dict[str, str]]]:
    """Return changed flags with which the plan fits, and the planner's command for each."""
    values = recipe_values(arguments, methods_of(arguments)[-1])
    values["recompute"] = arguments.recompute or (None if is_open(arguments) else "none")
    rows, data = [], []
    for changes, recipe in remedies(values, planned):
        if "method" in changes:
            changes["bcd_preset"] = None
        flags, command = " ".join(words_of(changes)), changed_command(arguments, changes)
        data.append({"flags": flags, "command": command})
        estimate = Estimate(recipe=recipe)
        figures = (f"{estimate.peak.total / GIB:.1f}", f"{estimate.tokens_per_second:,.0f}")
        rows.append((flags, str(recipe.num_gpus), f"{recipe.pipeline_size} x {recipe.data_size}", *figures))
    if not data:
        return "nothing fits on any number of these GPUs. Take a smaller model or a GPU with more memory.", []
    fitting = table(("with", "GPUs", "PP x DP", "GiB", "tokens/s"), rows)
    loss = "docs/planner.md, What fits, says what each costs in loss"
    return f"what fits\n{fitting}\n{loss}\nplan the first with\n{data[0]['command']}", data


def changed_command(arguments: argparse.Namespace, changes: Mapping[str, Any]) -> str:
    """Return the planner's command for the same flags, with some other values."""
    default = build_parser(arguments.task).get_default
    flags = {
        name: value
        for name, value in vars(arguments).items()
        if (value != default(name) or name == "task" and value == "sft")
        and (value is not True or name in ("bcd_head_phase", "muon_gram_iteration"))
        and name not in ("json", "html", "tokens" if arguments.data else "")
    }
    return shlex.join(["python", PROG, *words_of({**flags, **changes})])


def command_of(estimate: Estimate) -> str:
    """Return the command that starts the training."""
    return torchrun_command(estimate.recipe, iterations=estimate.cost.iterations)


def plan_view(arguments: argparse.Namespace) -> View:
    """Return the answer to a command line of tools/plan.py, and the methods side by side."""
    estimate = Estimate(recipe=recipe_of(arguments), tokens=arguments.tokens)
    every = argparse.Namespace(**vars(arguments) | {"method": None, "bcd_preset": None})
    try:
        estimates, reason = compare(searched_values(every), tokens=arguments.tokens), ""
    except ValueError as error:  # a flag that only the planned method has, or nothing fits
        estimates, reason = [], str(error)
    return {
        "estimate": estimate,
        "sentence": sentence(estimate, arguments),
        "quality": quality(estimate),
        "bars": bars(estimate),
        "figures": show_figures(estimate),
        "methods": [(each, bars(each)[0], quality(each), node_bytes(each.recipe) / 1e9) for each in estimates],
        "duration": duration,
        "price": price,
        "reason": reason,
        "command": command_of(estimate) if estimate.fits else "",
        "remedies": [] if estimate.fits else what_fits(arguments)[1],
    }


def sentence(estimate: Estimate, arguments: argparse.Namespace) -> str:
    recipe, number, host = estimate.recipe, estimate.recipe.num_gpus, node_bytes(estimate.recipe)
    cards = f"{'one' if number == 1 else number} {recipe.cluster.gpu}{'s' * (number > 1)}"
    what, blocks = "every layer trained", recipe.partition.num_blocks
    if recipe.is_whole:
        what += " in every step"
    elif recipe.has_blocks and blocks > 1:
        what += f", one of {blocks} blocks at a time"
    if not estimate.fits:
        return f"{recipe.model.name}, {what}: does not fit {cards}."
    memory = f" and {host / 1e9:,.0f} GB of host memory" if host >= 1e9 else ""
    length = f"{amount(estimate.cost.tokens)} tokens"
    if recipe.task == "sft" and (arguments.data or arguments.tokens is None):
        length = f"three epochs of {arguments.data or 'Alpaca'}"
    return (
        f"{recipe.model.name}: {what}, fits {cards}{memory}, {estimate.tokens_per_second:,.0f} tokens/s, "
        f"{duration(estimate)} and {price(estimate)} for {length}."
        + (f" It has {counted(arguments).text}." if arguments.data else "")
    )


def quality(estimate: Estimate) -> tuple[str, str]:
    """Return a method's loss or number of iterations beside full training's, and where it was measured."""
    result, cost = finding(estimate.recipe), estimate.cost
    if cost.multiplier_source == EQUAL_STEPS:
        return EQUAL_STEPS, "docs/learning.md"
    if cost.is_to_full_loss:
        return f"{cost.multiplier:.2f} x full training's iterations to its loss", cost.multiplier_source
    if not result.loss:
        return "loss not measured", ""
    loss, _, source = result.describe_loss(estimate.recipe).partition(", ")
    return f"loss {loss}", source


def show_estimate(estimate: Estimate) -> str:
    """Show recipe, memory, time, cost and the command of a plan that fits."""
    if estimate.recipe.task == "sft":
        advice = "replace MODEL_DIR, DATA.jsonl and OUT_DIR by your own"
    else:
        needs = "needs a GPU; " if estimate.recipe.method == "offload" else ""
        advice = f"{needs}mock data: replace the last line by your own, and leave out -mock in --save and --load"
    return f"{show_figures(estimate)}\n\ncommand ({advice})\n{command_of(estimate)}"


def show_figures(estimate: Estimate) -> str:
    """Show recipe, memory, time and cost."""
    recipe = estimate.recipe
    nodes = f"{recipe.num_nodes} node{'s' if recipe.num_nodes > 1 else ''} of {recipe.gpus_per_node}"
    settings = (
        f"{_layout(recipe)}, {recipe.precision}, sequence {recipe.tokens:,}, global batch {recipe.global_batch_size} "
        f"({recipe.num_microbatches} microbatches)"
    )
    settings = textwrap.fill(settings, _WIDTH)
    if recipe.method == "finetune":
        settings += f"\n{reason_for_rule(recipe)}"
    return (
        f"{recipe.model.name}: {recipe.num_parameters:,} parameters, {recipe.name}, on "
        f"{recipe.num_gpus} x {recipe.cluster.gpu} ({nodes})\n{settings}\n\n"
        f"memory per rank, GiB (of {recipe.cluster.memory_gib:g})\n{_memory(estimate)}\n\n"
        f"time of an iteration, ms\n{_time(estimate)}\n\n{_cost(estimate)}\n{learning_rate(recipe)[1]}"
    )


def reason_for_rule(recipe: Recipe) -> str:
    """Return in one line why a plan of preset finetune has blocks or not."""
    if recipe.is_whole:
        return f"every layer in every step by the {recipe.config.bcd.bcd_inactive_update} update: no blocks"
    return "blocks: flags ask for them, or every layer by the factored update does not fit"


def _layout(recipe: Recipe) -> str:
    partition, config = recipe.partition, recipe.config
    context = f" x context {config.context_size}" if config.context_size > 1 else ""
    parts = [f"pipeline {recipe.pipeline_size}{context} x data {recipe.data_size}"]
    if recipe.has_blocks and partition.has_active_block:
        parts.append(f"{partition.num_blocks} block{'s' if partition.num_blocks > 1 else ''} ({partition.layout})")
    if partition.num_chunks > 1:
        parts.append(f"{partition.num_chunks} chunks a stage")
    if config.training.pipeline_model_parallel_layout is not None:
        parts.append("cut by work")
    size = config.bcd.bcd_layers_per_pass
    if config.is_breadth_first:
        parts.append(f"breadth-first in chunks of {size} layer{'s' * (size > 1)}")
        parts.append("saved inputs in host memory") if config.bcd.bcd_saved_inputs == "host" else None
        shape = recipe.memory.schedule_shape(0)
        number, kept, on_host = (len(passes(shape, 0)) for passes in (repeated_passes, kept_passes, host_passes))
        parts.append(f"{kept + on_host} of {number} forward passes not repeated") if kept + on_host else None
        parts.append(f"activations of {on_host} of them in host memory") if on_host else None
    if recipe.is_streamed:
        resident = config.bcd.bcd_resident_layers
        what = "layers" if config.is_breadth_first else "frozen layers"
        parts.append(f"{what} in host memory" + f", {resident} stay on the device" * (resident > 0))
    parts.append(f"micro-batch {recipe.micro_batch_size}")
    if config.has_linear_loss:
        parts.append("loss without logits")
    if recipe.task == "sft" and not recipe.model.can_pack:
        parts.append("one record a sequence")
    if recipe.recompute != "none":
        parts.append(f"recomputation {recipe.recompute}")
    return ", ".join(parts)


def _memory(estimate: Estimate) -> str:
    ranks = sorted(estimate.ranks, key=lambda rank: rank.total)[-_MOST_ROWS:]
    has_chunks = estimate.recipe.config.is_breadth_first
    names, rows = [name for name in _MEMORY if name != "chunks" or has_chunks], []
    for rank in sorted(ranks, key=lambda rank: (rank.stage, rank.block)):
        figures = (*(getattr(rank, name) for name in names), rank.total)
        block = str(rank.block) if estimate.recipe.partition.num_blocks > 1 else "all"
        rows.append((str(rank.stage), block, *(f"{figure / GIB:.2f}" for figure in figures)))
    columns = ("stage", "block", *(name.replace("_", " ") for name in names), "peak")
    lines = [table(columns, rows, num_left=0)]
    if len(ranks) < len(estimate.ranks):
        lines.append(f"these are the {len(ranks)} largest of {len(estimate.ranks)}")
    lines.append("peak: model state, framework, and the larger of optimizer work and activations with communication")
    if has_chunks:
        lines.append(
            "chunks: gradients of one chunk of the model; inputs and kept activations that wait for the backward pass"
        )
    saving = f"a node needs {saving_bytes(estimate.recipe) / GIB:.1f} more to save"
    lines.append(f"host memory per rank: {host_bytes(estimate.recipe) / GIB:.1f} GiB; {saving}")
    largest, peak = estimate.largest_micro_batch, estimate.peak
    where = f"{peak.total / GIB:.1f} GiB on stage {peak.stage}{estimate.peak_phase}"
    if estimate.fits:
        lines.append(f"fits: {where}; the largest micro-batch that fits is {largest}")
    elif more := host_misfit(estimate.recipe):
        lines.append(f"does NOT fit: {more}")
    else:
        what = f"micro-batch {largest} would fit" if largest else "no micro-batch fits"
        lines.append(f"does NOT fit: {where}; {what}")
    return "\n".join(lines)


def memory_here() -> int:
    """Return the bytes of host memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_misfit(recipe: Recipe) -> str:
    """Return how much host memory a node needs, and the limit; an empty text if it has enough."""
    if fits_on_host(recipe):
        return ""
    is_here, limit = recipe.host_memory_gb == memory_here() / 1e9, recipe.host_memory_gb
    whose = f"this machine's {limit:,.0f} GB" if is_here else f"--host-memory-gb {limit:g}"
    return f"a node needs {math.ceil(node_bytes(recipe) / 1e9):,} GB of host memory, also to save, more than {whose}"


def _time(estimate: Estimate) -> str:
    rows, phases = [], estimate.phases
    for phase in phases[:: -(-len(phases) // _MOST_ROWS)]:
        seconds = (phase.pipeline, phase.optimizer, phase.reductions, phase.total)
        block = str(phase.block) if len(phases) > 1 else "all"
        rows.append((block, *(f"{1e3 * second:,.0f}" for second in seconds), _percent(phase.bubble)))
    rows.append(("mean", "", "", "", f"{1e3 * estimate.iteration_seconds:,.0f}", _percent(estimate.bubble)))
    speed = f"{estimate.tokens_per_second:,.0f} tokens/s"
    if estimate.recipe.model.experts:
        speed = f"the mean is {EXPERTS_TIME:g} times the formulas' with experts, {EXPERTS_SOURCE}\n{speed}"
    if estimate.recipe.is_streamed:
        speed += f"; {_percent(estimate.copy_share)} of the time waits for copies of layers"
    return f"{table(('block', 'pipeline', 'optimizer', 'reductions', 'total', 'bubble'), rows)}\n{speed}"


def _percent(share: float) -> str:
    return f"{abs(round(100 * share)):d} %"  # a rounding error may make it negative


def _cost(estimate: Estimate) -> str:
    cost, cluster = estimate.cost, estimate.recipe.cluster
    more = loss = ""
    if not cost.is_to_full_loss:
        more = ", equal epochs"
        loss = f"\nloss {finding(estimate.recipe).describe_loss(estimate.recipe)}"
    elif cost.multiplier != 1.0:
        more = f" x B-F multiplier {cost.multiplier:.2f} ({cost.multiplier_source})"
    elif cost.multiplier_source == EQUAL_STEPS:
        more = f", {EQUAL_STEPS}"
    hours, dollars = f"{cost.gpu_hours:,.{cost.gpu_hours < 100:d}f}", price(estimate)
    if cluster.usd_per_gpu_hour:
        dollars += f" (${cluster.usd_per_gpu_hour:g} per GPU hour)"
    else:
        dollars += f" (usd_per_gpu_hour of {cluster.name} is 0)"
    steps = f"{cost.iterations:,} iterations, {duration(estimate)}"
    return f"{amount(cost.tokens)} tokens{more}:\n{steps}, {hours} GPU hours, {dollars}{loss}"


def amount(tokens: float) -> str:
    return f"{tokens / 1e9:,.1f} G" if tokens >= 1e9 else f"{tokens / 1e6:,.1f} M"


def duration(estimate: Estimate) -> str:
    """Return how long the training takes as text."""
    days = estimate.cost.days
    return f"{days:,.1f} days" if days >= 1 else f"{24 * days:,.1f} hours"


def price(estimate: Estimate) -> str:
    """Return what the training costs as text."""
    cost = estimate.cost
    if not estimate.recipe.cluster.usd_per_gpu_hour:
        return "unknown price"
    return f"${cost.dollars:,.{2 * (cost.gpu_hours < 100)}f}"


def to_full(estimate: Estimate, ratio: float | None) -> str:
    """Return the cost relative to full training's, or the measured loss after equal epochs."""
    result = finding(estimate.recipe)
    if estimate.cost.is_to_full_loss:
        return "-" if ratio is None else f"{ratio:.2f}"
    return f"loss {result.loss_text} at {result.place_text}" if result.loss else "not measured"


def show_search(recipe: Recipe, estimates: Sequence[Estimate], ratios: Sequence[float | None]) -> str:
    """Show a line per layout, and the sources of the figures. `ratios` are costs over full training's."""
    columns = ("method", "GPUs", "PP x DP", "blocks", "micro", "recompute", "GiB", "host", "s/step", "B-F", "days")
    rows, sources = [], {}
    for each, ratio in zip(estimates, ratios, strict=True):
        layout, cost, name = each.recipe, each.cost, each.recipe.name
        partition, size = layout.partition, layout.config.bcd.bcd_layers_per_pass
        blocks = f"{partition.num_blocks} {partition.layout}"
        figures = (each.peak.total / GIB, host_bytes(each.recipe) / GIB, each.iteration_seconds)
        multiplier = f"{cost.multiplier:.2f}" if cost.is_to_full_loss else "-"
        if not cost.is_to_full_loss:
            sources[name] = f"{name}, at equal epochs: loss {finding(layout).describe_loss(layout)}"
        elif cost.multiplier_source == EQUAL_STEPS:
            sources[EQUAL_STEPS] = f"muon and pretrain: days and dollars are those of {EQUAL_STEPS} (docs/learning.md)"
        elif layout.method == "bcd":
            sources[name] = f"B-F multiplier of {name}: {cost.multiplier_source}"
        rows.append(
            (
                name,
                str(layout.num_gpus),
                f"{layout.pipeline_size} x {layout.data_size}",
                blocks if layout.has_blocks and partition.has_active_block else "-",
                str(layout.micro_batch_size),
                f"chunks of {size}" if layout.config.is_breadth_first else layout.recompute,
                *map(format, figures, (".1f", ".0f", ".2f")),
                multiplier,
                f"{cost.days:,.{1 + (cost.days < 10)}f}",
                f"{cost.gpu_hours:,.{cost.gpu_hours < 100:d}f}",
                price(each).strip("$").removesuffix(" price"),
                to_full(each, ratio),
            )
        )
    title = (
        f"{recipe.model.name} on {recipe.num_gpus} x {recipe.cluster.gpu}, {recipe.precision}, sequence "
        f"{recipe.tokens:,}, global batch {recipe.global_batch_size}: the fastest layouts"
    )
    notes = [
        "GPUs: the number given, and the fewest that fit; host: GiB of host memory per GPU",
        "order: on the given GPUs first; there by days, methods that are not known to reach full training's loss last",
        "to full: GPU hours over the least of full training; streamed: moments and momentum in 8 bits",
        *sources.values(),
        "blocks, layout and chunks decide which layers learn together, and so change the loss",
        "times, multipliers and losses are estimates with errors: docs/planner.md, docs/fine_tuning.md",
    ]
    return "\n".join([title, table((*columns, "GPU hours", "dollars", "to full"), rows), *notes])


@command(PROG)
def main(argv: list[str]) -> int:
    """Print the answer to a command line and return the exit code."""
    arguments = parse_arguments(argv)
    text, values, code = answer_to(arguments)
    if arguments.data:
        text += f"\n\n{EPOCHS} epochs of {arguments.data}: {counted(arguments).text}"
    if arguments.html:
        write_page(arguments.html, "plan", plan_view(arguments))
    write_figures(arguments.json, values, lambda: print(text))
    return code


if __name__ == "__main__":
    run_main(main)
