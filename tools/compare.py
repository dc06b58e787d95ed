"""Compares full training, block coordinate descent and offload on the same model, data, batch and hardware.

    python tools/compare.py --model tiny --methods full,bcd --peer badam --output out/compare
    python tools/compare.py --model G-1.6B --methods full,bcd,offload --gpu rtx4090
    python tools/compare.py --task sft --peers full,badam,lora --output out/sft

In every round each method has one turn: the planner's command in new processes, so that memory is this method's alone
and the measured run is the planned one. The first two steps after the start and after each switch are not counted. All
methods take the same number of steps on the same samples. The order rotates from round to round, because the machine's
speed varies, and times are geometric means over the rounds: ratios in the table are then those within the rounds.

--peer badam trains transformers' model of the same size with BAdam (PyPI) in one process: same initial weights,
samples, blocks and optimizer settings. Prints a table like the paper's tables 3 and 4, and writes compare.json and
compare.png to --output. Exit code 1 if a method failed for a reason other than memory.

--task sft compares fine-tuning instead: it trains a small LLaMA on a text, then fine-tunes it on records with the BCD
preset and its peers, each at its own tuned learning rate; started again, it goes on (--task sft --help has its flags).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform as python_platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import _compare_sft as fine_tuning
from _compare_figures import Row, Turn, ratios, rotated, row_of, table_text, typical_ms
from _compare_runs import PEER, CannotRun, Variant, beside_peer, measure, planned, run, variants_of
from _machine import cpu_model
from _parser import Parser, add_precision, bad_input, leave_with

from megatron.bcd.config import LAYOUTS, BcdConfig
from megatron.bcd.planner.cost import PRECISIONS
from megatron.bcd.planner.recipe import RECOMPUTE, Recipe
from megatron.bcd.planner.tables import choose, read_clusters, read_models

PROG = "tools/compare.py"
METHODS = ("full", "offload", "bcd")
"""In the order of the table."""
ROOT = Path(__file__).resolve().parents[1]
MICROBATCHES = 4
"""Default per iteration and pipeline stage; one microbatch with a single stage."""
TOLERANCE = 1e-3
"""Largest relative difference between the losses of two runs that count as the same training."""


def _is_fine_tuning(argv: Sequence[str]) -> bool:
    return any(word.split("=")[0] == "--task" for word in argv)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Raises ValueError for a flag that is unknown, missing or no number."""
    if argv is not None and _is_fine_tuning(argv):
        return fine_tuning.parse_arguments(argv)
    parser = Parser(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("--model", metavar="NAME", required=True, help="a row of the model table")
    add(
        "--methods",
        default="full,bcd",
        metavar="LIST",
        help=f"of {', '.join(METHODS)}, with commas (default: full,bcd)",
    )
    add("--peer", choices=[PEER], help="compare with this package, in one process, in fp32")
    add("--output", default=os.path.join("out", "compare"), metavar="FOLDER", help="(default: out/compare)")
    add("--rounds", type=int, default=5, metavar="N", help="turns of each method (default: 5)")
    add("--steps", type=int, default=6, metavar="N", help="counted steps of each block in a turn (default: 6)")
    add("--gpu", metavar="NAME", help="a row of the cluster table: peak for MFU, planned peak and time")
    add("--peak-tflops", type=float, metavar="X", help="peak of one process's device, for MFU, instead of --gpu's")
    group = parser.add_argument_group("recipe", "as the training script's flags")
    add = group.add_argument
    add("--num-gpus", type=int, metavar="N", help="processes (default: one per GPU that is here, without CUDA one)")
    add("--pipeline-model-parallel-size", type=int, default=1, metavar="N", help="(default: 1)")
    add("--bcd-num-blocks", type=int, metavar="M", help="(default: 3)")
    add("--bcd-layout", choices=LAYOUTS, default=BcdConfig.bcd_layout, help="(default: %(default)s)")
    add("--micro-batch-size", type=int, default=4, metavar="N", help="(default: 4)")
    add("--global-batch-size", type=int, metavar="N", help="sequences of an iteration (default: one microbatch, with a"
        f" pipeline {MICROBATCHES} per stage)")  # fmt: skip
    add("--seq-length", type=int, metavar="N", help="(default: the model table's)")
    add_precision(group, PRECISIONS)
    add("--recompute", nargs="?", const="full", choices=RECOMPUTE, default="none", help="(default: none)")
    group = parser.add_argument_group("data files")
    add = group.add_argument
    add("--models", metavar="FILE", default=str(ROOT / "examples" / "models.csv"), help="the model table")
    add("--clusters", metavar="FILE", default=str(ROOT / "examples" / "clusters.csv"), help="the cluster table")
    return parser.parse_args(argv)


def methods_of(text: str) -> list[str]:
    """In the order of the table. Raises ValueError naming what is no method, or twice there."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in METHODS:
            raise ValueError(f"--methods {text}: {word or 'an empty name'} must be one of {', '.join(METHODS)}")
        if words.count(word) > 1:
            raise ValueError(f"--methods {text}: {word} is given twice")
    return [name for name in METHODS if name in words]


def recipe_of(arguments: argparse.Namespace, *, num_here: int) -> Recipe:
    """What is measured, as method bcd; ``num_here`` GPUs. Raises ValueError naming the flag that does not fit."""
    num_gpus = arguments.num_gpus if arguments.num_gpus is not None else max(1, num_here)
    if 0 < num_here < num_gpus:
        raise ValueError(f"--num-gpus {num_gpus}: this machine shows {num_here} GPU(s); give at most as many")
    clusters = read_clusters(arguments.clusters)
    cluster = choose(clusters, arguments.gpu, flag="--gpu") if arguments.gpu else next(iter(clusters.values()))
    stages = arguments.pipeline_model_parallel_size
    batch = arguments.global_batch_size
    if batch is None:
        microbatches = MICROBATCHES * stages if stages > 1 else 1
        batch = arguments.micro_batch_size * microbatches * max(1, num_gpus // max(1, stages))
    return Recipe(
        model=choose(read_models(arguments.models), arguments.model, flag="--model"),
        cluster=replace(cluster, gpus_per_node=max(num_gpus, 1)),  # all processes are started here
        num_gpus=num_gpus,
        pipeline_size=stages,
        num_blocks=arguments.bcd_num_blocks,
        layout=arguments.bcd_layout,
        precision=arguments.precision,
        sequence=arguments.seq_length,
        micro_batch_size=arguments.micro_batch_size,
        global_batch_size=batch,
        recompute=arguments.recompute,
    )


def check(arguments: argparse.Namespace, methods: Sequence[str], *, num_here: int) -> None:
    """Raises ValueError for errors that can be found before the first run."""
    for name in ("rounds", "steps"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} {getattr(arguments, name)}: must be at least 1")
    if arguments.peak_tflops is not None and not 0 < arguments.peak_tflops < 1e9:
        raise ValueError(f"--peak-tflops {arguments.peak_tflops:g}: must be more than 0")
    if arguments.gpu and not num_here:
        raise ValueError(f"--gpu {arguments.gpu}: this machine shows no GPU; leave it out (--peak-tflops gives an MFU)")
    if arguments.bcd_num_blocks is not None and "bcd" not in methods and not arguments.peer:
        raise ValueError(f"--bcd-num-blocks {arguments.bcd_num_blocks} has no use without method bcd; leave it out")
    if list(methods) == ["offload"] and not num_here and not arguments.peer:
        raise ValueError("--methods offload needs a CUDA GPU, and this machine shows none; add full or bcd")
    if arguments.peer:
        if arguments.precision != "fp32":
            raise ValueError(
                f"--precision {arguments.precision}: --peer {PEER} is measured in fp32; leave one of them out"
            )
        if arguments.recompute != "none":
            raise ValueError(f"--recompute: --peer {PEER} is measured without; leave one of them out")
        missing = [name for name in (PEER, "transformers") if importlib.util.find_spec(name) is None]
        if missing:
            raise ValueError(
                f"--peer {PEER} needs {' and '.join(missing)}: pip install badam==1.4 transformers==5.23.0"
            )
    _check_output(arguments.output)


def _check_output(path: str) -> None:
    """Try the nearest folder that exists, and leave nothing there."""
    folder = os.path.abspath(path)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--output {path}: {error.strerror}: {folder}; give a folder that can be written") from None


class Comparison:
    """The variants, their turns, and what could not be run."""

    def __init__(self, variants: Sequence[Variant], *, threads: int) -> None:
        self.variants = {variant.name: variant for variant in variants}
        self.turns: dict[str, list[Turn]] = {variant.name: [] for variant in variants}
        self.not_run: dict[str, str] = {}
        self.has_failed = False
        self._threads = threads

    def leave_out(self, name: str, why: str) -> None:
        """Remove a variant from the rounds and print why."""
        self.not_run[name] = why
        del self.turns[name]
        _tell(f"{name} is not run: {why}")

    def run(self, num_rounds: int, folder: Path) -> None:
        """All rounds; `folder` is for what runs write."""
        if PEER in self.turns:
            beside = next(v for v in self.variants.values() if not v.is_peer and v.recipe == self.variants[PEER].recipe)
            try:
                run(beside.export_argv(folder), folder / "log", threads=self._threads)
            except CannotRun as error:
                self._fail(PEER, error)
        for index in range(num_rounds):
            for name in rotated(list(self.turns), index) if self.turns else []:
                try:
                    turn = measure(self.variants[name], folder, threads=self._threads)
                except CannotRun as error:
                    self._fail(name, error)
                    continue
                self.turns[name].append(turn)
                _tell(f"round {index + 1}/{num_rounds}: {name} {turn.iteration_ms:,.1f} ms")

    def _fail(self, name: str, error: CannotRun) -> None:
        self.has_failed |= not error.for_want_of_memory
        self.leave_out(name, str(error))


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def rows_of(comparison: Comparison, *, has_cluster: bool, peak_tflops: float | None) -> list[Row]:
    """The table, in the order of the variants."""
    rows = []
    for name, turns in comparison.turns.items():
        variant = comparison.variants[name]
        recipe = variant.recipe
        peak = recipe.cluster.peak_flops_per_s(recipe.precision) if has_cluster else None
        # a variant of another number of processes is another machine's
        full = comparison.turns.get("full") if recipe.num_gpus == _first(comparison).recipe.num_gpus else None
        rows.append(
            row_of(
                name,
                turns,
                full,
                planned(variant, has_cluster=has_cluster),
                tokens_per_iteration=recipe.global_batch_size * recipe.tokens,
                peak_flops_per_s=1e12 * peak_tflops if peak_tflops else peak,
            )
        )
    return rows


def _first(comparison: Comparison) -> Variant:
    return next(iter(comparison.variants.values()))


def peer_figures(comparison: Comparison, beside: str) -> dict[str, Any] | None:
    """BCD against the peer, where both were measured."""
    if PEER not in comparison.turns or beside not in comparison.turns:
        return None
    ours, theirs = comparison.turns[beside], comparison.turns[PEER]
    by_round = ratios(theirs, ours)
    losses = [ours[-1].loss, theirs[-1].loss]
    difference = None if None in losses else abs(losses[0] - losses[1]) / abs(losses[0])  # type: ignore[operator,arg-type]
    return {
        "beside": beside,
        "tokens_per_second_ratio": typical_ms(theirs) / typical_ms(ours),
        "ratio_by_round": by_round,
        "loss_difference": difference,
        "trains_alike": difference is not None and difference < TOLERANCE,
    }


def machine(*, num_here: int, threads: int) -> dict[str, Any]:
    """Hardware, versions, and how busy it is."""
    names = ("torch", "megatron-core", "transformers", PEER)
    program = "from megatron.bcd.runtime import device; print(device.name())"
    gpu = (
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True) if num_here else None
    )
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads_per_process": threads,
        "gpus": num_here,
        "gpu": gpu.stdout.strip() if gpu else None,
        "load_average": list(os.getloadavg()),
        "python": python_platform.python_version(),
        "versions": {name: _version(name) for name in names},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def summary(figures: dict[str, Any], rows: Sequence[Row]) -> str:
    """The table, and what is needed to read it."""
    about = figures["machine"]
    lines = [table_text(rows, on_gpu=bool(about["gpus"]))] if rows else []
    lines += [f"{name} is not run: {why}" for name, why in figures["not_run"].items()]
    lines.append(
        "state: weights, gradients, optimizer state, largest phase, all processes; peak: of the largest process"
        + ("" if about["gpus"] else ", its resident set with all libraries")
    )
    lines.append(
        f"iteration: geometric mean of {figures['rounds']} rounds; ratio to full: over full training's in this table;"
        " arithmetic: that ratio by the layers' passes alone, no bound, as the optimizer has less to do too; MFU: by"
        " the arithmetic of full training; loss: after the last step"
    )
    peer = figures["peer"]
    if peer:
        by_round = ", ".join(f"{ratio:.2f}" for ratio in peer["ratio_by_round"])
        lines.append(
            f"{peer['beside']} against {PEER}: {peer['tokens_per_second_ratio']:.3f} x its tokens/s ({by_round})"
        )
        alike = "one training: losses differ by" if peer["trains_alike"] else "NOT one training: losses differ by"
        lines.append(f"{alike} {peer['loss_difference'] or 0:.1e} after the last step, relative")
    device = (
        about["gpu"]
        or f"{about['cpu']}, {about['threads_per_process']} thread(s) per process of {about['cores']} cores"
    )
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    return "\n".join([*lines, f"{device}; {versions}", figures["command"]])


def write(output: str, figures: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """JSON and, where anything was measured, a chart, each whole or as it was before; their paths."""
    os.makedirs(output, exist_ok=True)
    paths = [os.path.join(output, name) for name in ("compare.json", "compare.png")]
    aside = [f"{path}.{os.getpid()}.tmp" for path in paths]
    try:
        with open(aside[0], "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)
            file.write("\n")
        if rows:
            from _compare_chart import draw  # matplotlib takes a second to import

            draw(aside[1], rows, figures)
        written = [path for path, temporary in zip(paths, aside, strict=True) if os.path.exists(temporary)]
        for path in written:
            os.replace(f"{path}.{os.getpid()}.tmp", path)
        return written
    finally:
        for temporary in aside:
            Path(temporary).unlink(missing_ok=True)


def compare(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Check, measure, print, write; the exit code. Raises ValueError for a user's mistake."""
    from megatron.bcd.runtime import device

    methods = methods_of(arguments.methods)
    num_here = device.num_gpus()
    check(arguments, methods, num_here=num_here)
    recipe = recipe_of(arguments, num_here=num_here)
    variants = variants_of(recipe, methods, peer=bool(arguments.peer), steps=arguments.steps)
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // recipe.num_gpus))
    about = machine(num_here=num_here, threads=threads)
    comparison = Comparison(variants, threads=threads)
    if "offload" in methods and not num_here:
        comparison.leave_out("offload", "it needs a CUDA GPU, and this machine shows none")
    with tempfile.TemporaryDirectory(prefix="compare_") as folder:
        comparison.run(arguments.rounds, Path(folder))
    rows = rows_of(comparison, has_cluster=bool(arguments.gpu), peak_tflops=arguments.peak_tflops)
    figures = {
        "command": shlex.join(["python", PROG, *argv]),
        "model": asdict(recipe.model) | {"parameters": recipe.shape.num_parameters},
        "machine": about | {"load_average_after": list(os.getloadavg())},
        "rounds": arguments.rounds,
        "tokens_per_iteration": recipe.global_batch_size * recipe.tokens,
        "commands": {name: variant.command() for name, variant in comparison.variants.items()},
        "rows": [asdict(row) for row in rows],
        "not_run": comparison.not_run,
        "peer": peer_figures(comparison, beside_peer(recipe, methods)) if arguments.peer else None,
        "turns": {
            name: [asdict(turn) | {"iteration_ms": turn.iteration_ms} for turn in turns]
            for name, turns in comparison.turns.items()
        },
    }
    print(summary(figures, rows))
    for path in write(arguments.output, figures, rows):
        print(f"wrote {path}")
    return 1 if comparison.has_failed or not rows else 0


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        if _is_fine_tuning(given):
            return fine_tuning.compare(given)
        return compare(parse_arguments(given), given)
    except ValueError as error:
        return bad_input(PROG, error)


if __name__ == "__main__":
    leave_with(main)
