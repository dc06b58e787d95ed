"""Prints a recipe as bash for examples/pretrain.sh and finetune.sh: the planner's choices, from three tables there.

    python tools/recipe.py whole G-5.4B pretrain rtx4090 --seq-length 512
    python tools/recipe.py tiny=2 L-6.0B paper rtx4090
    python tools/recipe.py here=4 G-20B full a100

The words are whole, tiny=N or here=N, then MODEL, METHOD and CLUSTER, then flags of the training script.
``whole`` prints assignments for bash's eval: flags by concern (MODEL_ARGS, PARALLEL_ARGS, TRAINING_ARGS, METHOD_ARGS),
the user's other flags (EXTRA_ARGS), names and numbers, the estimate as text (PLAN), and MISFIT: why it does not fit and
what would, or empty. ``tiny=N`` scales the flags down to a run of seconds on at most N ranks. ``here=N`` prints only
what fits on N GPUs of one node. This word comes first, so that none of the user's words is mistaken for it. Reads
NUM_GPUS, NNODES, GPUS_PER_NODE, MICRO_BATCH, GLOBAL_BATCH, PRECISION and RECOMPUTE from the environment. No torch.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _parser import Parser, leave_with
from plan import CLUSTERS, ROOT, add_layout_flags, check_flags, layout_fields, named_model, show_figures, words_of

from megatron.bcd.planner.command import SCRIPTS, method_flags, network_flags, parallel_flags, training_flags
from megatron.bcd.planner.estimate import Estimate, make_estimate
from megatron.bcd.planner.recipe import METHODS, PRESET_OF, VOCABULARY_MULTIPLE, Recipe
from megatron.bcd.planner.remedies import remedies
from megatron.bcd.planner.search import place
from megatron.bcd.planner.tables import GIB, choose, read_clusters, read_placements

PROG = "pretrain.sh"
_VARIABLES = {
    "--num-gpus": "NUM_GPUS",
    "--micro-batch-size": "MICRO_BATCH",
    "--global-batch-size": "GLOBAL_BATCH",
    "--precision": "PRECISION",
    "--recompute": "RECOMPUTE",
    "--method": "METHOD",
}
"""The planner's flags and their environment variables; METHOD is a word of the command."""
_BY_THE_RECIPE = {
    **{f"set {name}": flag for flag, name in _VARIABLES.items()},
    "set PRECISION": "--precision --bf16 --fp16",
    "set RECOMPUTE=auto, full or none": "--recompute --recompute-activations --recompute-granularity --recompute-method"
    " --recompute-num-layers",
    "give a row of your own with --models FILE, or a config.json as MODEL": "--num-layers --hidden-size"
    " --num-attention-heads --kv-channels --add-qkv-bias --qk-layernorm --ffn-hidden-size --group-query-attention"
    " --no-group-query-attention --num-query-groups --swiglu --no-swiglu --position-embedding-type"
    " --use-rotary-position-embeddings --untie-embeddings-and-output-weights --no-untie-embeddings-and-output-weights",
    "give --seq-length": "--max-position-embeddings",
    "METHOD decides it; for another, write the command yourself": "--bcd-schedule --bcd-preset --optimizer"
    " --optimizer-cpu-offload --optimizer-offload-fraction --muon-momentum-dtype --muon-grad-dtype --bcd-resting-update"
    " --bcd-resting-layers --bcd-resting-grad-dtype",
    "the estimate covers its default only; write the command yourself": "--tensor-model-parallel-size"
    " --attention-backend --no-use-distributed-optimizer --grad-reduce-in-bf16 --make-vocab-size-divisible-by",
}
"""Flags with which the command would differ from the estimate, by what to do instead."""
_DATA_OF_PRETRAINING = {
    "set DATA_PATH": "--data-path --train-data-path --valid-data-path",
    "set MOCK_DATA=1": "--mock-data",
    "set TOKENIZER_ARGS": "--tokenizer-type",
}
_DATA_OF_FINE_TUNING = {
    "set SAVE, from which all of them follow": "--save --load --save-hf --metrics-file",
    "set DATA": "--data-path --train-data-path --mock-data",
    "set MODEL_DIR": "--load-hf",
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The user's recipe, and flags that do not affect the estimate."""

    recipe: Recipe
    given: Mapping[str, Any]  # arguments of `place` for it, without the number of GPUs
    by_node: bool  # whether the number of GPUs was given per node
    extra: tuple[str, ...]


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """The recipe's flags, and all others in their order. Raises ValueError for a flag that the recipe sets."""
    parser = Parser(prog=PROG, add_help=False)
    add = parser.add_argument
    for name in ("model", "method", "cluster"):
        add(name)
    add_layout_flags(parser)
    arguments, extra = parser.parse_known_args(argv)
    of_data = _DATA_OF_FINE_TUNING if arguments.method == "finetune" else _DATA_OF_PRETRAINING
    instead = {flag: advice for advice, flags in {**_BY_THE_RECIPE, **of_data}.items() for flag in flags.split()}
    for word in extra:
        if (flag := word.split("=", 1)[0]) in instead:
            raise ValueError(f"{flag}: is set by the recipe; {instead[flag]}")
    return arguments, tuple(extra)


def request_of(arguments: argparse.Namespace, extra: tuple[str, ...], environment: Mapping[str, str]) -> Request:
    """Raises ValueError, one line, for a name that no table has, or an invalid combination of numbers."""
    method = "bcd" if arguments.method == PRESET_OF["bcd"] else arguments.method
    if method not in METHODS:
        known = ", ".join(PRESET_OF.get(name, name) for name in METHODS if name != "finetune")
        raise ValueError(f"METHOD {arguments.method}: must be one of {known}, bcd (as paper)")
    check_flags(arguments, method)
    cluster = choose(read_clusters(CLUSTERS), arguments.cluster, flag="CLUSTER")
    num_gpus = _number(environment, "NUM_GPUS")
    nodes, per_node = _number(environment, "NNODES"), _number(environment, "GPUS_PER_NODE")
    by_node = nodes is not None or per_node is not None
    if by_node:  # of the three numbers, two are enough
        if num_gpus is not None and per_node is None and num_gpus % (nodes or 1) == 0:
            per_node = num_gpus // (nodes or 1)
        elif num_gpus is not None and nodes is None and num_gpus % (per_node or 1) == 0:
            nodes = num_gpus // (per_node or 1)
        nodes, per_node = nodes or 1, per_node or cluster.gpus_per_node
        if num_gpus not in (None, nodes * per_node):
            raise ValueError(f"NUM_GPUS={num_gpus} is not NNODES={nodes} x GPUS_PER_NODE={per_node}: give one of them")
        cluster, num_gpus = replace(cluster, gpus_per_node=per_node), nodes * per_node
    task = "sft" if method == "finetune" else "pretrain"
    settings = layout_fields(arguments) | {
        "pipeline_size": arguments.pipeline_size,
        "micro_batch_size": _number(environment, "MICRO_BATCH"),
        "global_batch_size": _number(environment, "GLOBAL_BATCH"),
        "precision": environment.get("PRECISION") or None,
        "recompute": environment.get("RECOMPUTE") or None,
    }
    given = {
        "model": named_model(arguments.model, models=arguments.models, flag="MODEL"),
        "cluster": cluster,
        "method": method,
        "task": task,
        "vocabulary_multiple": VOCABULARY_MULTIPLE[task],
        "placements": read_placements(os.path.join(ROOT, "examples", "methods.csv")),
        **{name: value for name, value in settings.items() if value is not None},
    }
    return Request(recipe=place(num_gpus=num_gpus, **given), given=given, by_node=by_node, extra=extra)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    if text and (not text.isdecimal() or int(text) < 1):
        raise ValueError(f"{name}={text}: must be a whole number, at least 1")
    return int(text) if text else None


def as_bash(request: Request, *, tiny: int | None = None) -> str:
    """Assignments for eval. PLAN is the full recipe's estimate also if the flags are scaled down."""
    estimate = make_estimate(request.recipe)
    shown = request.recipe if tiny is None else scaled_down(request.recipe, num_gpus=tiny)
    values = {
        "MODEL": request.recipe.model.name,
        "CLUSTER": request.recipe.cluster.name,
        "SCRIPT": SCRIPTS[shown.model.form],
        "FORM": shown.model.form,
        "SEQUENCE": shown.tokens,
        "VOCABULARY": shown.model.vocabulary,
        "NUM_NODES": shown.num_nodes,
        "GPUS_PER_NODE": shown.gpus_per_node,
        "NUM_STAGES": shown.pipeline_size,
        "NUM_BLOCKS": shown.partition.num_blocks,
        "ITERATIONS": estimate.cost.iterations,
        "PLAN": show_figures(estimate),
        "MISFIT": misfit(request, estimate),
    }
    arrays: dict[str, Sequence[str]] = {
        "MODEL_ARGS": network_flags(shown),
        "PARALLEL_ARGS": parallel_flags(shown),
        "TRAINING_ARGS": training_flags(shown),
        "METHOD_ARGS": method_flags(shown),
    }
    lines = [f"{name}={shlex.quote(str(value))}" for name, value in values.items()]
    lines += [f"{name}=({' '.join(flags)})" for name, flags in arrays.items()]
    return "\n".join([*lines, f"EXTRA_ARGS=({shlex.join(request.extra)})"])


def scaled_down(recipe: Recipe, *, num_gpus: int = 2) -> Recipe:
    """The same recipe with a small model of the same family, on at most ``num_gpus`` ranks of one node.

    Method, layout, number of blocks (in layout ``stage``: one per stage), precision and recomputation stay, and a
    pipeline stays a pipeline. The vocabulary is ByteLevelTokenizer's.
    """
    model, ranks = recipe.model, min(num_gpus, recipe.num_gpus)
    stages = min(recipe.pipeline_size, ranks)
    small = replace(
        model,
        layers=max(6, stages * (recipe.num_blocks or 3)),
        hidden=64,
        heads=4,
        groups=2 if model.groups < model.heads else 4,
        ffn=2 * round(64 * model.ffn / model.hidden / 2),
        vocabulary=257,
        sequence=64,
        head_dim=0,
        positions=0,
    )
    return replace(
        recipe,
        model=small,
        cluster=replace(recipe.cluster, gpus_per_node=ranks),
        num_gpus=ranks,
        num_blocks=None if recipe.layout == "stage" else recipe.num_blocks,
        pipeline_size=stages,
        context_size=1,
        sequence=None,
        micro_batch_size=2,
        global_batch_size=8,
    )


def misfit(request: Request, estimate: Estimate) -> str:
    """Why it does not fit, and what would; empty if it fits."""
    if estimate.fits:
        return ""
    recipe = estimate.recipe
    return (
        f"{recipe.model.name} with METHOD {recipe.method} does not fit on {recipe.num_gpus} x {recipe.cluster.gpu}: "
        f"{estimate.peak.total / GIB:.1f} of {recipe.cluster.memory_gib:g} GiB estimated; {what_fits(recipe, request)}"
    )


def what_fits(recipe: Recipe, request: Request, *, is_here: bool = False) -> str:
    """Settings, methods and, but for GPUs that are here, numbers of GPUs with which a recipe fits."""
    given = {field.name: getattr(recipe, field.name) for field in fields(recipe) if field.name != "pipeline_size"}
    found = []
    for remedy in remedies(given, pipeline_size=request.given.get("pipeline_size")):
        if is_here and "num_gpus" in remedy.changes:
            continue
        text = as_variables(" ".join(words_of(remedy.changes)))
        if request.by_node and "num_gpus" in remedy.changes:
            number = f"NNODES={remedy.recipe.num_nodes} GPUS_PER_NODE={remedy.recipe.gpus_per_node}"
            text = text.replace(f"NUM_GPUS={remedy.recipe.num_gpus}", number)
        found.append(text)
    if not found:
        return "nothing fits: take a smaller model, a GPU with more memory or a shorter --seq-length"
    return f"would fit: {', or '.join(found)}"


def on_gpus_here(request: Request, here: int) -> str:
    """What fits on this node's GPUs, in a recipe's settings."""
    cluster = request.given["cluster"]
    settings = {**request.given, "cluster": replace(cluster, gpus_per_node=max(here, cluster.gpus_per_node))}
    recipe = place(num_gpus=here, **settings)
    number = f"NNODES=1 GPUS_PER_NODE={here}" if request.by_node else f"NUM_GPUS={here}"
    estimate = make_estimate(recipe)
    return f"{number} would fit" if estimate.fits else f"with {number} {what_fits(recipe, request, is_here=True)}"


def as_variables(text: str) -> str:
    """Flags that have an environment variable, by its name."""
    for flag, name in _VARIABLES.items():
        text = text.replace(f"{flag} ", f"{name} " if name == "METHOD" else f"{name}=")
    return text


def run(argv: Sequence[str] | None, environment: Mapping[str, str]) -> str:
    """The text to print. Raises ValueError for a user's mistake."""
    purpose, *words = (sys.argv[1:] if argv is None else argv) or [""]
    if purpose in ("-h", "--help"):
        return str(__doc__)
    name, _, number = purpose.partition("=")
    if not (purpose == "whole" or name in ("tiny", "here") and number.isdecimal()):
        raise ValueError("the first word must be whole, tiny=N or here=N; start examples/pretrain.sh, which gives it")
    request = request_of(*parse_arguments(words), environment)
    if name == "here":
        return on_gpus_here(request, int(number))
    return as_bash(request, tiny=int(number) if name == "tiny" else None)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        print(run(argv, os.environ))
    except ValueError as error:
        print(f"{PROG}: error: {as_variables(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    leave_with(main)
