"""Print a recipe as bash for examples/pretrain.sh and finetune.sh. The planner chooses it, from three tables there.

    python tools/recipe.py whole G-5.4B pretrain rtx4090 --seq-length 512
    python tools/recipe.py tiny=2 L-6.0B paper rtx4090

The words are whole or tiny=N, then MODEL, METHOD and CLUSTER, then flags of the planner and of the training script.
``whole`` prints assignments for bash's eval: flags of the model (MODEL_ARGS), of ranks, batch and method (LAYOUT_ARGS),
and those that the planner does not have (EXTRA_ARGS); names and numbers; the estimate as text (PLAN). MISFIT is empty,
or says why the recipe does not fit and what would. ``tiny=N`` scales the flags down to a run of seconds on at most N
ranks. It comes first, so that it cannot be one of the user's words. NUM_GPUS, MICRO_BATCH, GLOBAL_BATCH, PRECISION
and RECOMPUTE in the environment are flags of the planner; NNODES and GPUS_PER_NODE say where the GPUs
are. No torch.
"""

from __future__ import annotations

import csv
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _parser import Parser, print_error, run_main
from plan import (
    ROOT,
    SFT_DEFAULTS,
    add_recipe_flags,
    host_misfit,
    reason_for_rule,
    recipe_values,
    show_figures,
    words_of,
)

from megatron.bcd.planner.command import SCRIPTS, layout_flags, network_flags
from megatron.bcd.planner.estimate import Estimate
from megatron.bcd.planner.findings import learning_rate
from megatron.bcd.planner.recipe import METHODS, PRESET_OF, Recipe
from megatron.bcd.planner.search import place, remedies
from megatron.bcd.planner.tables import GIB, Cluster

PROG = "pretrain.sh"
_VARIABLES = {
    "NUM_GPUS": "--num-gpus",
    "MICRO_BATCH": "--micro-batch-size",
    "GLOBAL_BATCH": "--global-batch-size",
    "PRECISION": "--precision",
    "RECOMPUTE": "--recompute",
}
_WORDS = {"--model": "MODEL", "--method": "METHOD", "--gpu": "CLUSTER"}
"""The planner's flags that a recipe has as words."""
_BY_THE_RECIPE = {
    "give --recompute": "--recompute-activations --recompute-granularity --recompute-method --recompute-num-layers",
    "give a row of your own with --models FILE, or a config.json as MODEL": "--num-layers --hidden-size"
    " --num-attention-heads --kv-channels --add-qkv-bias --qk-layernorm --ffn-hidden-size --group-query-attention"
    " --no-group-query-attention --num-query-groups --swiglu --no-swiglu --position-embedding-type"
    " --use-rotary-position-embeddings --untie-embeddings-and-output-weights --no-untie-embeddings-and-output-weights",
    "give --seq-length": "--max-position-embeddings",
    "METHOD decides it. For another value write the command yourself": "--bcd-preset --optimizer"
    " --optimizer-cpu-offload --optimizer-offload-fraction --muon-grad-dtype"
    " --bcd-inactive-grad-dtype --bcd-embedding-update",
    "the estimate covers its default only. Write the command yourself": "--tensor-model-parallel-size"
    " --attention-backend --grad-reduce-in-bf16 --make-vocab-size-divisible-by",
}
"""Flags that would make the command differ from the estimate, by what to do instead."""
_DATA = {
    "pretrain": {
        "set DATA_PATH": "--data-path --train-data-path --valid-data-path",
        "set MOCK_DATA=1": "--mock-data",
        "set TOKENIZER_ARGS": "--tokenizer-type",
    },
    "sft": {
        "set SAVE, which decides all of them": "--save --load --save-hf --metrics-file",
        "set DATA": "--data-path --train-data-path --mock-data",
        "set MODEL_DIR": "--load-hf",
    },
}
"""The same by task."""


