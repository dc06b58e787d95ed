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
from _plan_flags import add_memory_flags, flags_of, memory_fields, named_model, refuse_blocks_without, words_of
from _plan_output import show_figures

from megatron.bcd.config import LAYOUTS
from megatron.bcd.planner.command import SCRIPTS, method_flags, network_flags, parallel_flags, training_flags
from megatron.bcd.planner.estimate import Estimate, make_estimate
from megatron.bcd.planner.memory import fits
from megatron.bcd.planner.placement import fit_on, grow_until_fits, place, scaled_down
from megatron.bcd.planner.recipe import METHODS, PRESET_OF, VOCABULARY_MULTIPLE, Recipe
from megatron.bcd.planner.remedies import remedies
from megatron.bcd.planner.tables import GIB, choose, read_clusters, read_placements

PROG = "pretrain.sh"
EXAMPLES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "examples")

_VARIABLES = {
    "--num-gpus": "NUM_GPUS",
    "--micro-batch-size": "MICRO_BATCH",
    "--global-batch-size": "GLOBAL_BATCH",
    "--precision": "PRECISION",
    "--recompute": "RECOMPUTE",
}
"""The planner's flags and their environment variables."""
_ELSEWHERE = {
    **{flag: f"set {name}" for flag, name in _VARIABLES.items()},
    **dict.fromkeys(("--bf16", "--fp16"), "set PRECISION"),
    **dict.fromkeys(
        ("--recompute-activations", "--recompute-granularity", "--recompute-method", "--recompute-num-layers"),
        "set RECOMPUTE=auto, full or none",
    ),
    **dict.fromkeys(
        (
            "--num-layers",
            "--hidden-size",
            "--num-attention-heads",
            "--kv-channels",
            "--add-qkv-bias",
            "--qk-layernorm",
            "--ffn-hidden-size",
            "--group-query-attention",
            "--no-group-query-attention",
            "--num-query-groups",
            "--swiglu",
            "--no-swiglu",
            "--position-embedding-type",
            "--use-rotary-position-embeddings",
            "--untie-embeddings-and-output-weights",
            "--no-untie-embeddings-and-output-weights",
        ),
        "give a row of your own with --models FILE, or a config.json as MODEL",
    ),  # fmt: skip
    **dict.fromkeys(("--optimizer-cpu-offload", "--optimizer-offload-fraction"), "take METHOD offload"),
    **dict.fromkeys(("--data-path", "--train-data-path", "--valid-data-path"), "set DATA_PATH"),
    "--mock-data": "set MOCK_DATA=1",
    "--tokenizer-type": "set TOKENIZER_ARGS",
    "--bcd-schedule": "METHOD decides it",
    "--bcd-preset": "take METHOD pretrain or paper",
    "--max-position-embeddings": "give --seq-length",
    **{
        flag: f"the estimate covers {covered} only; write the command yourself"
        for flag, covered in {
            "--tensor-model-parallel-size": "tensor-parallel size 1",
            "--attention-backend": "the default attention",
            "--optimizer": "the method's optimizer",
            "--muon-momentum-dtype": "the preset's momentum",
            "--muon-grad-dtype": "the preset's gradients",
            "--bcd-resting-update": "the preset's resting update",
            "--bcd-resting-layers": "the preset's resting layers",
            "--bcd-resting-grad-dtype": "the preset's gradients",
            "--no-use-distributed-optimizer": "the distributed optimizer",
            "--grad-reduce-in-bf16": "gradients in fp32",
            "--make-vocab-size-divisible-by": "the default padding of the vocabulary",
        }.items()
    },
}
"""Flags with which the command would differ from the estimate, and what to do instead."""
_OF_FINE_TUNING = {
    **{
        flag: remedy
        for flag, remedy in _ELSEWHERE.items()
        if flag not in ("--data-path", "--train-data-path", "--valid-data-path", "--tokenizer-type", "--mock-data")
    },
    **dict.fromkeys(
        ("--optimizer-cpu-offload", "--optimizer-offload-fraction"),
        "the estimate covers the preset's optimizer only; write the command yourself",
    ),
    "--bcd-schedule": "the preset decides it",
    "--bcd-preset": "it is finetune; write the command yourself for another",
}
"""The same for examples/finetune.sh, which has other variables."""
_PLACES_OF_FINE_TUNING = {
    **dict.fromkeys(("--save", "--load", "--save-hf", "--metrics-file"), "set SAVE, from which all of them follow"),
    **dict.fromkeys(("--data-path", "--train-data-path"), "set DATA"),
    "--load-hf": "set MODEL_DIR",
    "--mock-data": "fine-tuning needs records; set DATA",
}
"""Flags whose values examples/finetune.sh gives and uses itself."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The user's recipe, and flags that do not affect the estimate."""

    recipe: Recipe
    given: Mapping[str, Any]
    """Arguments of ``place`` for it, without the number of GPUs."""
    by_node: bool
    """Whether the number of GPUs was given per node."""
    extra: tuple[str, ...]


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """The recipe's flags, and all others in their order. Raises ValueError for a flag that the recipe sets."""
    parser = Parser(prog=PROG, add_help=False)
    add = parser.add_argument
    for name in ("model", "method", "cluster"):
        add(name)
    add("--models")
    add("--bcd-num-blocks", type=int)
    add("--bcd-layout", choices=LAYOUTS)
    add("--pipeline-model-parallel-size", type=int)
    add("--seq-length", type=int)
    add_memory_flags(parser)
    arguments, extra = parser.parse_known_args(argv)
    is_fine_tuning = arguments.method == "finetune"
    elsewhere, places = (_OF_FINE_TUNING, _PLACES_OF_FINE_TUNING) if is_fine_tuning else (_ELSEWHERE, {})
    for word in extra:
        flag = word.split("=", 1)[0]
        if flag in places:
            raise ValueError(f"{flag}: is set by the recipe; {places[flag]}")
        if flag in elsewhere:
            raise ValueError(f"{flag}: is set by the recipe, because the estimate depends on it; {elsewhere[flag]}")
    return arguments, tuple(extra)


