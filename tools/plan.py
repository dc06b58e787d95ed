"""Estimates before a run: does a model fit on these GPUs, how fast does it train, what does it cost?

    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --method bcd --bcd-num-blocks 3
    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --bcd-preset pretrain
    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --search
    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --compare
    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --pipelines --global-batch-size 32
    python tools/plan.py --paper
    python tools/plan.py --model G-0.15B --gpu rtx4090 --num-gpus 2 --verify

Nothing is run: memory and time follow from formulas and from the editable tables examples/models.csv and
examples/clusters.csv. --paper recomputes the tables of the paper (arXiv 2506.12037), --verify builds the model of
every rank on PyTorch's meta device and compares parameter counts. See docs/planner.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _parser import STDOUT, Parser, add_json, add_precision, bad_input, leave_with
from _plan_compare import as_asked, compare, comparison_as_list, gpus, show_comparison, verdict
from _plan_flags import MODELS, add_memory_flags, flags_of, memory_fields, named_model, refuse_unused, words_of
from _plan_output import Remedied, show_estimate, show_paper, show_remedies, show_search
from _plan_pipelines import pipelines_as_list, show_pipelines

from megatron.bcd.config import LAYOUTS
from megatron.bcd.config.presets import PRESETS
from megatron.bcd.planner.command import torchrun_command
from megatron.bcd.planner.cost import PRECISIONS
from megatron.bcd.planner.estimate import Estimate, make_estimate
from megatron.bcd.planner.memory import fits
from megatron.bcd.planner.multipliers import PAPER, PRETRAIN
from megatron.bcd.planner.paper import Paper, recompute_paper, time_errors
from megatron.bcd.planner.pipelines import PIPELINES, layout_times
from megatron.bcd.planner.placement import place, with_fewest_blocks
from megatron.bcd.planner.recipe import CUTS, METHODS, PRESET_OF, RECOMPUTE_CHOICES, VOCABULARY_MULTIPLE, Recipe
from megatron.bcd.planner.remedies import remedies
from megatron.bcd.planner.search import layouts, search, shortest_that_fits, valid_pipelines
from megatron.bcd.planner.tables import choose, read_clusters, read_models, read_published

PROG = "tools/plan.py"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_CLUSTERS = os.path.join(ROOT, "examples", "clusters.csv")
DEFAULT_BATCH = 64
TASKS = ("pretrain", "sft")
SFT_DEFAULTS = {"precision": "bf16", "seq_length": 1024, "global_batch_size": 8, "recompute": None}
"""By flag; recompute None: only where it does not fit without."""
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_PAPER_CLUSTER = "rtx4090"


def build_parser(task: str = "pretrain") -> argparse.ArgumentParser:
    """With the defaults of a task."""
    parser = Parser(prog=PROG, usage=f"{PROG} --model NAME --gpu NAME --num-gpus N [flags]", description=__doc__)
    add = parser.add_argument
    add("--model", metavar="NAME", help="a row of the model table, a config.json, or the folder that holds one")
    add("--gpu", metavar="NAME", help="a row of the cluster table")
    add("--num-gpus", type=int, metavar="N", help="GPUs of the run")
    add("--search", action="store_true", help="all methods side by side, each in its cheapest layouts that fit, and"
        " the plan of the best; with --method or --bcd-preset the layouts of that one")  # fmt: skip
    add("--compare", action="store_true", help="all methods side by side, without a plan")
    add("--pipelines", action="store_true", help="layouts of blocks on one pipeline (--num-gpus stages), side by side;"
        " without --model of six of the paper's models")  # fmt: skip
    add("--paper", action="store_true", help="recompute the paper's tables")
    add("--verify", action="store_true", help="compare parameter counts with models on the meta device (needs torch)")
    add_json(parser)
    group = parser.add_argument_group("recipe", "same names as the training script's flags")
    add = group.add_argument
    add("--task", choices=TASKS, default="pretrain", help="pretrain, or sft: fine-tuning a published model on records;"
        " its defaults are method finetune, bf16, packed sequences of 1,024 tokens, global batch 8, recomputation where"
        " needed, three epochs of Alpaca (default: pretrain)")  # fmt: skip
    add("--method", choices=METHODS, help="block coordinate descent as in the paper, or with --bcd-preset pretrain or"
        " finetune; full training, or full training with the optimizer on the host (default: bcd)")  # fmt: skip
    add("--bcd-preset", choices=tuple(PRESETS), help="of block coordinate descent: paper is --method bcd, the others"
        " are methods of their name")  # fmt: skip
    add("--bcd-num-blocks", type=int, metavar="M", help="(default: 3, with finetune the fewest that fit; --search"
        " tries 2 to 6 with method bcd)")  # fmt: skip
    add("--bcd-layout", choices=LAYOUTS, help="(default: spread; with --bcd-preset pretrain strided)")
    add_memory_flags(group)
    add("--pipeline-model-parallel-size", type=int, metavar="N", help="(default: the smallest that fits;"
        " --search tries all)")  # fmt: skip
    add("--context-parallel-size", type=int, default=1, metavar="N", help="(default: 1)")
    add("--seq-length", type=int, metavar="N", help="(default: the model table's; with --task sft at most"
        f" {SFT_DEFAULTS['seq_length']:,})")  # fmt: skip
    add("--micro-batch-size", type=int, default=1, metavar="N", help="(default: 1; --search tries powers of two)")
    add("--global-batch-size", type=int, default=DEFAULT_BATCH, metavar="N", help="sequences of an iteration (default:"
        f" {DEFAULT_BATCH})")  # fmt: skip
    add("--recompute", nargs="?", const="full", choices=RECOMPUTE_CHOICES, default="none", help="recompute activations:"
        " none, full, or auto: on each stage and in each phase the least that fits; the bare flag means full (--search"
        " tries none and auto)")  # fmt: skip
    add("--pipeline-cut", choices=CUTS, default="even", help="auto: the head counts as layers (--search tries both)")
    add("--num-virtual-stages-per-pipeline-rank", type=int, metavar="V", help="chunks of a stage, with --bcd-layout"
        " interleaved (default: as many as blocks)")  # fmt: skip
    add_precision(group, PRECISIONS, more="; with --task sft bf16")
    group = parser.add_argument_group("cost")
    add = group.add_argument
    add("--tokens", type=token_count, metavar="N", help="tokens that full training would read, such as 300M, 1B or 1e9"
        " (default: 20 per parameter)")  # fmt: skip
    add("--bf-multiplier", type=float, metavar="K", help="iterations of BCD with three blocks over those of full"
        " training to the same loss; with method bcd scaled to other numbers of blocks as in the paper's table 11; with"
        " --compare pretrain's"
        f" (default: {PAPER.value}, {PAPER.source}; method pretrain: {PRETRAIN.value}, {PRETRAIN.source})")  # fmt: skip
    group = parser.add_argument_group("data files")
    add = group.add_argument
    add("--models", metavar="FILE", help="rows of your own, beside those of examples/models.csv or in their place")
    add("--clusters", metavar="FILE", default=_CLUSTERS, help="the cluster table")
    if task == "sft":
        parser.set_defaults(**SFT_DEFAULTS)
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Raises ValueError for an unknown or missing flag, or an invalid value."""
    task = build_parser().parse_args(argv).task
    return build_parser(task).parse_args(argv)


