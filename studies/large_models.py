"""Plan models from 7B to 70B on RTX 4090s and one H100. studies/large_models.md has most of the rows.

    python studies/large_models.py [--model NAME]

A step has 64 sequences of 1,024 tokens. Each plan is the fastest layout of its method within 95 % of the memory of the
GPUs and 64, 128 or 256 GB of a node's host memory, checkpoints included. Nothing ran on a GPU, except what other
systems' authors published.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import plan

from megatron.bcd.planner.estimate import Estimate
from megatron.bcd.planner.memory import fits, node_bytes
from megatron.bcd.planner.recipe import Recipe, build_recipe
from megatron.bcd.planner.search import candidates, with_passes_on_host
from megatron.bcd.planner.tables import Model, read_table

MODELS = Path(__file__).with_suffix(".csv")
CARDS = (("rtx4090", 1), ("rtx4090", 4), ("h100", 1))
MOMENTS = ("--adam-moments-dtype", "int8")
ON_HOST = ("--bcd-layers-on", "host")
METHODS = {
    "factored": ("--bcd-inactive-update", "factored"),
    "factored, FP8": ("--bcd-inactive-update", "factored", "--precision", "fp8"),
    "full Muon, streamed": ("--method", "muon", *ON_HOST, *MOMENTS, "--muon-momentum-dtype", "int8"),
    "full Adam in 8 bits, streamed": ("--method", "full", *ON_HOST, *MOMENTS),
    "blocks": ("--bcd-inactive-update", "none", *ON_HOST, "--bcd-head-phase", *MOMENTS),
}
"""The planner's flags of each planned column, beside --task sft."""
PUBLISHED = {
    "LLMQ": {
        "rtx4090": {"Qwen2.5-7B": {1: 2777, 4: 10900}, "Qwen2.5-14B": {1: 1349, 4: 5260}, "Qwen2.5-32B": {4: 2205}},
        "h100": {"Qwen2.5-7B": {1: 14000}, "Qwen2.5-14B": {1: 6300}},
    },
    "LLMQ, FP8": {
        "rtx4090": {"Qwen2.5-7B": {1: 4333, 4: 16489}, "Qwen2.5-14B": {1: 2001, 4: 7837}, "Qwen2.5-32B": {4: 3395}},
        "h100": {"Qwen2.5-7B": {1: 19176}, "Qwen2.5-14B": {1: 9370}},
    },
    "LLaMA-Factory, ZeRO-3": {
        "rtx4090": {"Qwen2.5-7B": {1: 2523, 4: 6929}, "Qwen2.5-14B": {1: 1135, 4: 2630}},
    },
}
"""Tokens per second of full training (bf16 unless it says FP8) with random weights of these sizes, measured by LLMQ's
authors (arXiv 2512.15306 and the benchmarks of github.com/IST-DASLab/llmq at b77d969)."""
HOST_GB = (64, 128, 256)
COLUMNS = ("model", "GPUs", *METHODS, f"measured: {'; '.join(PUBLISHED)}")
_GAIN = 1.1
"""How much faster a plan with more host memory must be to be shown."""


def plans(model: str, gpu: str, num_gpus: int, method: str) -> Iterator[tuple[float, Recipe]]:
    """Yield the fastest plans: the host memory of a node in GB, and the recipe; less memory first.

    With the most of HOST_GB, activations may wait there. A plan that needs more is yielded only if none needs less.
    """
    words = ["--task", "sft", "--models", str(MODELS), "--model", model, "--gpu", gpu, "--num-gpus", str(num_gpus)]
    words += ["--global-batch-size", "64", *METHODS[method]]
    values = plan.searched_values(plan.parse_arguments(words)) | {"memory_share": 0.95, "host_memory_gb": None}
    fitting = [recipe for recipe in candidates(values) if fits(recipe, share=recipe.memory_share)]
    by_time = sorted(fitting, key=_seconds)
    fastest = float("inf")
    for limit in HOST_GB:
        within = (recipe for recipe in by_time if node_bytes(recipe) <= 1e9 * limit)
        recipe = next(within, None)
        if recipe and limit == HOST_GB[-1]:
            recipe = with_passes_on_host(build_recipe(**recipe.values | {"host_memory_gb": limit}))
        if recipe and fastest > _GAIN * (seconds := _seconds(recipe)):
            fastest = seconds
            yield limit, recipe
    if by_time and fastest == float("inf"):
        yield node_bytes(by_time[0]) / 1e9, by_time[0]


def _seconds(recipe: Recipe) -> float:
    return Estimate(recipe=recipe).iteration_seconds


def cell(model: str, gpu: str, num_gpus: int, method: str) -> str:
    """Return tokens per second of the plans, each with its host memory."""
    found = plans(model, gpu, num_gpus, method)
    texts = (f"{Estimate(recipe=recipe).tokens_per_second:,.0f} ({limit:.0f} GB)" for limit, recipe in found)
    return ", ".join(texts) or "no"


def row(model: str, gpu: str, num_gpus: int) -> list[str]:
    cells = [cell(model, gpu, num_gpus, method) for method in METHODS]
    published = [cards.get(gpu, {}).get(model, {}).get(num_gpus) for cards in PUBLISHED.values()]
    name = f"{num_gpus} x {gpu.upper().replace('RTX', 'RTX ')}"
    return [model, name, *cells, "; ".join(f"{number:,}" for number in published if number)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="only this row of studies/large_models.csv")
    arguments = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}", sep="\n", flush=True)
    for model in [arguments.model] if arguments.model else read_table(MODELS, Model):
        for gpu, num_gpus in CARDS:
            print(f"| {' | '.join(row(model, gpu, num_gpus))} |", flush=True)


if __name__ == "__main__":
    main()
