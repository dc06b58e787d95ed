"""Estimates before a run: does a model fit on these GPUs, how fast does it train, what does it cost?

    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --method bcd --bcd-num-blocks 3
    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --bcd-preset pretrain
    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --search
    python tools/plan.py --model G-5.4B --gpu rtx4090 --num-gpus 4 --compare
    python tools/plan.py --paper
    python tools/plan.py --model tiny-gpt --gpu rtx4090 --num-gpus 2 --verify

Nothing is run: memory and time follow from formulas and from the editable tables examples/models.csv and
examples/clusters.csv. --paper recomputes the tables of the paper (arXiv 2506.12037), --verify builds the model of
every rank on PyTorch's meta device and compares parameter counts. See docs/planner.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _parser import Parser
from _plan_compare import compare, comparison_as_list, show_comparison
from _plan_output import show_estimate, show_paper, show_search

from megatron.bcd.config import LAYOUTS
from megatron.bcd.config.presets import PRESETS
from megatron.bcd.planner.command import torchrun_command
from megatron.bcd.planner.cost import PRECISIONS
from megatron.bcd.planner.estimate import make_estimate
from megatron.bcd.planner.multipliers import PAPER, PRETRAIN
from megatron.bcd.planner.paper import Paper, recompute_paper
from megatron.bcd.planner.recipe import METHODS, PRESET_OF, RECOMPUTE, Recipe
from megatron.bcd.planner.search import search, shortest_that_fits, valid_pipelines
from megatron.bcd.planner.tables import choose, read_clusters, read_models, read_published

PROG = "tools/plan.py"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DEFAULT_BATCH = 64
_PAPER_CLUSTER = "rtx4090"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Raises ValueError for an unknown or missing flag, or an invalid value."""
    parser = Parser(
        prog=PROG, allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", metavar="NAME", help="a row of the model table")
    add("--gpu", metavar="NAME", help="a row of the cluster table")
    add("--num-gpus", type=int, metavar="N", help="GPUs of the run")
    add("--search", action="store_true", help="find the cheapest layout that fits")
    add("--compare", action="store_true", help="full training, paper and pretrain side by side, each in its cheapest"
        " layout that fits")  # fmt: skip
    add("--paper", action="store_true", help="recompute the paper's tables")
    add("--verify", action="store_true", help="compare parameter counts with models on the meta device (needs torch)")
    add("--json", action="store_true", help="print JSON and nothing else")
    group = parser.add_argument_group("recipe", "same names as the training script's flags")
    add = group.add_argument
    add("--method", choices=METHODS, help="block coordinate descent as in the paper, or with --bcd-preset pretrain;"
        " full training, or full training with the optimizer on the host (default: bcd)")  # fmt: skip
    add("--bcd-preset", choices=tuple(PRESETS), help="of block coordinate descent: paper is --method bcd, pretrain"
        " --method pretrain")  # fmt: skip
    add("--bcd-num-blocks", type=int, metavar="M", help="(default: 3; --search tries 2 to 6 with method bcd)")
    add("--bcd-layout", choices=LAYOUTS, help="(default: spread; with --bcd-preset pretrain strided)")
    add("--pipeline-model-parallel-size", type=int, metavar="N", help="(default: the smallest that fits)")
    add("--seq-length", type=int, metavar="N", help="(default: the model table's)")
    add("--micro-batch-size", type=int, default=1, metavar="N", help="(default: 1; --search tries powers of two)")
    add("--global-batch-size", type=int, default=DEFAULT_BATCH, metavar="N", help="sequences of an iteration (default:"
        f" {DEFAULT_BATCH})")  # fmt: skip
    add("--recompute", nargs="?", const="full", choices=RECOMPUTE, default="none", help="recompute activations: none,"
        " or full; the bare flag means full (--search tries both)")  # fmt: skip
    add("--precision", choices=PRECISIONS, default="fp32", help="(default: fp32)")
    group = parser.add_argument_group("cost")
    add = group.add_argument
    add("--tokens", type=float, metavar="N", help="tokens that full training would read (default: 20 per parameter)")
    add("--bf-multiplier", type=float, metavar="K", help="iterations of BCD with three blocks over those of full"
        " training to the same loss; with method bcd scaled to other numbers of blocks as in the paper's table 11; with"
        " --compare pretrain's"
        f" (default: {PAPER.value}, {PAPER.source}; method pretrain: {PRETRAIN.value}, {PRETRAIN.source})")  # fmt: skip
    group = parser.add_argument_group("data files")
    add = group.add_argument
    add("--models", metavar="FILE", default=os.path.join(ROOT, "examples", "models.csv"), help="the model table")
    add("--clusters", metavar="FILE", default=os.path.join(ROOT, "examples", "clusters.csv"), help="the cluster table")
    return parser.parse_args(argv)


def method_of(arguments: argparse.Namespace) -> str:
    """--method, or the one of --bcd-preset. Raises ValueError if they differ."""
    method, preset = arguments.method, arguments.bcd_preset
    if preset is None:
        return method or "bcd"
    # bcd is also the method of all presets in general
    if method not in (None, "bcd") and PRESET_OF.get(method) != preset:
        raise ValueError(f"--bcd-preset {preset} cannot be combined with --method {method}; give one of them")
    return next(name for name, known in PRESET_OF.items() if known == preset)


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """The recipe of the flags. Raises ValueError naming a missing or invalid flag."""
    for flag, given in (("--model", arguments.model), ("--gpu", arguments.gpu), ("--num-gpus", arguments.num_gpus)):
        if given is None:
            raise ValueError(f"{flag} is required (except with --paper)")
    fields: dict[str, Any] = {
        "model": choose(read_models(arguments.models), arguments.model, flag="--model"),
        "cluster": choose(read_clusters(arguments.clusters), arguments.gpu, flag="--gpu"),
        "num_gpus": arguments.num_gpus,
        "method": method_of(arguments),
        "num_blocks": arguments.bcd_num_blocks,
        "layout": arguments.bcd_layout,
        "precision": arguments.precision,
        "sequence": arguments.seq_length,
        "micro_batch_size": arguments.micro_batch_size,
        "global_batch_size": arguments.global_batch_size,
        "recompute": arguments.recompute,
    }
    if arguments.pipeline_model_parallel_size is not None:
        return Recipe(pipeline_size=arguments.pipeline_model_parallel_size, **fields)
    suited = valid_pipelines(**fields)
    return suited[0] if arguments.search or arguments.compare else shortest_that_fits(suited)


def paper(arguments: argparse.Namespace) -> Paper:
    """The paper's numbers, recomputed."""
    clusters = read_clusters(arguments.clusters)
    return recompute_paper(
        read_published(os.path.join(ROOT, "docs", "paper_figures.csv")),
        read_models(arguments.models),
        choose(clusters, _PAPER_CLUSTER, flag="--clusters"),
    )


def run(argv: Sequence[str] | None) -> str:
    """The text to print. Raises ValueError for a user's mistake."""
    arguments = parse_arguments(argv)
    modes = [name for name in ("search", "compare", "paper", "verify") if getattr(arguments, name)]
    if len(modes) > 1:
        raise ValueError(f"--{modes[0]} and --{modes[1]} are both given: give one of them")
    if arguments.paper:
        recomputed = paper(arguments)
        return _json(recomputed.as_list()) if arguments.json else show_paper(recomputed)
    recipe = recipe_of(arguments)
    if arguments.verify:
        from _plan_verify import show_counts, verify  # torch takes seconds to import

        counts = verify(recipe)
        return _json(counts) if arguments.json else show_counts(recipe, counts)
    cost = {"tokens": arguments.tokens, "multiplier": arguments.bf_multiplier}
    if arguments.compare:
        if arguments.method or arguments.bcd_preset:
            raise ValueError("--compare shows all methods: leave out --method and --bcd-preset")
        compared = compare(recipe, num_blocks=arguments.bcd_num_blocks, **cost)
        return _json(comparison_as_list(compared)) if arguments.json else show_comparison(compared)
    if arguments.search:
        num_blocks = None if arguments.bcd_num_blocks is None else [arguments.bcd_num_blocks]
        found = search(recipe, num_blocks=num_blocks, **cost)
        if not arguments.json:
            return show_search(found)
        best = [estimate.as_dict() | {"command": _command(estimate)} for estimate in found.best]
        return _json({"tried": found.num_tried, "fitting": found.num_fitting, "best": best})
    estimate = make_estimate(recipe, **cost)
    return _json(estimate.as_dict() | {"command": _command(estimate)}) if arguments.json else show_estimate(estimate)


def _command(estimate: Any) -> str:
    return torchrun_command(estimate.recipe, iterations=estimate.cost.iterations)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1)


def main(argv: Sequence[str] | None = None) -> int:
    # not through megatron.bcd.runtime.exit, which is for several ranks and imports torch
    try:
        print(run(argv), flush=True)
    except ValueError as error:
        print(f"{PROG}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # as with "| head"; Python would raise it again in its final flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
