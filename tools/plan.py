"""Estimates before a run: does a model fit on these GPUs, how fast does it train, what does it cost?

    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --method bcd --bcd-num-blocks 3
    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --bcd-preset pretrain
    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --search
    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --compare
    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --pipelines --global-batch-size 32
    python tools/plan.py --paper

Nothing is run: memory and time follow from formulas and from the editable tables examples/models.csv and
examples/clusters.csv. --paper recomputes the tables of the paper (arXiv 2506.12037). See docs/planner.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _parser import STDOUT, Parser, add_json, add_precision, bad_input, leave_with

from megatron.bcd.blocks.schedule import describe_steps, even_phases
from megatron.bcd.config import LAYOUTS, BcdConfig
from megatron.bcd.config.presets import PRESETS
from megatron.bcd.huggingface.architecture import CONFIG, read_architecture
from megatron.bcd.planner.command import parts_of, torchrun_command
from megatron.bcd.planner.compare import COMPARED, PIPELINES, Compared, LayoutTime, compare, layout_times, name_of
from megatron.bcd.planner.cost import PRECISIONS
from megatron.bcd.planner.estimate import MULTIPLIERS, Estimate, make_estimate
from megatron.bcd.planner.memory import RankMemory, recomputation
from megatron.bcd.planner.paper import FITTED_MODELS, Paper
from megatron.bcd.planner.recipe import (
    CUTS,
    METHODS,
    MOMENTS,
    PRESET_OF,
    RECOMPUTE_CHOICES,
    VOCABULARY_MULTIPLE,
    Recipe,
)
from megatron.bcd.planner.remedies import OF_BLOCKS, remedies
from megatron.bcd.planner.search import (
    SearchResult,
    place,
    search,
    shortest_that_fits,
    valid_pipelines,
    with_fewest_blocks,
)
from megatron.bcd.planner.tables import (
    GIB,
    Cluster,
    Model,
    choose,
    columns_of,
    read_clusters,
    read_models,
    read_published,
)

PROG = "tools/plan.py"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODELS = os.path.join(ROOT, "examples", "models.csv")
CLUSTERS = os.path.join(ROOT, "examples", "clusters.csv")
SFT_DEFAULTS = {"precision": "bf16", "sequence": 1024, "global_batch_size": 8, "recompute": None}
"""By field of Recipe; recompute None: only where it does not fit without."""
_LONGEST_DEFAULT = 2048
"""Tokens of a sequence by default, where config.json allows more."""
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_FITTED_CLUSTER = "rtx4090"
_WIDTH = 120
_MOST_ROWS = 12
"""Rows of the memory table; with more ranks, only the stages with the largest and smallest peak are shown."""

# ---------------------------------------------------------------- the command line


def build_parser(task: str = "pretrain") -> argparse.ArgumentParser:
    """With the defaults of a task."""
    parser = Parser(prog=PROG, usage=f"{PROG} --model NAME --gpu NAME --num-gpus N [flags]", description=__doc__)
    add = parser.add_argument
    add("--model", metavar="NAME", help="a config.json, the folder that holds one, or a row of the model table")
    add("--gpu", metavar="NAME", help="a row of the cluster table")
    add("--num-gpus", type=int, metavar="N", help="GPUs of the run")
    add("--search", action="store_true", help="all methods side by side, each in its cheapest layouts that fit, and"
        " the plan of the best; with --method or --bcd-preset the layouts of that one")  # fmt: skip
    add("--compare", action="store_true", help="all methods side by side, without a plan")
    add("--pipelines", action="store_true", help="layouts of blocks on one pipeline (--num-gpus stages), side by side;"
        " without --model of six of the paper's models")  # fmt: skip
    add("--paper", action="store_true", help="recompute the paper's tables")
    add("--verify", action="store_true", help=f"without effect: {_VERIFY}")
    add_json(parser)
    group = parser.add_argument_group("recipe", "same names as the training script's flags")
    add = group.add_argument
    add("--task", choices=tuple(COMPARED), default="pretrain", help="sft: fine-tuning a published model on records;"
        " by default method finetune, bf16, packed sequences of 1,024 tokens, global batch 8, recomputation where"
        " needed, three epochs of Alpaca (default: pretrain)")  # fmt: skip
    add("--method", choices=METHODS, help="bcd: block coordinate descent as in the paper; pretrain, finetune: with that"
        " --bcd-preset; full training; offload: the same with the optimizer on the host (default: bcd)")  # fmt: skip
    add("--bcd-preset", choices=tuple(PRESETS), help="the method of that name; paper is --method bcd")
    add_layout_flags(group)
    add("--context-parallel-size", dest="context_size", type=int, default=1, metavar="N", help="(default: 1)")
    add("--micro-batch-size", type=int, default=1, metavar="N", help="(default: 1; --search tries powers of two)")
    add("--global-batch-size", type=int, default=64, metavar="N", help="sequences of an iteration (default: 64)")
    add("--recompute", nargs="?", const="full", choices=RECOMPUTE_CHOICES, default="none", help="auto: on each stage"
        " and in each phase the least that fits; the bare flag means full (--search tries none and auto)")  # fmt: skip
    add("--pipeline-cut", dest="cut", choices=CUTS, default="even", help="auto: the head counts as layers (--search"
        " tries both)")  # fmt: skip
    add("--num-virtual-stages-per-pipeline-rank", dest="num_chunks", type=int, metavar="V", help="chunks of a stage,"
        " with --bcd-layout interleaved (default: as many as blocks)")  # fmt: skip
    add_precision(group, PRECISIONS, more="; with --task sft bf16")
    group = parser.add_argument_group("cost")
    add = group.add_argument
    add("--tokens", type=token_count, metavar="N", help="tokens that full training would read, such as 300M, 1B or 1e9"
        " (default: 20 per parameter)")  # fmt: skip
    (paper, _), (pretrain, _) = MULTIPLIERS["bcd"], MULTIPLIERS["pretrain"]
    add("--bf-multiplier", type=float, metavar="K", help="iterations of BCD with three blocks over those of full"
        " training to the same loss; with --compare pretrain's"
        f" (default: {paper}; method pretrain: {pretrain})")  # fmt: skip
    group = parser.add_argument_group("data files")
    add = group.add_argument
    add("--clusters", metavar="FILE", default=CLUSTERS, help="the cluster table")
    if task == "sft":
        parser.set_defaults(**SFT_DEFAULTS)
    return parser


_VERIFY = "the formulas are compared with built models by tests/unit/test_plan_verify.py"
_FLAG_OF = {
    "num_blocks": "bcd_num_blocks",
    "layout": "bcd_layout",
    "frozen": "bcd_frozen",
    "always_active": "bcd_always_active",
    "pipeline_size": "pipeline_model_parallel_size",
    "context_size": "context_parallel_size",
    "sequence": "seq_length",
    "cut": "pipeline_cut",
    "num_chunks": "num_virtual_stages_per_pipeline_rank",
}
"""Flags of Recipe's fields, where they have another name."""