def request_of(arguments: argparse.Namespace, extra: tuple[str, ...], environment: Mapping[str, str]) -> Request:
    """Raises ValueError, one line, for a name that no table has, or an invalid combination of numbers."""
    model = named_model(arguments.model, models=arguments.models, flag="MODEL")
    cluster = choose(read_clusters(os.path.join(EXAMPLES, "clusters.csv")), arguments.cluster, flag="CLUSTER")
    method = "bcd" if arguments.method == PRESET_OF["bcd"] else arguments.method
    if method not in METHODS:
        known = ", ".join(PRESET_OF.get(name, name) for name in METHODS if name != "finetune")
        raise ValueError(f"METHOD {arguments.method}: must be one of {known}, bcd (as paper)")
    refuse_blocks_without(arguments, method)
    settings = memory_fields(arguments) | {
        "num_blocks": arguments.bcd_num_blocks,
        "layout": arguments.bcd_layout,
        "pipeline_size": arguments.pipeline_model_parallel_size,
        "sequence": arguments.seq_length,
        "micro_batch_size": _number(environment, "MICRO_BATCH"),
        "global_batch_size": _number(environment, "GLOBAL_BATCH"),
        "precision": environment.get("PRECISION") or None,
        "recompute": environment.get("RECOMPUTE") or None,
    }
    num_gpus = _number(environment, "NUM_GPUS")
    nodes, per_node = _number(environment, "NNODES"), _number(environment, "GPUS_PER_NODE")
    by_node = nodes is not None or per_node is not None
    if num_gpus is not None and by_node:  # of the three numbers, two are enough
        if per_node is None and nodes is not None and num_gpus % nodes == 0:
            per_node = num_gpus // nodes
        elif nodes is None and per_node is not None and num_gpus % per_node == 0:
            nodes = num_gpus // per_node
    if by_node:
        cluster = replace(cluster, gpus_per_node=per_node or cluster.gpus_per_node)
        together = (nodes or 1) * cluster.gpus_per_node
        if num_gpus not in (None, together):
            raise ValueError(
                f"NUM_GPUS={num_gpus} is not NNODES={nodes or 1} x GPUS_PER_NODE={cluster.gpus_per_node}: "
                "give one or the other"
            )
        num_gpus = together
    task = "sft" if method == "finetune" else "pretrain"
    given = {
        "model": model,
        "cluster": cluster,
        "method": method,
        "task": task,
        "vocabulary_multiple": VOCABULARY_MULTIPLE[task],
        "placements": read_placements(os.path.join(EXAMPLES, "methods.csv")),
        **{name: value for name, value in settings.items() if value is not None},
    }
    return Request(recipe=place(num_gpus=num_gpus, **given), given=given, by_node=by_node, extra=extra)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}={text}: must be a whole number, at least 1")
    return int(text)


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