def token_count(text: str) -> float:
    """1e9, 300M, 1B. Raises argparse.ArgumentTypeError for what is no number."""
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


def fields_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of the recipe, but its pipeline. Raises ValueError naming a missing or unknown name."""
    for flag, given in (("--model", arguments.model), ("--gpu", arguments.gpu), ("--num-gpus", arguments.num_gpus)):
        if given is None:
            raise ValueError(f"{flag} is required (except with --paper)")
    return {
        "model": named_model(arguments.model, models=arguments.models, flag="--model"),
        "cluster": choose(read_clusters(arguments.clusters), arguments.gpu, flag="--gpu"),
        "num_gpus": arguments.num_gpus,
        "context_size": arguments.context_parallel_size,
        "method": method_of(arguments),
        "num_blocks": arguments.bcd_num_blocks,
        "layout": arguments.bcd_layout,
        "precision": arguments.precision,
        "sequence": arguments.seq_length,
        "micro_batch_size": arguments.micro_batch_size,
        "global_batch_size": arguments.global_batch_size,
        "recompute": arguments.recompute or "none",
        **memory_fields(arguments),
        "task": arguments.task,
        "vocabulary_multiple": VOCABULARY_MULTIPLE[arguments.task],
        "cut": arguments.pipeline_cut,
        "num_chunks": arguments.num_virtual_stages_per_pipeline_rank,
    }


def cost_of(arguments: argparse.Namespace) -> dict[str, float | None]:
    """Arguments of an estimate's cost."""
    return {"tokens": arguments.tokens, "multiplier": arguments.bf_multiplier}


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """The recipe of the flags. Raises ValueError naming a missing or invalid flag."""
    fields = fields_of(arguments)
    if arguments.recompute is None and not arguments.search and not arguments.compare:
        given = {"pipeline_size": arguments.pipeline_model_parallel_size} | fields
        return place(placements=(), **{name: value for name, value in given.items() if name != "recompute"})
    size = arguments.pipeline_model_parallel_size
    suited = valid_pipelines(**fields) if size is None else [Recipe(pipeline_size=size, **fields)]
    if arguments.search or arguments.compare:
        return suited[0]
    return with_fewest_blocks(shortest_that_fits(suited))