def flag_of(name: str) -> str:
    """The flag of a field of Recipe, or of argparse's name."""
    return f"--{_FLAG_OF.get(name, name).replace('_', '-')}"


def add_layout_flags(group: Any) -> None:
    """Flags that the recipes have too: blocks, pipeline, sequence, and what saves memory at a cost in quality."""
    add = group.add_argument
    add("--bcd-num-blocks", dest="num_blocks", type=int, metavar="M", help="(default: 3, with finetune the fewest that"
        " fit; --search tries 2 to 6 with method bcd)")  # fmt: skip
    add("--bcd-layout", dest="layout", choices=LAYOUTS, help="(default: spread; with --bcd-preset pretrain strided)")
    add("--bcd-frozen", dest="frozen", metavar="PARTS", help="never trained: some of embedding, head, norms, or none"
        " (default: none; with finetune embedding)")  # fmt: skip
    add("--bcd-always-active", dest="always_active", metavar="PARTS", help="trained in every phase: some of norms,"
        " biases, embedding, head, or none; what is not belongs to a block, the head to the top one (default: the"
        " preset's)")  # fmt: skip
    add("--adam-moments-dtype", choices=MOMENTS, default="fp32", help="of Adam's moments (default: fp32)")
    add("--pipeline-model-parallel-size", dest="pipeline_size", type=int, metavar="N", help="(default: the smallest"
        " that fits; --search tries all)")  # fmt: skip
    add("--seq-length", dest="sequence", type=int, metavar="N", help="(default: the model's, of a config.json at most"
        f" {_LONGEST_DEFAULT:,}; with --task sft {SFT_DEFAULTS['sequence']:,})")  # fmt: skip
    add("--models", metavar="FILE", help="rows of your own, beside those of examples/models.csv or in their place")


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
        return method or ("finetune" if arguments.task == "sft" else "bcd")
    # bcd is also the method of all presets in general
    if method not in (None, "bcd") and PRESET_OF.get(method) != preset:
        raise ValueError(f"--bcd-preset {preset} cannot be combined with --method {method}; give one of them")
    return next(name for name, known in PRESET_OF.items() if known == preset)


def check_flags(arguments: argparse.Namespace, method: str) -> None:
    """Raises ValueError naming a flag that nothing would read."""
    names: Sequence[str] = ()
    if getattr(arguments, "pipelines", False):
        names = ("pipeline_size", "recompute", "cut", "layout", "num_chunks")
        other = "--pipelines, which sets it itself"
    elif method not in PRESET_OF:
        names, other = OF_BLOCKS, f"--method {method}, which has no blocks"
    for name in names:
        value = getattr(arguments, name, None)
        if value is not None and (name, value) not in (("recompute", "none"), ("cut", "even")):
            raise ValueError(f"{flag_of(name)} {value} cannot be combined with {other}: leave it out")
    if not names and getattr(arguments, "num_chunks", None) and arguments.layout != "interleaved":
        raise ValueError(f"{flag_of('num_chunks')} needs --bcd-layout interleaved: give both, or leave it out")