def request_of(words: Sequence[str], environment: Mapping[str, str]) -> tuple[Recipe, dict[str, Any], list[str]]:
    """Read the words MODEL, METHOD and CLUSTER, and the flags.

    Returns:
        The recipe; the values that were given for it, with None for the planner's choice; and the other flags.

    Raises:
        ValueError: for a flag that the recipe sets, a name that no table has, or an invalid combination of numbers.
    """
    parser = Parser(prog=PROG, add_help=False)
    for name in ("model", "method", "gpu"):
        parser.add_argument(name, metavar=_WORDS[f"--{name}"])
    add_recipe_flags(parser)
    task = "sft" if "finetune" in words[1:2] else "pretrain"
    parser.set_defaults(**(SFT_DEFAULTS if task == "sft" else {}) | {"recompute": None, "task": task})
    variables = [f"{flag}={environment[name]}" for name, flag in _VARIABLES.items() if environment.get(name)]
    arguments, extra = parser.parse_known_args([*variables, *words])
    instead = {flag: advice for advice, flags in (_BY_THE_RECIPE | _DATA[task]).items() for flag in flags.split()}
    for word in extra:
        if (flag := word.split("=", 1)[0]) in instead:
            raise ValueError(f"{flag}: is set by the recipe; {instead[flag]}")
    method = "bcd" if arguments.method == PRESET_OF["bcd"] else arguments.method
    if method not in METHODS:
        known = ", ".join(PRESET_OF.get(name, name) for name in METHODS if name != "finetune")
        raise ValueError(f"METHOD {method}: must be one of {known}, bcd (the same as paper)")
    values = recipe_values(arguments, method)
    values["cluster"], values["num_gpus"] = _nodes(values["cluster"], values["num_gpus"], environment)
    return place(**values | _row_of(values)).checked(), values, extra


def _row_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the GPUs of a request in examples/methods.csv, which are one pipeline, if it leaves their number open."""
    with open(os.path.join(ROOT, "examples", "methods.csv"), encoding="utf-8") as table:
        rows = {tuple(row[:3]): row[3:5] for row in csv.reader(table)}
    row = rows.get((values["method"], values["model"].name, values["cluster"].name))
    if row is None or values["num_gpus"] is not None or values["bcd_layout"] == "stage":
        return {}
    nodes, per_node = map(int, row)
    stages = values["pipeline_model_parallel_size"] or nodes * per_node
    gpus = {"cluster": replace(values["cluster"], gpus_per_node=per_node), "num_gpus": nodes * per_node}
    return gpus | {"pipeline_model_parallel_size": stages}


def _nodes(cluster: Cluster, num_gpus: int | None, environment: Mapping[str, str]) -> tuple[Cluster, int | None]:
    """Return the cluster with GPUS_PER_NODE, and the number of GPUs. Two of the three numbers are enough."""
    nodes, per_node = (_number(environment, name) for name in ("NNODES", "GPUS_PER_NODE"))
    if nodes is None and per_node is None:
        return cluster, num_gpus
    nodes = nodes or (num_gpus or 1) // (per_node or 1) or 1
    per_node = per_node or (cluster.gpus_per_node if num_gpus is None else num_gpus // nodes or 1)
    if num_gpus not in (None, nodes * per_node):
        product = f"NNODES={nodes} x GPUS_PER_NODE={per_node}"
        raise ValueError(f"--num-gpus {num_gpus}: is not {product}. Give one of them.")
    return replace(cluster, gpus_per_node=per_node), nodes * per_node


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    if text and (not text.isdecimal() or int(text) < 1):
        raise ValueError(f"{name}={text}: must be a whole number, at least 1")
    return int(text) if text else None


def as_bash(recipe: Recipe, values: Mapping[str, Any], extra: Sequence[str], *, tiny: int | None = None) -> str:
    """Return assignments for eval. PLAN is the whole recipe's estimate even if the flags are scaled down."""
    estimate = Estimate(recipe=recipe)
    shown = recipe if tiny is None else scaled_down(recipe, num_gpus=tiny)
    misfit = ""
    if not estimate.fits:
        device = f"{estimate.peak.total / GIB:.1f} of {recipe.cluster.memory_gib:g} GiB estimated"
        misfit = (
            f"{recipe.model.name} with METHOD {recipe.method} does not fit on {recipe.num_gpus} x "
            f"{recipe.cluster.gpu}: {host_misfit(recipe) or device}; {what_fits(recipe, values)}"
        )
    variables = {
        "MODEL": recipe.model.name,
        "CLUSTER": recipe.cluster.name,
        "SCRIPT": SCRIPTS[shown.model.form],
        "FORM": shown.model.form,
        "SEQUENCE": shown.tokens,
        "VOCABULARY": shown.model.vocabulary,
        "NUM_NODES": shown.num_nodes,
        "GPUS_PER_NODE": shown.gpus_per_node,
        "NUM_STAGES": shown.pipeline_size,
        "NUM_BLOCKS": shown.partition.num_blocks,
        "ITERATIONS": estimate.cost.iterations,
        "LEARNING_RATE": learning_rate(recipe)[0],
        "PLAN": show_figures(estimate),
        "REASON": " ".join(reason_for_rule(recipe).split()) if recipe.method == "finetune" else "",
        "MISFIT": misfit,
    }
    arrays = {
        "MODEL_ARGS": network_flags(shown),
        "LAYOUT_ARGS": layout_flags(shown),
        "EXTRA_ARGS": [shlex.quote(word) for word in extra],
    }
    lines = [f"{name}={shlex.quote(str(value))}" for name, value in variables.items()]
    return "\n".join([*lines, *(f"{name}=({' '.join(flags)})" for name, flags in arrays.items())])


