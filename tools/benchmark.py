"""Measure speed and memory of full training, block coordinate descent and peers on the same model, data and batch.

    python tools/benchmark.py --num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 256
    python tools/benchmark.py --pipeline-model-parallel-size 2 --json out/benchmark.json
    python tools/benchmark.py --model tiny --methods full,bcd,badam
    python tools/benchmark.py --methods full,offload,bcd --variant "8-bit=--adam-moments-dtype int8"
    python tools/benchmark.py --schedule
    python tools/benchmark.py --prefix-cache

Takes the flags of the training scripts; the default is a GPT of 12 layers on mock data. In every round each method
trains once, in a separate process, so that its memory can be measured. The order rotates from round to round, because
the machine's speed varies. Times are geometric means over the rounds; ratios compare methods within a round. The first
two steps after the start and after each switch are not counted. With --sft --load-hf DIR --data-path FILE it measures
fine-tuning. The exit code is 1 if a method failed for a reason other than memory.

--schedule compares the BCD pipeline schedule with Megatron Core's 1F1B in every layout. --prefix-cache compares steps
that read their prefix from a cache with steps that compute it. badam and lora train transformers' model (PyPI badam,
peft) from the same weights on the same samples, in one process.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _parser import (
    Parser,
    add_json,
    check_positive,
    check_writable,
    command,
    cpu_model,
    run_main,
    table,
    write_figures,
)
from _processes import ROOT, SCRIPTS, CannotRun, launcher, read_metrics, run

from megatron.bcd.arguments import FAMILY_DEFAULTS, parse_run_config
from megatron.bcd.blocks.partition import Partition, partition_from_config
from megatron.bcd.planner.command import network_flags
from megatron.bcd.planner.cost import layer_work
from megatron.bcd.planner.recipe import make_recipe
from megatron.bcd.planner.tables import Cluster, Model, choose, read_table

PROG = "tools/benchmark.py"
SIZES = "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 256"
SCHEDULE_SIZES = "--num-layers 12 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --global-batch-size 8 " \
    "--pipeline-model-parallel-size 2"  # fmt: skip
DEFAULTS = (
    "--micro-batch-size 2 --lr 1e-4 --lr-decay-style constant --weight-decay 0 --hidden-dropout 0 --attention-dropout 0"
)
"""Default flags. No weight decay: Megatron Core exempts biases and norms from it, the peers do not."""
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 1023"
ALWAYS = "--num-workers 0 --eval-iters 0 --log-interval 1 --log-throughput"
"""Flags of every run. A data-loader process would take a core from the steps that are timed."""
RESERVED = ("train-iters", "train-samples", "num-epochs", "eval-iters", "log-interval", "metrics-file", "save", "load",
       "num-workers", "bcd-steps-per-block", "bcd-order")  # fmt: skip
"""Flags that the tool sets itself and users must not give."""
WARM_UP_STEPS = 2
"""Steps at the start of each phase that are not counted. Two, because the second line of a run's metrics is the mean of
its first two steps."""
METHODS = {
    "full": "--bcd-num-blocks 1 --bcd-schedule stock",
    "offload": "--bcd-num-blocks 1 --bcd-schedule stock --optimizer-cpu-offload --optimizer-offload-fraction 1.0",
    "bcd": "",
    "pretrain": "--bcd-preset pretrain",
    "finetune": "--bcd-preset finetune --bcd-inactive-update none",
    "badam": "",
    "lora": "--bcd-num-blocks 1",
}
PEERS = {"badam": ("badam", "transformers"), "lora": ("peft", "transformers")}
"""The peers and the packages that they need."""
NUM_CACHE_USES = 4
"""How often a phase reads each sample with --prefix-cache."""


def compute_ratio(partition: Partition, block: int, *, prefix_cached: bool = False) -> float:
    """Return the step time in the block's phase relative to full training's, from the compute of the slowest stage."""
    stages = range(partition.num_stages)
    slowest = max(sum(layer_work(partition, block, stage=stage, prefix_cached=prefix_cached)) for stage in stages)
    return slowest / (3 * max(partition.layers_per_stage))


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the table. It trains once in every round."""

    name: str
    flags: tuple[str, ...]
    """Flags of its training script, without the files."""
    num_processes: int
    script: str
    partition: Partition
    against: str
    """The method that its ratios are relative to."""

    def argv(self, metrics: Path, folder: Path) -> list[str]:
        """Return the words of the command to start."""
        files = ["--metrics-file", str(metrics)]
        if self.name == "cached":
            files += ["--bcd-prefix-cache", str(folder / "prefix")]
        return [*launcher(self.num_processes), *shlex.split(self.script), *self.flags, *files]

    def arithmetic(self, block: int) -> float:
        """Return the arithmetic of a step, relative to full training's."""
        return compute_ratio(self.partition, block, prefix_cached=self.name == "cached")

    def command(self) -> str:
        """Return the command as a user would type it."""
        start = "python" if self.num_processes == 1 else f"torchrun --nproc-per-node {self.num_processes}"
        return f"{start} {self.script} {shlex.join(self.flags)}"