def named_model(name: str, *, models: str | None, flag: str) -> Model:
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
            sequence=min(network.plain_positions, _LONGEST_DEFAULT),
            source=name,
            head_dim=network.head_size,
            tied=network.tied,
            biases="all" if network.linear_bias else "qkv" if network.qkv_bias else "none",
            qk_norm=network.qk_norm,
            positions=network.max_positions if is_gpt else 0,
        )
    table = read_models(MODELS) | (read_models(models) if models else {})
    try:
        return choose(table, name, flag=flag)
    except ValueError as error:
        raise ValueError(
            f"{error}; or give a {CONFIG}, the folder that holds one, or a row of your own with --models FILE "
            f"(columns {columns_of(Model)})"
        ) from None


def layout_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Recipe's fields of `add_layout_flags`; None: the preset's. Raises ValueError for an unknown part."""
    frozen, always = arguments.frozen, arguments.always_active
    names = ("num_blocks", "layout", "adam_moments_dtype", "sequence")
    return {name: getattr(arguments, name) for name in names} | {
        "frozen": None if frozen is None else BcdConfig(bcd_frozen=frozen).frozen,
        "always_active": None if always is None else BcdConfig(bcd_always_active=always).always_active,
    }


def fields_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of the recipe, but its pipeline. Raises ValueError naming a missing or unknown name."""
    for name in ("model", "gpu", "num_gpus"):
        if getattr(arguments, name) is None:
            raise ValueError(f"{flag_of(name)} is required (except with --paper)")
    names = ("num_gpus", "context_size", "precision", "micro_batch_size", "global_batch_size", "task", "cut")
    return {
        "model": named_model(arguments.model, models=arguments.models, flag="--model"),
        "cluster": choose(read_clusters(arguments.clusters), arguments.gpu, flag="--gpu"),
        "method": method_of(arguments),
        "recompute": arguments.recompute or "none",
        "vocabulary_multiple": VOCABULARY_MULTIPLE[arguments.task],
        **layout_fields(arguments),
        **{name: getattr(arguments, name) for name in (*names, "num_chunks")},
    }


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """The recipe of the flags. Raises ValueError naming a missing or invalid flag."""
    fields, size = fields_of(arguments), arguments.pipeline_size
    is_search = arguments.search or arguments.compare
    if arguments.recompute is None and not is_search:
        del fields["recompute"]
        return place(pipeline_size=size, **fields)
    suited = valid_pipelines(**fields) if size is None else [Recipe(pipeline_size=size, **fields)]
    return suited[0] if is_search else with_fewest_blocks(shortest_that_fits(suited))


def words_of(values: Mapping[str, Any]) -> list[str]:
    """The command line of fields of a recipe, without those that are None, the default."""
    words = []
    for name, value in values.items():
        if value is not None:
            text = parts_of(value) if isinstance(value, frozenset) else value
            words += [flag_of(name), f"{text:g}" if isinstance(text, float) else str(text)]
    return words


# ---------------------------------------------------------------- answers


@dataclass(frozen=True, kw_only=True)
class Answer:
    """For people, for programs, and the exit code: 1 for a plan that does not fit."""

    text: str
    data: Any
    code: int = 0


def answer_to(arguments: argparse.Namespace) -> Answer:
    """Raises ValueError for a user's mistake."""
    if arguments.paper:
        recomputed = paper()
        return Answer(text=show_paper(recomputed), data=paper_cells(recomputed))
    if arguments.pipelines:
        return answer_pipelines(arguments)
    recipe = recipe_of(arguments)
    is_one_method = bool(arguments.method or arguments.bcd_preset)
    if arguments.compare and is_one_method:
        raise ValueError("--compare shows all methods: leave out --method and --bcd-preset")
    if arguments.compare or (arguments.search and not is_one_method):
        return answer_comparison(arguments, recipe)
    if arguments.search:
        return answer_search(arguments, recipe)
    estimate = make_estimate(recipe, **cost_of(arguments))
    if estimate.fits:
        return Answer(text=show_estimate(estimate), data=with_command(estimate))
    others = what_fits(arguments)
    text = f"{show_figures(estimate)}\n\n{show_remedies(others)}"
    return Answer(text=text, data=with_command(estimate) | {"what_fits": [each.data for each in others]}, code=1)


def cost_of(arguments: argparse.Namespace) -> dict[str, float | None]:
    return {"tokens": arguments.tokens, "multiplier": arguments.bf_multiplier}


def paper() -> Paper:
    """The paper's numbers, recomputed."""
    published = read_published(os.path.join(ROOT, "docs", "paper_figures.csv"))
    return Paper(published, read_models(MODELS), read_clusters(CLUSTERS)[_FITTED_CLUSTER])


def paper_cells(recomputed: Paper) -> list[dict[str, Any]]:
    names = ("table", "row", "column", "published", "recomputed", "difference", "note")
    return [{name: getattr(cell, name) for name in names} for cell in recomputed.cells]


