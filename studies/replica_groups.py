"""The table of docs/replica_groups.md: tokens per second of one synchronous run and of replica groups on slow links.

    python studies/replica_groups.py [--model NAME] [--preset paper] [--outer-interval 25]

Planned, on nodes of four RTX 4090s: the fastest layout of all nodes together, whose ranks exchange in every step, and
that of replica groups of one node or several, whichever is fastest ("4 x 2": four of two nodes). Nothing here ran on a
GPU.
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

PER_NODE, SEQUENCES = 4, 512
MODELS = ("G-1.6B", "G-5.4B", "G-10B", "G-20B", "L-1.5B", "L-6.0B", "L-11B", "L-23B")
NODES, LINKS = (2, 4, 8, 16), (1, 10, 25)


def fastest(given: argparse.Namespace, model: str, *, nodes: int, groups: int = 1) -> dict[int, Estimate]:
    """By rate of the link, of the layouts of a group that fit; the same layout for all if a group is one node."""
    flags = f"--model {model} --gpu rtx4090 --num-gpus {PER_NODE * nodes} --precision bf16 --search"
    flags += f" --bcd-preset {given.preset} --bcd-num-blocks 3 --bcd-layout {given.layout}"
    flags += f" --global-batch-size {SEQUENCES // groups} --replica-groups {groups}"
    if groups > 1 and given.outer_interval:
        flags += f" --outer-interval {given.outer_interval}"
    best: dict[int, Estimate] = {}
    for link in LINKS:
        recipe = plan.recipe_of(plan.parse_arguments([*flags.split(), "--network-gbit", str(link)]))
        recipe = replace(recipe, cluster=replace(recipe.cluster, gpus_per_node=PER_NODE))
        if nodes == 1 and best:
            layout = best[LINKS[0]].recipe
            best[link] = make_estimate(replace(layout, cluster=recipe.cluster))
        elif found := search(recipe):
            best[link] = min(found, key=lambda each: each.iteration_seconds)
    return best


def rows(given: argparse.Namespace, model: str) -> Iterator[list[str]]:
    cells = {link: [model, f"{link} Gbit/s"] for link in LINKS}
    for nodes in NODES:
        together = fastest(given, model, nodes=nodes)
        sizes = [size for size in (1, *NODES) if size < nodes]
        apart = {size: fastest(given, model, nodes=size, groups=nodes // size) for size in sizes}
        for link in LINKS:
            one = f"{together[link].tokens_per_second:,.0f}" if together else "does not fit"
            speeds = {size: found[link].tokens_per_second for size, found in apart.items() if found}
            size = max(speeds, key=speeds.__getitem__, default=0)
            groups = f"{speeds[size]:,.0f} ({nodes // size} x {size})" if size else "-"
            cells[link].append(f"{one} / {groups}")
    yield from cells.values()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--preset", choices=tuple(PRESET_OF.values()), default="pretrain")
    parser.add_argument("--layout", default="strided")
    parser.add_argument("--outer-interval", type=int)
    given = parser.parse_args()
    head = ["model", "link", *(f"{nodes} nodes" for nodes in NODES)]
    for line in [head, ["---"] * len(head)]:
        print(f"| {' | '.join(line)} |")
    for model in [given.model] if given.model else MODELS:
        for line in rows(given, model):
            print(f"| {' | '.join(line)} |", flush=True)


if __name__ == "__main__":
    main()