def misfit(request: Request, estimate: Estimate) -> str:
    """Why it does not fit, and what would; empty if it fits."""
    if estimate.fits:
        return ""
    recipe = estimate.recipe
    settings = "".join(f"{words} or " for words in settings_that_fit(recipe)) if recipe.method == "finetune" else ""
    return (
        f"{recipe.model.name} with METHOD {recipe.method} does not fit on {recipe.num_gpus} x {recipe.cluster.gpu}: "
        f"{estimate.peak.total / GIB:.1f} of {recipe.cluster.memory_gib:g} GiB estimated; {settings}{remedy(request)}"
    )


def settings_that_fit(recipe: Recipe) -> list[str]:
    """Flags and variables with which it fits on its GPUs."""
    given = {field.name: getattr(recipe, field.name) for field in fields(recipe) if field.name != "pipeline_size"}
    found = remedies(given, pipeline_size=recipe.pipeline_size)
    kept = [each.changes for each in found if not {"method", "num_gpus"} & each.changes.keys()]
    return [as_variables(" ".join(words_of(flags_of(changes)))) for changes in kept]


def as_variables(text: str) -> str:
    """Flags that have an environment variable, by its name."""
    for flag, name in _VARIABLES.items():
        text = text.replace(f"{flag} ", f"{name}=")
    return text


def remedy(request: Request) -> str:
    """The fewest GPUs on which it would fit, with as few changed settings as possible."""
    eased, changes = dict(request.given), []
    for setting, value, words in (
        ("", None, ""),
        ("micro_batch_size", 1, "MICRO_BATCH=1"),
        ("recompute", "auto", "RECOMPUTE=auto"),
        ("pipeline_size", None, "no --pipeline-model-parallel-size"),
    ):
        if setting:
            if eased.pop(setting, value) == value:
                continue
            eased |= {} if value is None else {setting: value}
            changes.append(words)
        *_, last = grow_until_fits(**eased)
        if fits(last):
            number = f"NUM_GPUS={last.num_gpus}"
            if request.by_node:
                number = f"NNODES={last.num_nodes} GPUS_PER_NODE={last.gpus_per_node}"
            return f"{number}{' with ' * bool(changes)}{' and '.join(changes)} would fit"
    return "no number of GPUs is enough: take a smaller model, a GPU with more memory or a shorter --seq-length"


def on_gpus_here(request: Request, here: int) -> str:
    """The method that fits on this node's GPUs, in a recipe's settings."""
    other = fit_on(here, **request.given)
    if other is None:
        return f"no method fits on these; with METHOD {request.recipe.method} {remedy(request)}"
    number = f"NNODES=1 GPUS_PER_NODE={here}" if request.by_node else f"NUM_GPUS={here}"
    return f"METHOD {other.method} with {number} would fit"


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