def answer_pipelines(arguments: argparse.Namespace) -> Answer:
    """Layouts on the given pipeline, or on those of PIPELINES."""
    wanted = PIPELINES if arguments.model is None else ((arguments.model, arguments.num_gpus),)
    rows = []
    for model, stages in wanted:
        given = argparse.Namespace(**{**vars(arguments), "model": model, "num_gpus": stages})
        fields = fields_of(given) | {"recompute": "none", "cut": "even", "layout": None}
        rows += [(model, stages, time) for time in layout_times(Recipe(pipeline_size=stages, **fields))]
    data = [
        {
            "model": model,
            "stages": stages,
            "layout": time.name,
            "chunks": time.recipe.partition.num_chunks,
            "cut": time.recipe.cut,
            "recompute": time.recipe.recompute,
            "num_blocks": time.recipe.partition.num_blocks,
            "iteration_seconds": time.seconds,
            "ratio_to_full": time.ratio,
            "peak_gib": time.peak_gib,
            "fits": time.fits,
            "layers_recomputed": time.num_recomputed,
        }
        for model, stages, time in rows
    ]
    return Answer(text=show_pipelines(rows), data=data)


def answer_comparison(arguments: argparse.Namespace, recipe: Recipe) -> Answer:
    """All methods side by side, with --search the plan of the best on these GPUs too."""
    rows = compare(
        recipe,
        paper().time_errors(),
        num_blocks=arguments.num_blocks,
        pipeline_size=arguments.pipeline_size,
        **cost_of(arguments),
    )
    methods = [
        row.estimate.as_dict()
        | {
            "cost_ratio": row.cost_ratio,
            "state_per_parameter": row.estimate.state_per_parameter,
            "dollars_with_error": row.price_with_error if recipe.cluster.is_priced else None,
        }
        for row in rows
    ]
    text = show_comparison(rows, asked=recipe.num_gpus)
    if arguments.compare:
        return Answer(text=text, data=methods)
    best = as_asked(rows)
    data = {"best": None, "methods": methods, "verdict": list(verdict(rows))}
    if best is not None:
        text = f"{text}\n\nthe best on {gpus(recipe.num_gpus)}\n\n{show_estimate(best.estimate)}"
        return Answer(text=text, data=data | {"best": with_command(best.estimate)})
    cheapest = rows[0].estimate.recipe
    changes = {"num_gpus": cheapest.num_gpus, "global_batch_size": cheapest.global_batch_size}
    if cheapest.global_batch_size == recipe.global_batch_size:
        del changes["global_batch_size"]
    command = shlex.join(["python", PROG, *words_of(_given(arguments) | changes), "--search"])
    text = f"{text}\n\nno method fits on {gpus(recipe.num_gpus)}; plan the best with\n{command}"
    return Answer(text=text, data=data, code=1)


def answer_search(arguments: argparse.Namespace, recipe: Recipe) -> Answer:
    """The cheapest layouts of one method."""
    found = search(
        recipe,
        num_blocks=None if arguments.num_blocks is None else [arguments.num_blocks],
        pipeline_size=arguments.pipeline_size,
        **cost_of(arguments),
    )
    if not found.best:
        others = what_fits(arguments)
        head = f"no layout of {recipe.model.name} with --method {recipe.method} fits on {recipe.num_gpus} x "
        text = f"{head}{recipe.cluster.gpu}\n{show_remedies(others)}"
        return Answer(text=text, data={"best": [], "what_fits": [each.data for each in others]}, code=1)
    best = [with_command(estimate) for estimate in found.best]
    return Answer(text=show_search(found), data={"tried": found.num_tried, "fitting": found.num_fitting, "best": best})


_SAME = "the same loss, a longer step"
LOSS_OF = {
    "micro_batch_size": _SAME,
    "recompute": _SAME,
    "adam_moments_dtype": "0.1 and 2 % higher in two small models, full Adam; fine-tuning with four blocks the same",
    "precision": "not measured apart from other changes",
    "always_active": "the head is trained in the top block's phase only: not measured",
    "frozen": "a frozen head 5 and 6 % higher than an active one (two small models fine-tuned)",
    "num_blocks": "fine-tuning of 350 steps 1.1 % over full training with 2, 2.4 % with 6, 4.5 % with 30",
    "method": "side by side with --compare",
}
"""Of flags that let a plan fit: docs/fine_tuning.md, docs/learning.md."""


@dataclass(frozen=True, kw_only=True)
class Remedied:
    """A change with which the plan fits."""

    data: dict[str, Any]
    """The changed flags, the planner's command for the changed plan, and what each flag costs in loss."""
    estimate: Estimate


