"""Print the table of studies/replica_groups.md: tokens per second of synchronous runs and replica groups on slow links.

    python studies/replica_groups.py [--model NAME] [--preset paper] [--outer-interval 25]

All figures are plans for nodes with four RTX 4090s; nothing ran on a GPU. The first is the fastest layout of all nodes
together, whose ranks communicate in every step. The second is the fastest division into replica groups ("4 x 2": four
groups of two nodes).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tools"))

import plan

from megatron.bcd.planner.estimate import Estimate, make_estimate
from megatron.bcd.planner.recipe import PRESET_OF
from megatron.bcd.planner.search import search

GPUS_PER_NODE, SEQUENCES = 4, 512
MODELS = ("G-1.6B", "G-5.4B", "G-10B", "G-20B", "L-1.5B", "L-6.0B", "L-11B", "L-23B")
NODES, LINKS = (2, 4, 8, 16), (1, 10, 25)


def fastest(arguments: argparse.Namespace, model: str, *, nodes: int, groups: int = 1) -> dict[int, Estimate]:
    """Return the fastest plan of a group by link rate. A group of one node has the same layout at every rate."""
    flags = f"--model {model} --gpu rtx4090 --num-gpus {GPUS_PER_NODE * nodes} --precision bf16 --search"
    flags += f" --bcd-preset {arguments.preset} --bcd-num-blocks 3 --bcd-layout {arguments.layout}"
    flags += f" --global-batch-size {SEQUENCES // groups} --replica-groups {groups}"
    if groups > 1 and arguments.outer_interval:
        flags += f" --outer-interval {arguments.outer_interval}"
    best: dict[int, Estimate] = {}
    for link in LINKS:
        recipe = plan.recipe_of(plan.parse_arguments([*flags.split(), "--network-gbit", str(link)]))
        cluster = replace(recipe.cluster, gpus_per_node=GPUS_PER_NODE)
        recipe = replace(recipe, cluster=cluster, host_memory_gb=None)
        if nodes == 1 and best:
            layout = best[LINKS[0]].recipe
            best[link] = make_estimate(replace(layout, cluster=recipe.cluster))
        elif estimates := search(recipe):
            best[link] = min(estimates, key=lambda estimate: estimate.iteration_seconds)
    return best


def rows(arguments: argparse.Namespace, model: str) -> Iterator[list[str]]:
    cells = {link: [model, f"{link} Gbit/s"] for link in LINKS}
    for nodes in NODES:
        together = fastest(arguments, model, nodes=nodes)
        sizes = [size for size in (1, *NODES) if size < nodes]
        apart = {size: fastest(arguments, model, nodes=size, groups=nodes // size) for size in sizes}
        for link in LINKS:
            synchronous = f"{together[link].tokens_per_second:,.0f}" if together else "does not fit"
            speeds = {size: best[link].tokens_per_second for size, best in apart.items() if best}
            size = max(speeds, key=speeds.__getitem__, default=0)
            groups = f"{speeds[size]:,.0f} ({nodes // size} x {size})" if size else "-"
            cells[link].append(f"{synchronous} / {groups}")
    yield from cells.values()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--preset", choices=tuple(PRESET_OF.values()), default="pretrain")
    parser.add_argument("--layout", default="strided")
    parser.add_argument("--outer-interval", type=int)
    arguments = parser.parse_args()
    head = ["model", "link", *(f"{nodes} nodes" for nodes in NODES)]
    for line in [head, ["---"] * len(head)]:
        print(f"| {' | '.join(line)} |")
    for model in [arguments.model] if arguments.model else MODELS:
        for line in rows(arguments, model):
            print(f"| {' | '.join(line)} |", flush=True)


if __name__ == "__main__":
    main()