def what_fits(recipe: Recipe, values: Mapping[str, Any]) -> str:
    """Return flags and methods with which the recipe fits."""
    values = {**values, "num_gpus": recipe.num_gpus, "cluster": recipe.cluster}
    fixes = [" ".join(words_of(changes)) for changes, _ in remedies(values, place)]
    if not fixes:
        return "nothing fits. Take a smaller model, a GPU with more memory or a shorter --seq-length."
    return f"would fit: {in_words(', or '.join(fixes))}"


def scaled_down(recipe: Recipe, *, num_gpus: int = 2) -> Recipe:
    """Return the recipe with a small model of the same family, on at most ``num_gpus`` ranks of one node.

    Method, layout, number of blocks (in layout ``stage``: one per stage), precision and recomputation do not change,
    and a pipeline remains a pipeline. The vocabulary is ByteLevelTokenizer's.
    """
    model, ranks = recipe.model, min(num_gpus, recipe.num_gpus)
    stages, num_blocks = min(recipe.pipeline_size, ranks), recipe.flag("bcd_num_blocks")
    small = replace(
        model,
        layers=max(6, stages * (num_blocks or 3)),
        hidden=64,
        heads=4,
        groups=2 if model.groups < model.heads else 4,
        ffn=2 * round(64 * model.ffn / model.hidden / 2),
        vocabulary=257,
        sequence=64,
        head_dim=0,
        positions=0,
    )
    return recipe.changed(
        model=small,
        cluster=replace(recipe.cluster, gpus_per_node=ranks),
        num_gpus=ranks,
        bcd_num_blocks=None if recipe.flag("bcd_layout") == "stage" else num_blocks,
        pipeline_model_parallel_size=stages,
        context_parallel_size=1,
        seq_length=None,
        micro_batch_size=2,
        global_batch_size=8,
    )


def in_words(text: str) -> str:
    """Return the text with words of a recipe in place of the planner's flags."""
    for flag, word in _WORDS.items():
        text = text.replace(f"{flag} ", f"{word} ")
    return text


def run(argv: Sequence[str] | None, environment: Mapping[str, str]) -> str:
    """Return the text to print. Raises ValueError for a user's mistake."""
    purpose, *words = (sys.argv[1:] if argv is None else argv) or [""]
    if purpose in ("-h", "--help"):
        return str(__doc__)
    name, _, number = purpose.partition("=")
    if purpose != "whole" and not (name == "tiny" and number.isdecimal()):
        raise ValueError("the first word must be whole or tiny=N. Start examples/pretrain.sh, which gives it.")
    return as_bash(*request_of(words, environment), tiny=int(number) if number else None)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the recipe and return the exit code."""
    try:
        print(run(argv, os.environ))
    except ValueError as error:
        return print_error(PROG, in_words(str(error)))
    return 0


if __name__ == "__main__":
    run_main(main)