def what_fits(arguments: argparse.Namespace) -> list[Remedied]:
    """Changed flags with which the plan fits."""
    found = []
    fields = fields_of(arguments) | {"recompute": arguments.recompute or "auto"}
    for remedy in remedies(fields, pipeline_size=arguments.pipeline_size):
        changes = dict(remedy.changes)
        if "method" in changes:
            changes["bcd_preset"] = None
        if remedy.recipe.pipeline_size != arguments.pipeline_size:
            changes["pipeline_size"] = None
        data = {
            "flags": " ".join(words_of(changes)),
            "command": shlex.join(["python", PROG, *words_of(_given(arguments) | changes)]),
            "loss": [
                f"{flag_of(name)}: {LOSS_OF[name]}"
                for name, value in changes.items()
                if value is not None and name in LOSS_OF
            ],
        }
        found.append(Remedied(data=data, estimate=make_estimate(remedy.recipe)))
    return found


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Flags with values that differ from their defaults."""
    default = build_parser(arguments.task).get_default
    return {
        name: value
        for name, value in vars(arguments).items()
        if (value != default(name) or name == "task" and value == "sft") and value is not True and name != "json"
    }


def with_command(estimate: Estimate) -> dict[str, Any]:
    """Plain values; the command is None where it would run out of memory."""
    return estimate.as_dict() | {"command": command_of(estimate) if estimate.fits else None}


def command_of(estimate: Estimate) -> str:
    return torchrun_command(estimate.recipe, iterations=estimate.cost.iterations)


# ---------------------------------------------------------------- text


def table(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Aligned columns; the first `left` ones to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        aligned = (
            cell.ljust(width) if number < left else cell.rjust(width) for number, (cell, width) in enumerate(cells)
        )
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def gpus(number: int) -> str:
    return f"{number} GPU{'s' if number > 1 else ''}"


def unit_of_price(cluster: Cluster) -> str:
    """What plans are ranked by."""
    return "dollars" if cluster.is_priced else "GPU hours"


def without_price(cluster: Cluster) -> str:
    return f"no price is known: usd_per_gpu_hour of {cluster.name} is 0 in the cluster table; ranked by GPU hours"


def show_estimate(estimate: Estimate) -> str:
    """Recipe, memory, time, cost and the command of a plan that fits."""
    if estimate.recipe.task == "sft":
        advice = "put your own in place of MODEL_DIR, DATA.jsonl and OUT_DIR"
    else:
        needs = "needs a GPU; " if estimate.recipe.method == "offload" else ""
        advice = f"{needs}mock data: replace the last line by your own, and leave out -mock in --save and --load"
    return f"{show_figures(estimate)}\n\ncommand ({advice})\n{command_of(estimate)}"


def show_remedies(others: Sequence[Remedied]) -> str:
    """What fits, a line each, and the planner's command of the first."""
    if not others:
        return "nothing fits on any number of these GPUs: take a smaller model or a GPU with more memory"
    rows = [("with", "GPUs", "PP x DP", "GiB", "tokens/s")]
    for each in others:
        recipe = each.estimate.recipe
        figures = (f"{each.estimate.peak.total / GIB:.1f}", f"{each.estimate.tokens_per_second:,.0f}")
        ranks = f"{recipe.pipeline_size} x {recipe.data_size}"
        rows.append((each.data["flags"], str(recipe.num_gpus), ranks, *figures))
    loss = "\n".join(dict.fromkeys(line for each in others for line in each.data["loss"]))
    return f"what fits\n{table(rows)}\nloss\n{loss}\nplan the first with\n{others[0].data['command']}"


def show_figures(estimate: Estimate) -> str:
    """Recipe, memory, time, cost."""
    recipe = estimate.recipe
    nodes = f"{recipe.num_nodes} node{'s' if recipe.num_nodes > 1 else ''} of {recipe.gpus_per_node}"
    settings = (
        f"{_layout(estimate)}, {recipe.precision}, sequence {recipe.tokens:,}, global batch {recipe.global_batch_size} "
        f"({recipe.num_microbatches} microbatches)"
    )
    return (
        f"{recipe.model.name}: {estimate.parameters:,} parameters, {recipe.method}, on {recipe.num_gpus} x "
        f"{recipe.cluster.gpu} ({nodes})\n{textwrap.fill(settings, _WIDTH)}\n\n"
        f"memory per rank, GiB (of {recipe.cluster.memory_gib:g})\n{_memory(estimate)}\n\n"
        f"time of an iteration, ms\n{_time(estimate)}\n\n{_cost(estimate)}"
    )


def _layout(estimate: Estimate) -> str:
    recipe, partition = estimate.recipe, estimate.recipe.partition
    context = f" x context {recipe.context_size}" if recipe.context_size > 1 else ""
    parts = [f"pipeline {recipe.pipeline_size}{context} x data {recipe.data_size}"]
    if recipe.has_blocks:
        parts.append(f"{partition.num_blocks} block{'s' if partition.num_blocks > 1 else ''} ({partition.layout})")
    if partition.num_chunks > 1:
        parts.append(f"{partition.num_chunks} chunks a stage")
    if recipe.cut == "auto":
        parts.append("cut by work")
    parts.append(f"micro-batch {recipe.micro_batch_size}")
    if recipe.recompute == "auto":
        parts.append(_recomputed(recipe))
    elif recipe.recompute != "none":
        parts.append("recomputation")
    return ", ".join(parts)


def _recomputed(recipe: Recipe) -> str:
    """What --recompute auto recomputes."""
    choices = recomputation(recipe)
    layers = [sum(sum(stage[block].layers) for stage in choices) for block in range(recipe.partition.num_blocks)]
    least, most = min(layers), max(layers)
    if most:
        number = str(most) if least == most else f"{least} to {most}"
        return f"recomputation of {number} layer{'s' * (most > 1)}"
    is_selective = any(choice.granularity == "selective" for stage in choices for choice in stage)
    return "recomputation of attention" if is_selective else "nothing recomputed"