def paper() -> Paper:
    """The paper's numbers, recomputed."""
    return recompute_paper(
        read_published(os.path.join(ROOT, "docs", "paper_figures.csv")),
        read_models(MODELS),
        read_clusters(_CLUSTERS)[_PAPER_CLUSTER],
    )


def what_fits(arguments: argparse.Namespace) -> list[Remedied]:
    """Changed flags with which the plan fits, and the planner's command for each."""
    found = []
    fields = fields_of(arguments) | {"recompute": arguments.recompute or "auto"}
    for remedy in remedies(fields, pipeline_size=arguments.pipeline_model_parallel_size):
        changes = flags_of(remedy.changes)
        if "method" in changes:
            changes["bcd_preset"] = None
        if remedy.recipe.pipeline_size != arguments.pipeline_model_parallel_size:
            changes["pipeline_model_parallel_size"] = None
        shown = {name: value for name, value in changes.items() if value is not None}
        found.append(
            Remedied(
                names=tuple(shown),
                flags=" ".join(words_of(shown)),
                command=shlex.join(["python", PROG, *words_of(_given(arguments) | changes)]),
                estimate=make_estimate(remedy.recipe),
            )
        )
    return found


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Flags with values that differ from their defaults."""
    default = build_parser(arguments.task).get_default
    return {
        name: value
        for name, value in vars(arguments).items()
        if (value != default(name) or name == "task" and value == "sft") and value is not True and name != "json"
    }


def run(argv: Sequence[str] | None) -> tuple[str, int]:
    """The text to print, and the exit code: 1 for a plan that does not fit. Raises ValueError for a user's mistake."""
    arguments = parse_arguments(argv)
    modes = [name for name in ("search", "compare", "pipelines", "paper", "verify") if getattr(arguments, name)]
    if len(modes) > 1:
        raise ValueError(f"--{modes[0]} and --{modes[1]} are both given: give one of them")
    refuse_unused(arguments, method_of(arguments))
    answer = answer_to(arguments)
    if arguments.json is None:
        return answer.text, answer.code
    data = json.dumps(answer.data, indent=1)
    if arguments.json == STDOUT:
        return data, answer.code
    from report import write_aside

    write_aside(arguments.json, lambda name: Path(name).write_text(f"{data}\n", encoding="utf-8"), flag="--json")
    return f"{answer.text}\nwrote {arguments.json}", answer.code


@dataclass(frozen=True, kw_only=True)
class Answer:
    """For people, for programs, and the exit code."""

    text: str
    data: Any
    code: int = 0


def answer_to(arguments: argparse.Namespace) -> Answer:
    """Raises ValueError for a user's mistake."""
    if arguments.paper:
        recomputed = paper()
        return Answer(text=show_paper(recomputed), data=recomputed.as_list())
    if arguments.pipelines:
        return run_pipelines(arguments)
    recipe = recipe_of(arguments)
    if arguments.verify:
        try:
            from _plan_verify import show_counts, verify  # torch takes seconds to import
        except ModuleNotFoundError as error:
            raise ValueError(f"--verify builds the model, and {error.name} is not installed") from None
        counts = verify(recipe)
        return Answer(text=show_counts(recipe, counts), data=counts)
    is_one_method = bool(arguments.method or arguments.bcd_preset)
    if arguments.compare and is_one_method:
        raise ValueError("--compare shows all methods: leave out --method and --bcd-preset")
    if arguments.compare or (arguments.search and not is_one_method):
        return run_comparison(arguments, recipe)
    if arguments.search:
        return run_search(arguments, recipe)
    estimate = make_estimate(recipe, **cost_of(arguments))
    others = [] if estimate.fits else what_fits(arguments)
    data = _with_command(estimate) | ({} if estimate.fits else {"what_fits": _listed(others)})
    return Answer(text=show_estimate(estimate, others), data=data, code=0 if estimate.fits else 1)