def flag_sets(arguments: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Return the flags of each method by name, and the method to compare it with."""
    if arguments.schedule:
        layouts = {
            layout: (f"--bcd-layout {layout} --bcd-schedule bcd", f"{layout}, stock")
            for layout in ("spread", "stage", "submodel")
        }
        stock = {other: (flags.replace("schedule bcd", "schedule stock"), other) for flags, other in layouts.values()}
        return stock | layouts | {"interleaved": ("--bcd-layout interleaved", "spread")}
    if arguments.prefix_cache:
        return {"computed": ("", "computed"), "cached": ("", "computed")}
    variants = dict(entry.split("=", 1) for entry in arguments.variant)
    names = arguments.methods.split(",")
    flags = {name.strip(): METHODS[name.strip()] for name in names} | variants
    return {name: (words, "full" if "full" in flags else names[0].strip()) for name, words in flags.items()}


def build_methods(arguments: argparse.Namespace, given: Sequence[str]) -> list[Method]:
    """Return all rows of the table. Raises ValueError for flags that do not fit."""
    model = None
    if arguments.model is not None:
        model = choose(read_table(arguments.models, Model), arguments.model, flag="--model")
    family = model.form if model else arguments.family or ("llama" if "--sft" in given else "gpt")
    shared = [*_defaults(arguments, given, model), *given, *ALWAYS.split()]
    methods = {}
    for name, (own_flags, against) in flag_sets(arguments).items():
        words = [*shared, *shlex.split(own_flags)]
        processes = 1 if name in PEERS else _num_processes(arguments, given)
        values = {"prog": PROG, "defaults": FAMILY_DEFAULTS[family], "world_size": processes}
        config = parse_run_config([*words, "--train-iters", "1000000"], **values)
        partition = partition_from_config(config)
        if arguments.prefix_cache and (partition.num_blocks < 2 or partition.num_stages > 1):
            raise ValueError("--prefix-cache measures at least two blocks (--bcd-num-blocks) on one pipeline stage")
        methods[name] = Method(
            name=name,
            flags=tuple(words),
            num_processes=processes,
            script=f"studies/peer.py --peer {name} --family {family}" if name in PEERS else SCRIPTS[family],
            partition=partition,
            against=against,
        )
    if arguments.schedule and next(iter(methods.values())).partition.num_stages == 1:
        raise ValueError("--schedule needs --pipeline-model-parallel-size 2 or more")
    # full training has one block, and takes as many steps as the others
    most = max(method.partition.num_blocks for method in methods.values())
    return [_with_length(method, arguments.steps, most) for method in methods.values()]


def _with_length(method: Method, steps: int, most_blocks: int) -> Method:
    per_block, blocks = WARM_UP_STEPS + steps, method.partition.num_blocks
    num_steps = per_block * (most_blocks if blocks == 1 else blocks)
    length = f"--train-iters {num_steps} --bcd-steps-per-block {per_block}"
    if method.name in ("computed", "cached"):
        length += f" --bcd-sample-ratio {per_block / NUM_CACHE_USES / num_steps:.6g}"
    return replace(method, flags=(*method.flags, *length.split()))


def _defaults(arguments: argparse.Namespace, given: Sequence[str], model: Model | None) -> list[str]:
    """Return default flags. They come before the given flags, which override them."""
    words = DEFAULTS.split()
    if model is None and "--load-hf" not in given:
        words += (SCHEDULE_SIZES if arguments.schedule else SIZES).split()
    if not any(word.split("=")[0].endswith("-data-path") for word in given):
        words += MOCK.split()
    if model is not None:
        cluster = next(iter(read_table(ROOT / "examples" / "clusters.csv", Cluster).values()))
        recipe = make_recipe(model=model, cluster=cluster, num_gpus=1, global_batch_size=1)
        # NullTokenizer adds an end-of-document id
        words += [*" ".join(network_flags(recipe)).split(), "--vocab-size", str(model.vocabulary - 1)]
    return words


def _num_processes(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    """Return the number of processes: --num-processes, or the smallest that the parallel sizes allow."""
    sizes = Parser(add_help=False)
    for name in ("tensor-model", "pipeline-model", "context"):
        sizes.add_argument(f"--{name}-parallel-size", type=int, default=1)
    words = [*(SCHEDULE_SIZES.split() if arguments.schedule else ()), *given]
    product = 1
    for size in vars(sizes.parse_known_args(words)[0]).values():
        product *= size
    return arguments.num_processes or product


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One training of a method, in one round. Times are in milliseconds."""

    step_ms: Mapping[str, tuple[float, ...]]
    """Times of the counted steps, by block."""
    switch_ms: Mapping[str, float]
    """Time of the switch to each block; the first block has none."""
    loss: float | None
    """Loss of the last step; None if it is not finite."""
    model_state_bytes: tuple[int, ...]
    """Maximum over the phases, by rank."""
    peak_memory_bytes: tuple[int, ...]
    tokens_per_step: float | None
    """In thousandths, so that dividing by milliseconds gives tokens per second."""
    tflops_per_gpu: float | None

    def block_ms(self, block: str) -> float:
        """Return the median step time of a block. Full training has a single block, which counts for all."""
        return statistics.median(self.step_ms[block] if block in self.step_ms else next(iter(self.step_ms.values())))

    @property
    def iteration_ms(self) -> float:
        """Mean over the blocks, which all train for equally many steps."""
        return statistics.fmean(map(self.block_ms, self.step_ms))


def read_turn(lines: Sequence[Mapping[str, Any]]) -> Turn:
    """Read a turn from metrics that have one line per step."""
    steps = [line for line in lines if "step_time_ms" in line]
    times: dict[str, list[float]] = {}
    switches = {}
    for _, group in groupby(steps, key=lambda line: line["phase"]):
        phase = list(group)
        block = str(phase[0]["block"])
        times.setdefault(block, []).extend(line["step_time_ms"] for line in phase[WARM_UP_STEPS:])
        if phase[0].get("switch_time_ms"):
            switches[block] = phase[0]["switch_time_ms"]
    if not times or not all(times.values()):
        raise CannotRun("some phases have no counted step")
    last = steps[-1]
    return Turn(
        step_ms={block: tuple(step_times) for block, step_times in times.items()},
        switch_ms=switches,
        loss=last["loss"],
        model_state_bytes=_maximum_by_rank(steps, "model_state_bytes"),
        peak_memory_bytes=_maximum_by_rank(steps, "peak_memory_bytes"),
        tokens_per_step=last.get("tokens_per_second") and last["tokens_per_second"] * last["step_time_ms"],
        tflops_per_gpu=statistics.median(line.get("tflops_per_gpu") or 0 for line in steps) or None,
    )


def _maximum_by_rank(steps: Sequence[Mapping[str, Any]], name: str) -> tuple[int, ...]:
    return tuple(map(max, zip(*(step[name] for step in steps), strict=True)))


def table_rows(methods: Sequence[Method], turns: Mapping[str, Sequence[Turn]]) -> list[dict[str, Any]]:
    """Return the rows of the table: means over the rounds, and ratios to the reference method if it ran."""
    all_turns = itertools.chain.from_iterable(turns.values())
    tokens = next((turn.tokens_per_step for turn in all_turns if turn.tokens_per_step), None)
    rows = []
    for method in methods:
        ours, others = turns.get(method.name), turns.get(method.against)
        if not ours:
            continue
        blocks = [_block_row(method, block, ours, others or ()) for block in ours[0].step_ms]
        mean = statistics.geometric_mean(turn.iteration_ms for turn in ours)
        bounds = [method.arithmetic(block.index) for block in method.partition.blocks]
        rows.append(
            {
                "method": method.name,
                "processes": method.num_processes,
                "model_state_bytes": max(sum(turn.model_state_bytes) for turn in ours),
                "peak_memory_bytes": max(max(turn.peak_memory_bytes) for turn in ours),
                "step_ms": mean,
                "tokens_per_second": tokens and tokens / mean,
                "tflops_per_gpu": ours[-1].tflops_per_gpu,
                "against": method.against,
                "ratio": _ratio(ours, others or (), None),
                "arithmetic": statistics.fmean(bounds),
                "loss": ours[-1].loss,
                "blocks": blocks if len(blocks) > 1 else [],
            }
        )
    return rows


def _block_row(method: Method, block: str, ours: Sequence[Turn], others: Sequence[Turn]) -> dict[str, Any]:
    partition, index = method.partition, int(block) if block.isdecimal() else None
    layers = ", ".join((partition.describe_layers(index or 0), *partition.describe_extras(index or 0)))
    switches = [turn.switch_ms[block] for turn in ours if block in turn.switch_ms]
    return {
        "block": block,
        "layers": "-" if index is None else layers,
        "step_ms": statistics.geometric_mean(turn.block_ms(block) for turn in ours),
        "ratio": _ratio(ours, others, block),
        "arithmetic": None if index is None else method.arithmetic(index),
        "switch_ms": statistics.median(switches) if switches else None,
    }


def _ratio(ours: Sequence[Turn], others: Sequence[Turn], block: str | None) -> float | None:
    """Return the geometric mean of the ratios within each round, so that slow rounds cancel out."""

    def milliseconds(turn: Turn) -> float:
        return turn.iteration_ms if block is None else turn.block_ms(block)

    ratios = [milliseconds(turn) / milliseconds(other) for turn, other in zip(ours, others, strict=False)]
    return statistics.geometric_mean(ratios) if ratios else None


def rotated(names: Sequence[str], round_index: int) -> list[str]:
    """Return the order of a round. Every method comes first, second, ... equally often, so that drift cancels out."""
    start = round_index % len(names)
    return [*names[start:], *names[:start]]


def show(figures: Mapping[str, Any]) -> None:
    """Print the tables with their explanations."""

    def cells(row: Mapping[str, Any], columns: Mapping[str, tuple[str, str]]) -> list[str]:
        return ["-" if row[name] is None else format(row[name], form) for name, form in columns.values()]

    rows = [
        row | {name: row[f"{name}_bytes"] / 2**20 for name in ("model_state", "peak_memory")} for row in figures["rows"]
    ]
    columns = {
        "method": ("method", ""),
        "processes": ("processes", ""),
        "state MiB": ("model_state", ",.1f"),
        "peak MiB": ("peak_memory", ",.1f"),
        "ms/step": ("step_ms", ",.1f"),
        "tokens/s": ("tokens_per_second", ",.0f"),
        "TFLOP/s": ("tflops_per_gpu", ",.1f"),
        "ratio": ("ratio", ".3f"),
        "arithmetic": ("arithmetic", ".3f"),
        "loss": ("loss", ".4f"),
    }
    print(table([*columns], [cells(row, columns) for row in rows]))
    blocks = [block | {"method": row["method"]} for row in rows for block in row["blocks"]]
    if blocks:
        block_columns = {name: (name, "") for name in ("method", "block", "layers")}
        block_columns |= {name: columns[name] for name in ("ms/step", "ratio", "arithmetic")}
        block_columns["switch ms"] = ("switch_ms", ",.1f")
        print()
        print(table([*block_columns], [cells(block, block_columns) for block in blocks], num_left=3))
    for name, reason in figures["not_run"].items():
        print(f"{name} did not run: {reason}")
    references = {row["method"]: row["against"] for row in rows if row["against"] != row["method"]}
    if references:
        print("ratio:", ", ".join(f"{name} to {other}" for name, other in references.items()))
    print(
        "arithmetic: F, D and W of a layer count 1 each; relative to full training, excluding embedding and head\n"
        "state: weights, gradients and optimizer state of all processes; peak: the largest process's"
        f"{'' if figures['has_gpu'] else ' resident set, including libraries'}\n"
        f"{figures['hardware']}\n{figures['command']}"
    )


def gpu_name() -> str:
    """Return the GPU's name, or "" on a CPU. Asks in a subprocess, which releases the device when it ends."""
    program = "from megatron.bcd.runtime import device; print(device.name() if device.has_cuda() else '')"
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def hardware(gpu: str, threads: int) -> str:
    """Return the device and the versions of the packages."""
    name = gpu or f"{cpu_model()}, {threads} thread(s) per process of {os.cpu_count()} cores"
    packages = [package for package in ("torch", "megatron-core", "transformers", "badam", "peft")
                if importlib.util.find_spec(package.replace("-", ".")) is not None]  # fmt: skip
    return ", ".join([name, *(f"{package} {importlib.metadata.version(package)}" for package in packages)])


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the tool's own flags, and those of the training. Raises ValueError."""
    parser = Parser(
        prog=PROG,
        usage="%(prog)s [flags below] [flags of pretrain_gpt_bcd.py]",
        description=__doc__,
        epilog="All other flags are those of the training scripts, whose --help describes them.",
    )
    add = parser.add_argument_group("benchmark").add_argument
    add("--methods", default="full,bcd", metavar="LIST", help=f"any of {', '.join(METHODS)} (default: full,bcd)")
    add("--variant", action="append", default=[], metavar="NAME=FLAGS", help="one more row, with these flags added")
    add("--schedule", action="store_true", help="the BCD and the stock pipeline schedule, in every layout")
    add("--prefix-cache", action="store_true", help="steps with and without a prefix cache")
    add("--model", metavar="NAME", help="a row of the model table")
    add("--models", metavar="FILE", default=str(ROOT / "examples" / "models.csv"), help="the model table")
    add("--family", choices=SCRIPTS, help="training script (default: gpt; llama with --sft; the model's with --model)")
    add("--num-processes", type=int, metavar="N", help="per training (default: the fewest that the flags allow)")
    add("--rounds", type=int, default=5, metavar="N", help="trainings of each method (default: 5)")
    add("--steps", type=int, default=6, metavar="N", help="counted steps of each block per training (default: 6)")
    add_json(parser)
    arguments, given = parser.parse_known_args(list(argv))
    if "RANK" in os.environ:
        raise ValueError("torchrun is not needed: start with python; --num-processes sets the number of processes")
    check_positive(arguments, "rounds", "steps", "num_processes")
    names = [name.strip() for name in arguments.methods.split(",")]
    for name in names:
        if name not in METHODS or names.count(name) > 1:
            raise ValueError(f"--methods {arguments.methods}: {name} must be one of {', '.join(METHODS)}, once")
        missing = [package for package in PEERS.get(name, ()) if importlib.util.find_spec(package) is None]
        if missing:
            raise ValueError(f"--methods {name} needs {' and '.join(missing)}: the pins are in requirements.txt")
    for entry in arguments.variant:
        name, _, flags = entry.partition("=")
        if not name or name in names or not flags.lstrip().startswith("--"):
            raise ValueError(f"--variant {entry}: must be a new NAME, =, and flags")
    for name in RESERVED:
        if any(word.split("=")[0] == f"--{name}" for word in given):
            raise ValueError(f"--{name}: the benchmark sets it. Leave it out.")
    check_writable(arguments.json, flag="--json")
    return arguments, given


def measure(
    methods: Sequence[Method], num_rounds: int, *, threads: int
) -> tuple[dict[str, list[Turn]], dict[str, CannotRun]]:
    """Run all methods in all rounds. Return their turns, and the errors of those that failed."""
    turns: dict[str, list[Turn]] = {method.name: [] for method in methods}
    failed: dict[str, CannotRun] = {}
    by_name = {method.name: method for method in methods}
    with tempfile.TemporaryDirectory(prefix="benchmark_") as name:
        folder = Path(name)
        for index in range(num_rounds):
            for method in rotated([*turns], index) if turns else ():
                metrics = folder / f"{index}.jsonl"
                metrics.unlink(missing_ok=True)
                try:
                    run(by_name[method].argv(metrics, folder / str(index)), folder / "log", threads=threads)
                    turns[method].append(read_turn(read_metrics(metrics)))
                except CannotRun as error:
                    failed[method] = error
                    del turns[method]
                    print(f"{method} did not run: {error}", file=sys.stderr)
                    continue
                ms = turns[method][-1].iteration_ms
                print(f"round {index + 1}/{num_rounds}: {method} {ms:,.1f} ms", file=sys.stderr, flush=True)
    return turns, failed


@command(PROG)
def main(argv: Sequence[str]) -> int:
    arguments, given = parse_arguments(argv)
    methods = build_methods(arguments, given)
    num_processes = max(method.num_processes for method in methods)
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // num_processes))
    gpu = gpu_name()
    if not gpu and any(method.name == "offload" for method in methods):
        raise ValueError("--methods offload: needs a CUDA GPU, and none is visible")
    turns, failed = measure(methods, arguments.rounds, threads=threads)
    figures = {
        "command": shlex.join(["python", PROG, *argv]),
        "hardware": hardware(gpu, threads),
        "has_gpu": bool(gpu),
        "rounds": arguments.rounds,
        "commands": {method.name: method.command() for method in methods},
        "rows": table_rows(methods, turns),
        "not_run": {name: str(error) for name, error in failed.items()},
        "turns": {name: [asdict(turn) for turn in method_turns] for name, method_turns in turns.items()},
    }
    write_figures(arguments.json, figures, lambda: show(figures))
    return 1 if not turns or any(not error.is_out_of_memory for error in failed.values()) else 0


if __name__ == "__main__":
    run_main(main)