def _memory(estimate: Estimate) -> str:
    names = ("weights", "gradients", "optimizer", "activations", "optimizer_work", "communication", "framework")
    rows = [("stage", "block", *(name.replace("_", " ") for name in names), "peak")]
    shown = _most_telling(estimate.ranks)
    for rank in shown:
        figures = (*(getattr(rank, name) for name in names), rank.total)
        rows.append((str(rank.stage), str(rank.block), *(f"{figure / GIB:.2f}" for figure in figures)))
    lines, recipe, peak = [table(rows, left=0)], estimate.recipe, estimate.peak
    blocks = recipe.partition.num_blocks
    if len(shown) < len(estimate.ranks):
        what, number = ("phases", blocks) if len(shown) <= 2 < blocks else ("stages", recipe.pipeline_size)
        lines.append(f"the {what} with the largest and the smallest peak, of {number}")
    lines.append("peak: model state and framework, and the larger of activations with communication and optimizer work")
    if estimate.host_bytes:
        what = "main parameters' low bits (none with --bcd-main-params drop)"
        if recipe.method == "offload":
            what = "weights, gradients and moments"
        elif recipe.is_muon:
            what = "momenta of inactive blocks"
        lines.append(f"on the host, per rank: {estimate.host_bytes / GIB:.1f} GiB of {what}")
    largest = estimate.largest_micro_batch
    where = f"{peak.total / GIB:.1f} GiB on stage {peak.stage} in the phase of block {peak.block}"
    if estimate.fits:
        lines.append(f"fits: {where}; the largest micro-batch that fits is {largest}")
    else:
        what = f"micro-batch {largest} would fit" if largest else "no micro-batch fits"
        lines.append(f"does NOT fit: {where}; {what}")
    return "\n".join(lines)


def _most_telling(ranks: Sequence[RankMemory]) -> Sequence[RankMemory]:
    """Of many ranks the stages with the largest and the smallest peak; of many phases these two ranks."""
    if len(ranks) <= _MOST_ROWS:
        return ranks
    extremes = [choose_by(ranks, key=lambda rank: rank.total) for choose_by in (max, min)]
    shown = [rank for rank in ranks if rank.stage in {each.stage for each in extremes}]
    return shown if len(shown) <= _MOST_ROWS else [rank for rank in shown if rank in extremes]


