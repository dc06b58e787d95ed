"""Print the tables of studies/rtx4090.md: models from 7B to 70B on one, two and four RTX 4090s.

    python studies/rtx4090.py [--model NAME] [--num-gpus N] [--every-layer]

With --every-layer plans are those of `tools/plan.py --task sft` that train every layer; otherwise those of
`--bcd-inactive-update none --bcd-layers-on host`, and the cheapest layout of --method offload. A step has 64 sequences;
nothing ran on a GPU. The last column was measured by LLMQ's authors: full training in bf16 (arXiv 2512.15306).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tools"))

import plan

from megatron.bcd.planner.estimate import Estimate, make_estimate
from megatron.bcd.planner.memory import node_bytes
from megatron.bcd.planner.search import search
from megatron.bcd.planner.tables import GIB, read_models

MODELS = str(Path(__file__).with_name("rtx4090.csv"))
LLMQ = {
    ("Qwen2.5-7B", 1): 2777,
    ("Qwen2.5-14B", 1): 1349,
    ("Qwen2.5-7B", 4): 10900,
    ("Qwen2.5-14B", 4): 5260,
    ("Qwen2.5-32B", 4): 2205,
}
"""Tokens per second that LLMQ publishes for models of this size, by model and number of RTX 4090s."""
COLUMNS = (
    "model", "GPUs", "PP x DP", "blocks", "micro-batch, recomputation", "GiB of 23.6", "host GiB", "copies not hidden",
    "tokens/s, planned", "full training with offload, planned", "full training by LLMQ, measured by its authors",
)  # fmt: skip
"""Column titles. Host memory is per rank."""


EVERY_LAYER = (
    "model", "GPUs", "PP x DP", "inactive layers, saved inputs", "GiB of a GPU", "node GB, to save",
    "fits 64 128 256 GB", "tokens/s, planned", "full training by LLMQ, measured by its authors",
)  # fmt: skip
"""Column titles with --every-layer."""
CARDS = (("rtx4090", 1), ("rtx4090", 2), ("rtx4090", 4), ("h100", 1))


def plan_flags(model: str, num_gpus: int, *more: str, gpu: str = "rtx4090") -> list[str]:
    words = ["--task", "sft", "--models", MODELS, "--model", model, "--gpu", gpu, "--num-gpus", str(num_gpus)]
    return [*words, "--global-batch-size", "64", *more]


def plan_blocks(model: str, num_gpus: int) -> Estimate:
    flags = plan_flags(model, num_gpus, "--bcd-inactive-update", "none", "--bcd-layers-on", "host")
    return make_estimate(plan.recipe_of(plan.parse_arguments(flags)))


def plan_offload(model: str, num_gpus: int) -> Estimate | None:
    """Plan full training with the optimizer on the host, in its cheapest layout."""
    flags = plan_flags(model, num_gpus, "--method", "offload", "--search")
    return next(iter(search(plan.recipe_of(plan.parse_arguments(flags)))), None)


def row(model: str, num_gpus: int) -> list[str]:
    ours, offload, measured = plan_blocks(model, num_gpus), plan_offload(model, num_gpus), LLMQ.get((model, num_gpus))
    recipe = ours.recipe
    if not ours.fits:
        raise ValueError(f"{model} does not fit on {num_gpus}")
    return [
        model,
        str(num_gpus),
        f"{recipe.pipeline_size} x {recipe.data_size}",
        str(recipe.partition.num_blocks),
        f"{recipe.micro_batch_size}, {recipe.recompute}",
        f"{ours.peak.total / GIB:.1f}",
        f"{ours.host_bytes / GIB:.0f}",
        f"{100 * ours.copy_share:.0f} %",
        f"{ours.tokens_per_second:,.0f}",
        f"{offload.tokens_per_second:,.0f}, {offload.host_bytes / GIB:.0f} GiB" if offload else "does not fit",
        f"{measured:,}" if measured else "",
    ]


def every_layer_row(model: str, gpu: str, num_gpus: int) -> list[str]:
    ours = make_estimate(plan.recipe_of(plan.parse_arguments(plan_flags(model, num_gpus, gpu=gpu))))
    recipe, measured = ours.recipe, LLMQ.get((model, num_gpus)) if gpu == "rtx4090" else None
    start = [model, f"{num_gpus} x {recipe.cluster.gpu}"]
    if not recipe.is_factored:
        return [*start, "", "does not fit", "", "", "", "", f"{measured:,}" if measured else ""]
    places = "host" if recipe.is_streamed else "device"
    places += f", {recipe.config.bcd.bcd_saved_inputs}" if recipe.config.is_breadth_first else ", none"
    need = node_bytes(recipe) / 1e9
    return [
        *start,
        f"{recipe.pipeline_size} x {recipe.data_size}",
        places,
        f"{ours.peak.total / GIB:.1f} of {recipe.cluster.memory_gib:g}",
        f"{recipe.gpus_per_node * ours.host_bytes / 1e9:,.0f}, {need:,.0f}",
        " ".join("yes" if need <= limit else "no" for limit in (64, 128, 256)),
        f"{ours.tokens_per_second:,.0f}",
        f"{measured:,}" if measured else "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="only this row of studies/rtx4090.csv")
    parser.add_argument("--num-gpus", type=int)
    parser.add_argument("--every-layer", action="store_true", help="print the table of plans that train every layer")
    arguments = parser.parse_args()
    columns = EVERY_LAYER if arguments.every_layer else COLUMNS
    lines = [columns, ["---"] * len(columns)]
    for model in [arguments.model] if arguments.model else read_models(MODELS):
        for gpu, num_gpus in CARDS:
            if arguments.num_gpus not in (None, num_gpus) or not arguments.every_layer and gpu != "rtx4090":
                continue
            lines.append(every_layer_row(model, gpu, num_gpus) if arguments.every_layer else row(model, num_gpus))
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))


if __name__ == "__main__":
    main()