def run_pipelines(arguments: argparse.Namespace) -> Answer:
    """Layouts on the given pipeline, or on those of PIPELINES."""
    wanted = PIPELINES if arguments.model is None else ((arguments.model, arguments.num_gpus),)
    rows = {}
    for model, stages in wanted:
        given = argparse.Namespace(**{**vars(arguments), "model": model, "num_gpus": stages})
        fields = fields_of(given) | {"recompute": "none", "cut": "even", "layout": None}
        rows[model, stages] = layout_times(Recipe(pipeline_size=stages, **fields))
    return Answer(text=show_pipelines(rows), data=pipelines_as_list(rows))


def run_comparison(arguments: argparse.Namespace, recipe: Recipe) -> Answer:
    """All methods side by side, with --search the plan of the best on these GPUs too."""
    rows = compare(
        recipe,
        time_errors(paper().cells()),
        num_blocks=arguments.bcd_num_blocks,
        pipeline_size=arguments.pipeline_model_parallel_size,
        **cost_of(arguments),
    )
    text = show_comparison(rows)
    if arguments.compare:
        return Answer(text=text, data=comparison_as_list(rows))
    best = as_asked(rows)
    data = {"best": None, "methods": comparison_as_list(rows), "verdict": verdict(rows)}
    if best is not None:
        text = f"{text}\n\nthe best on {gpus(recipe.num_gpus)}\n\n{show_estimate(best.estimate)}"
        return Answer(text=text, data=data | {"best": _with_command(best.estimate)})
    cheapest = rows[0].estimate.recipe
    changes = {"num_gpus": cheapest.num_gpus}
    if cheapest.global_batch_size != recipe.global_batch_size:
        changes["global_batch_size"] = cheapest.global_batch_size
    command = shlex.join(["python", PROG, *words_of(_given(arguments) | changes), "--search"])
    text = f"{text}\n\nno method fits on {gpus(recipe.num_gpus)}; plan the best with\n{command}"
    return Answer(text=text, data=data, code=1)


def run_search(arguments: argparse.Namespace, recipe: Recipe) -> Answer:
    """The cheapest layouts of one method."""
    sizes = {
        "num_blocks": None if arguments.bcd_num_blocks is None else [arguments.bcd_num_blocks],
        "pipeline_size": arguments.pipeline_model_parallel_size,
    }
    if not any(fits(each) for each in layouts(recipe, **sizes)):
        others = what_fits(arguments)
        head = f"no layout of {recipe.model.name} with --method {recipe.method} fits on {recipe.num_gpus} x "
        text = f"{head}{recipe.cluster.gpu}\n{show_remedies(others)}"
        return Answer(text=text, data={"best": [], "what_fits": _listed(others)}, code=1)
    found = search(recipe, **sizes, **cost_of(arguments))
    best = [_with_command(estimate) for estimate in found.best]
    return Answer(text=show_search(found), data={"tried": found.num_tried, "fitting": found.num_fitting, "best": best})


def _with_command(estimate: Estimate) -> dict[str, Any]:
    """Plain values; the command is None where it would run out of memory."""
    return estimate.as_dict() | {"command": _command(estimate) if estimate.fits else None}


def _listed(others: Sequence[Remedied]) -> list[dict[str, Any]]:
    return [{"flags": each.flags, "command": each.command, "loss": each.loss} for each in others]


def _command(estimate: Estimate) -> str:
    return torchrun_command(estimate.recipe, iterations=estimate.cost.iterations)


def main(argv: Sequence[str] | None = None) -> int:
    # not through megatron.bcd.runtime.exit, which is for several ranks and imports torch
    try:
        text, code = run(argv)
    except ValueError as error:
        return bad_input(PROG, error)
    print(text, flush=True)
    return code


if __name__ == "__main__":
    leave_with(main)