def _time(estimate: Estimate) -> str:
    rows = [("block", "pipeline", "optimizer", "reductions", "total", "bubble")]
    phases = estimate.phases
    if len(phases) > _MOST_ROWS:
        phases = (phases[0], phases[len(phases) // 2], phases[-1])
    for phase in phases:
        seconds = (phase.pipeline, phase.optimizer, phase.reductions, phase.total)
        rows.append((str(phase.block), *(f"{1e3 * second:,.0f}" for second in seconds), _percent(phase.bubble)))
    rows.append(("mean", "", "", "", f"{1e3 * estimate.iteration_seconds:,.0f}", _percent(estimate.bubble)))
    speed = f"{estimate.tokens_per_second:,.0f} tokens/s, MFU {100 * estimate.mfu:.1f} % (arithmetic of full training)"
    if (share := estimate.orthogonalization_share) > 0:
        speed += f"; orthogonalisation is {100 * share:.1f} % of the time"
    return f"{table(rows)}\n{speed}"


def _percent(share: float) -> str:
    return f"{abs(round(100 * share)):d} %"  # rounding errors may make it less than nothing


def _cost(estimate: Estimate) -> str:
    cost, cluster = estimate.cost, estimate.recipe.cluster
    more = phases = ""
    num_blocks, longest = estimate.recipe.partition.num_blocks, estimate.recipe.bcd.mean_steps
    if num_blocks > 1:
        phases = f", {describe_steps(even_phases(cost.iterations, num_blocks=num_blocks, longest=longest))}"
        more = f" x B-F multiplier {cost.multiplier:.2f} ({cost.multiplier_source})"
    tokens = f"{cost.tokens / 1e9:,.1f} G" if cost.tokens >= 1e9 else f"{cost.tokens / 1e6:,.1f} M"
    is_small = cost.gpu_hours < 100
    hours, dollars = f"{cost.gpu_hours:,.{is_small:d}f}", f"{cost.dollars:,.{2 * is_small:d}f}"
    days = f"{cost.days:,.1f} days" if cost.days >= 1 else f"{24 * cost.days:,.1f} hours"
    price = f"${dollars} (${cluster.usd_per_gpu_hour:g} per GPU hour)"
    if not cluster.is_priced:
        price = f"no price known (usd_per_gpu_hour of {cluster.name} is 0)"
    return f"{tokens} tokens{more}:\n{cost.iterations:,} iterations{phases}, {days}, {hours} GPU hours, {price}"


LEARNING_NOTE = (
    "number of blocks, layout and chunks per block decide which layers learn together: they change what is learned,\n"
    "as the pipeline's size does except with interleaved. Recomputation and micro-batch change memory and speed only,\n"
    "and so does the cut with interleaved; with the others it moves layers between blocks"
)


def show_search(found: SearchResult) -> str:
    """The cheapest layouts, and the cheapest one's estimate."""
    first = found.best[0].recipe
    rows = [("layout", "GiB", "iteration s", "tokens/s", "B-F multiplier", "days", unit_of_price(first.cluster))]
    for estimate in found.best:
        figures = (estimate.peak.total / GIB, estimate.iteration_seconds, estimate.tokens_per_second)
        cells = zip(figures, (".1f", ".2f", ",.0f"), strict=True)
        cost = (f"{estimate.cost.multiplier:.2f}", f"{estimate.cost.days:,.1f}", f"{estimate.price:,.0f}")
        rows.append((_layout(estimate), *(format(*cell) for cell in cells), *cost))
    lines = [f"{found.num_tried} layouts tried, {found.num_fitting} fit; the cheapest", table(rows)]
    if not first.cluster.is_priced:
        lines.append(without_price(first.cluster))
    if first.method == "bcd":
        lines.append(LEARNING_NOTE)
    return "\n".join(lines) + f"\n\n{show_estimate(found.best[0])}"


def as_asked(rows: Iterable[Compared]) -> Compared | None:
    """The cheapest on the number of GPUs that was asked for."""
    return next((row for row in rows if row.is_as_asked), None)


def show_comparison(rows: Sequence[Compared], *, asked: int) -> str:
    """One line per method and number of GPUs, cheapest first; what is best; what the figures rest on."""
    head = ("method", "GPUs", "PP x DP", "blocks", "recompute", "GiB", "host", "B/param", "s/step", "B-F")
    first = rows[0].estimate.recipe
    lines = [(*head, "days", unit_of_price(first.cluster), "with error", "to full")]
    for row in rows:
        estimate, recipe, ends = row.estimate, row.estimate.recipe, row.price_with_error
        lines.append(
            (
                row.name,
                str(recipe.num_gpus),
                f"{recipe.pipeline_size} x {recipe.data_size}",
                str(recipe.partition.num_blocks) if recipe.has_blocks else "-",
                recipe.recompute,
                f"{estimate.peak.total / GIB:.1f}",
                f"{estimate.host_bytes / GIB:.0f}",
                f"{estimate.state_per_parameter:.1f}",
                f"{estimate.iteration_seconds:.2f}",
                f"{estimate.cost.multiplier:.2f}",
                f"{estimate.cost.days:,.1f}",
                f"{estimate.price:,.0f}",
                "unknown" if ends is None else f"{ends[0]:,.0f}-{ends[1]:,.0f}",
                "-" if row.cost_ratio is None else f"{row.cost_ratio:.2f}",
            )
        )
    title = (
        f"{first.model.name} on {asked} x {first.cluster.gpu}, {first.precision}, sequence {first.tokens:,}, global "
        f"batch {first.global_batch_size}: the cheapest layout of each method, best first"
    )
    notes = [*verdict(rows), *_comparison_notes(rows, asked)]
    return "\n".join([title, table(lines), *(textwrap.fill(one, _WIDTH, subsequent_indent="  ") for one in notes)])


def verdict(rows: Sequence[Compared]) -> Iterator[str]:
    """Whether block coordinate descent is the best choice."""
    others = [row for row in rows if not row.estimate.recipe.has_blocks]
    for name in dict.fromkeys(row.name for row in rows if row.estimate.recipe.has_blocks):
        mine = [row for row in rows if row.name == name]
        row = as_asked(mine) or mine[0]
        if not others:
            yield f"{name}: full training fits on no number of these GPUs, with the optimizer on the host either"
            continue
        best = (as_asked(others) if row.is_as_asked else None) or others[0]
        number = best.estimate.recipe.num_gpus
        ratio, multiplier = row.estimate.price / best.estimate.price, row.estimate.cost.multiplier
        which = "there" if number == row.estimate.recipe.num_gpus else "that fits"
        against = f"{best.name} on {gpus(number)}, the cheapest full training {which}"
        if ratio < 1:
            yield (
                f"{name} costs {ratio:.2f} of {against}, if its multiplier of {multiplier:.2f} holds; above "
                f"{multiplier / ratio:.2f} it costs more"
            )
            continue
        ours, theirs = row.price_with_error, best.price_with_error
        overlap = "; with the known errors the two overlap" if ours and theirs and ours[0] <= theirs[1] else ""
        yield (
            f"{name} is NOT the best choice: it costs {ratio:.2f} x {against}, and would cost less with a multiplier "
            f"below {multiplier / ratio:.2f} only{overlap}"
        )


def _comparison_notes(rows: Sequence[Compared], asked: int) -> Iterator[str]:
    first = rows[0].estimate.recipe
    unit = unit_of_price(first.cluster)
    yield (
        f"to full: {unit} to full training's loss over the least of full training; with error: {unit} if times are as "
        "far off as known ones were; B/param: bytes of model state per parameter; host: GiB of host memory per GPU"
    )
    if not first.cluster.is_priced:
        yield without_price(first.cluster)
    named: dict[str, list[Compared]] = {}
    for row in rows:
        named.setdefault(row.name, []).append(row)
    for name, mine in named.items():
        recipe, cost = mine[0].estimate.recipe, mine[0].estimate.cost
        if as_asked(mine) is None:
            yield (
                f"{name}: no layout fits on {gpus(asked)}, with recomputation either; shown on {recipe.num_gpus}, the "
                "fewest that fit"
            )
        if recipe.has_blocks:
            yield f"B-F multiplier of {name}: {cost.multiplier:.2f}, {cost.multiplier_source}"
    for name in map(name_of, COMPARED[first.task]):
        if name not in named:
            yield f"{name}: left out, it cannot be had with these flags or fits nowhere"
    known, unknown = [], []
    for name, mine in named.items():
        if errors := mine[0].errors:
            ends = f"{100 * min(errors):+.0f} to {100 * max(errors):+.0f} %"
            known.append(f"{name} {ends} ({len(errors)} times)")
        else:
            unknown.append(name)
    yield (
        "known error: of the iteration time, against the paper's times on RTX 4090 in fp32 that no fit has seen: "
        + ", ".join(known)
    )
    unknown += [first.precision] * (first.precision != "fp32")
    unknown += [first.cluster.gpu] * (first.cluster.name != _FITTED_CLUSTER)
    if unknown:
        yield f"no time was ever published or measured for {', '.join(unknown)}; multipliers have errors too"


def show_pipelines(rows: Sequence[tuple[str, int, LayoutTime]]) -> str:
    """A line for each layout of each model and number of stages."""
    shown = [("model", "stages", "layout", "chunks", "cut", "recompute", "blocks", "to full", "GiB", "layers again")]
    for model, stages, time in rows:
        recipe, partition = time.recipe, time.recipe.partition
        settings = (time.name, str(partition.num_chunks), recipe.cut, recipe.recompute, str(partition.num_blocks))
        peak = f"{time.peak_gib:.1f}{'' if time.fits else ' !'}"
        shown.append((model, str(stages), *settings, f"{time.ratio:.3f}", peak, f"{time.num_recomputed:.1f}"))
    first = rows[0][2].recipe
    return "\n".join(
        [
            f"{first.cluster.gpu}, {first.precision}, sequence {first.tokens:,}, {first.num_microbatches} microbatches",
            table(shown, left=6),
            "to full: iteration time, simulated, over full training's on as many stages (1F1B, even cut, nothing",
            "  recomputed, as if it fitted)",
            f"GiB: the largest rank's peak, of {first.cluster.memory_gib:g}; !: does not fit; layers again: recomputed,"
            " a phase's mean",
            LEARNING_NOTE,
        ]
    )


def show_paper(recomputed: Paper) -> str:
    """Every cell that was recomputed, and what was fitted."""
    rows, notes, settings = [("table", "row", "column", "published", "recomputed", "difference")], ["note"], 0
    for cell in recomputed.cells:
        if cell.recomputed is None or cell.difference is None:
            settings += 1
            continue
        figures = (f"{cell.published:.3f}", f"{cell.recomputed:.3f}", f"{cell.difference:+.3f}")
        rows.append((str(cell.table), cell.row, cell.column, *figures))
        notes.append(cell.note)
    body, cluster = table(rows, left=3).splitlines(), recomputed.cluster
    errors = (f"table {number} {100 * recomputed.mean_error(number):.1f} %" for number in (4, 15, 16, 3))
    return "\n".join(
        [
            *(f"{line}  {note}" for line, note in zip(body, notes, strict=True)),
            "",
            f"difference: published less recomputed. {settings} further cells (layers, sizes, numbers of GPUs) are "
            "settings and were taken as given.",
            f"Times: fitted on {' and '.join(FITTED_MODELS)} alone (tables 4, 15, 16; 8 cells): share of the peak "
            f"{cluster.compute_share:.3f}, share of the memory bandwidth {cluster.memory_share:.3f};",
            f"offload: on the same two models in table 3, {cluster.host_gb_per_s:.1f} GB/s through the host.",
            f"Mean absolute error of the times that no fit has seen: {', '.join(errors)}",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    # not through megatron.bcd.runtime.exit, which is for several ranks and imports torch
    try:
        arguments = parse_arguments(argv)
        modes = [name for name in ("search", "compare", "pipelines", "paper") if getattr(arguments, name)]
        if len(modes) > 1:
            raise ValueError(f"--{modes[0]} and --{modes[1]} are both given: give one of them")
        check_flags(arguments, method_of(arguments))
        answer = answer_to(arguments)
        text, data = answer.text, json.dumps(answer.data, indent=1)
        if arguments.json == STDOUT:
            text = data
        elif arguments.json is not None:
            from report import write_aside

            write_aside(
                arguments.json, lambda name: Path(name).write_text(f"{data}\n", encoding="utf-8"), flag="--json"
            )
            text = f"{text}\nwrote {arguments.json}"
    except ValueError as error:
        return bad_input(PROG, error)
    if arguments.verify:
        print(f"{PROG}: --verify is without effect: {_VERIFY}", file=sys.stderr)
    print(text, flush=True)
    return answer.code


if __name__ == "__main__":
    leave_with(main)
