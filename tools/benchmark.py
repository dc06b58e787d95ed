"""Speed and memory of full training, block coordinate descent and peers on the same model, data and batch.

    python tools/benchmark.py --num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 256
    python tools/benchmark.py --pipeline-model-parallel-size 2 --json out/benchmark.json
    python tools/benchmark.py --model tiny --methods full,bcd,badam
    python tools/benchmark.py --methods full,offload,bcd --variant "8-bit=--adam-moments-dtype int8"
    python tools/benchmark.py --schedule
    python tools/benchmark.py --prefix-cache

Takes the flags of the training scripts; the default is a GPT of 12 layers on mock data. In every round each method has
one turn, a training of its own, so that memory is this method's alone. The order rotates from round to round, because
the machine's speed varies; times are geometric means over the rounds, so that ratios are those within the rounds. The
first two steps after the start and after each switch are not counted. With --sft --load-hf DIR --data-path FILE it
measures fine-tuning. Exit code 1 if a method failed for a reason other than memory.

--schedule compares the BCD pipeline schedule with Megatron Core's 1F1B in every layout, --prefix-cache steps that read
their prefix from a cache with steps that compute it. badam and lora train transformers' model (PyPI badam, peft) from
the same weights on the same samples, in one process.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
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

from _parser import Parser, add_json, check_can_write, command, cpu_model, leave_with, print_table, tell
from _processes import ROOT, SCRIPTS, CannotRun, launcher, read_metrics, run

from megatron.bcd.arguments import FAMILY_DEFAULTS, parse_run_config
from megatron.bcd.blocks.partition import Partition, partition_from_config
from megatron.bcd.planner.command import network_flags
from megatron.bcd.planner.cost import compute_ratio
from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.tables import Model, choose, read_clusters, read_models

PROG = "tools/benchmark.py"
SIZES = "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 256"
SCHEDULE_SIZES = "--num-layers 12 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --global-batch-size 8 " \
    "--pipeline-model-parallel-size 2"  # fmt: skip
SETTLED = (
    "--micro-batch-size 2 --lr 1e-4 --lr-decay-style constant --weight-decay 0 --hidden-dropout 0 --attention-dropout 0"
)
"""Defaults. Without weight decay: Megatron Core spares biases and norms, peers do not."""
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 1023"
ALWAYS = "--num-workers 0 --eval-iters 0 --log-interval 1 --log-throughput"
"""Of every run. A reader process would take a core from the steps that are timed."""
OWN = ("train-iters", "train-samples", "num-epochs", "eval-iters", "log-interval", "metrics-file", "save", "load",
       "num-workers", "bcd-steps-per-block", "bcd-order")  # fmt: skip
"""Flags that the tool sets: refused."""
WARM_UP_STEPS = 2
"""Of every phase. Two, as the second line of a training's metrics is the mean of its first two steps."""
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
"""And the packages that they need."""
NUM_CACHE_USES = 4
"""Of each sample in a phase, with --prefix-cache."""


# ---------------------------------------------------------------- what is run


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the table: it has one turn in every round."""

    name: str
    flags: tuple[str, ...]
    """Of its training script, but for the files."""
    num_processes: int
    script: str
    partition: Partition
    against: str
    """The method that its ratios are to."""

    def argv(self, metrics: Path, folder: Path) -> list[str]:
        """What is started."""
        files = ["--metrics-file", str(metrics)]
        if self.name == "cached":
            files += ["--bcd-prefix-cache", str(folder / "prefix")]
        return [*launcher(self.num_processes), *shlex.split(self.script), *self.flags, *files]

    def arithmetic(self, block: int) -> float:
        """Of a step, over full training's."""
        return compute_ratio(self.partition, block, prefix_cached=self.name == "cached")

    def command(self) -> str:
        """What can be typed."""
        start = "python" if self.num_processes == 1 else f"torchrun --nproc-per-node {self.num_processes}"
        return f"{start} {self.script} {shlex.join(self.flags)}"


def flag_sets(arguments: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Flags of each method by name, and the method to compare it with."""
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


def methods_of(arguments: argparse.Namespace, given: Sequence[str]) -> list[Method]:
    """Every row. Raises ValueError for flags that do not fit."""
    model = None
    if arguments.model is not None:
        model = choose(read_models(arguments.models), arguments.model, flag="--model")
    family = model.form if model else arguments.family or ("llama" if "--sft" in given else "gpt")
    shared = [*_defaults(arguments, given, model), *given, *ALWAYS.split()]
    found = {}
    for name, (own, against) in flag_sets(arguments).items():
        words = [*shared, *shlex.split(own)]
        processes = 1 if name in PEERS else _num_processes(arguments, given)
        values = {"prog": PROG, "defaults": FAMILY_DEFAULTS[family], "world_size": processes}
        config = parse_run_config([*words, "--train-iters", "1000000"], **values)
        partition = partition_from_config(config)
        if arguments.prefix_cache and (partition.num_blocks < 2 or partition.num_stages > 1):
            raise ValueError("--prefix-cache measures at least two blocks (--bcd-num-blocks) on one pipeline stage")
        found[name] = Method(
            name=name,
            flags=tuple(words),
            num_processes=processes,
            script=f"studies/peer.py --peer {name} --family {family}" if name in PEERS else SCRIPTS[family],
            partition=partition,
            against=against,
        )
    if arguments.schedule and next(iter(found.values())).partition.num_stages == 1:
        raise ValueError("--schedule needs --pipeline-model-parallel-size 2 or more")
    # full training, with its one block, takes as many steps as the others
    most = max(method.partition.num_blocks for method in found.values())
    return [_with_length(method, arguments.steps, most) for method in found.values()]


def _with_length(method: Method, steps: int, most_blocks: int) -> Method:
    per_block, blocks = WARM_UP_STEPS + steps, method.partition.num_blocks
    num_steps = per_block * (most_blocks if blocks == 1 else blocks)
    length = f"--train-iters {num_steps} --bcd-steps-per-block {per_block}"
    if method.name in ("computed", "cached"):
        length += f" --bcd-sample-ratio {per_block / NUM_CACHE_USES / num_steps:.6g}"
    return replace(method, flags=(*method.flags, *length.split()))


def _defaults(arguments: argparse.Namespace, given: Sequence[str], model: Model | None) -> list[str]:
    """Flags that come before those given, which win."""
    words = SETTLED.split()
    if model is None and "--load-hf" not in given:
        words += (SCHEDULE_SIZES if arguments.schedule else SIZES).split()
    if not any(word.split("=")[0].endswith("-data-path") for word in given):
        words += MOCK.split()
    if model is not None:
        cluster = next(iter(read_clusters(ROOT / "examples" / "clusters.csv").values()))
        recipe = Recipe(model=model, cluster=cluster, num_gpus=1, global_batch_size=1)
        # NullTokenizer adds an end of document
        words += [*" ".join(network_flags(recipe)).split(), "--vocab-size", str(model.vocabulary - 1)]
    return words


def _num_processes(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    """As few as the flags need."""
    sizes = Parser(add_help=False)
    for name in ("tensor-model", "pipeline-model", "context"):
        sizes.add_argument(f"--{name}-parallel-size", type=int, default=1)
    words = [*(SCHEDULE_SIZES.split() if arguments.schedule else ()), *given]
    needed = 1
    for size in vars(sizes.parse_known_args(words)[0]).values():
        needed *= size
    return arguments.num_processes or needed


# ---------------------------------------------------------------- figures


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A method in one round. Times in milliseconds."""

    step_ms: Mapping[str, tuple[float, ...]]
    """By block, the steps that count."""
    switch_ms: Mapping[str, float]
    """By block, of entering it; not of the first."""
    loss: float | None
    """Of the last step; None where it is not finite."""
    model_state_bytes: tuple[int, ...]
    """By rank, the maximum over the phases."""
    peak_memory_bytes: tuple[int, ...]
    tokens_per_second: float | None
    tflops_per_gpu: float | None

    def block_ms(self, block: str) -> float:
        """Median over the block's steps; of full training's only block whichever is asked for."""
        return statistics.median(self.step_ms[block] if block in self.step_ms else next(iter(self.step_ms.values())))

    @property
    def iteration_ms(self) -> float:
        """Mean over the blocks, which all get equally many steps."""
        return statistics.fmean(map(self.block_ms, self.step_ms))


def turn_of(lines: Sequence[Mapping[str, Any]]) -> Turn:
    """What a metrics file says that has a line per step."""
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
        raise CannotRun("it has phases without a step that counts")
    last = steps[-1]
    return Turn(
        step_ms={block: tuple(of_block) for block, of_block in times.items()},
        switch_ms=switches,
        loss=last["loss"],
        model_state_bytes=_most(steps, "model_state_bytes"),
        peak_memory_bytes=_most(steps, "peak_memory_bytes"),
        tokens_per_second=last.get("tokens_per_second") and last["tokens_per_second"] * last["step_time_ms"],
        tflops_per_gpu=statistics.median(line.get("tflops_per_gpu") or 0 for line in steps) or None,
    )


def _most(steps: Sequence[Mapping[str, Any]], name: str) -> tuple[int, ...]:
    return tuple(map(max, zip(*(step[name] for step in steps), strict=True)))


def rows_of(methods: Sequence[Method], turns: Mapping[str, Sequence[Turn]]) -> list[dict[str, Any]]:
    """The table: means over the rounds. Ratios are to the method that a method is compared with, if that ran."""
    tokens = next((turn.tokens_per_second for one in turns.values() for turn in one if turn.tokens_per_second), None)
    rows = []
    for method in methods:
        own, others = turns.get(method.name), turns.get(method.against)
        if not own:
            continue
        blocks = [_block_row(method, block, own, others or ()) for block in own[0].step_ms]
        mean = statistics.geometric_mean(turn.iteration_ms for turn in own)
        bounds = [method.arithmetic(block.index) for block in method.partition.blocks]
        rows.append(
            {
                "method": method.name,
                "processes": method.num_processes,
                "model_state_bytes": max(sum(turn.model_state_bytes) for turn in own),
                "peak_memory_bytes": max(max(turn.peak_memory_bytes) for turn in own),
                "step_ms": mean,
                "tokens_per_second": tokens and tokens / mean,
                "tflops_per_gpu": own[-1].tflops_per_gpu,
                "against": method.against,
                "ratio": _ratio(own, others or (), None),
                "arithmetic": statistics.fmean(bounds),
                "loss": own[-1].loss,
                "blocks": blocks if len(blocks) > 1 else [],
            }
        )
    return rows


def _block_row(method: Method, block: str, own: Sequence[Turn], others: Sequence[Turn]) -> dict[str, Any]:
    partition, index = method.partition, int(block) if block.isdecimal() else None
    layers = ", ".join((partition.describe_layers(index or 0), *partition.describe_extras(index or 0)))
    switches = [turn.switch_ms[block] for turn in own if block in turn.switch_ms]
    return {
        "block": block,
        "layers": "-" if index is None else layers,
        "step_ms": statistics.geometric_mean(turn.block_ms(block) for turn in own),
        "ratio": _ratio(own, others, block),
        "arithmetic": None if index is None else method.arithmetic(index),
        "switch_ms": statistics.median(switches) if switches else None,
    }


def _ratio(own: Sequence[Turn], others: Sequence[Turn], block: str | None) -> float | None:
    """Geometric mean over the rounds; a machine that is slow for a round is so for both."""
    pairs = [(one, other) for one, other in zip(own, others, strict=False)]
    if not pairs:
        return None
    if block is None:
        return statistics.geometric_mean(one.iteration_ms / other.iteration_ms for one, other in pairs)
    return statistics.geometric_mean(one.block_ms(block) / other.block_ms(block) for one, other in pairs)


def rotated(names: Sequence[str], round_index: int) -> list[str]:
    """The order of a round: each is first, second, ... equally often, so a drift favours none."""
    start = round_index % len(names)
    return [*names[start:], *names[:start]]


def show(figures: Mapping[str, Any]) -> None:
    """The tables and what is needed to read them."""

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
    print_table([*columns], [cells(row, columns) for row in rows])
    blocks = [block | {"method": row["method"]} for row in rows for block in row["blocks"]]
    if blocks:
        of_blocks = {name: columns[name] for name in ("ms/step", "ratio", "arithmetic")}
        of_blocks = {name: (name, "") for name in ("method", "block", "layers")} | of_blocks
        of_blocks["switch ms"] = ("switch_ms", ",.1f")
        print()
        print_table([*of_blocks], [cells(block, of_blocks) for block in blocks], num_left=3)
    for name, why in figures["not_run"].items():
        print(f"{name} is not run: {why}")
    references = {row["method"]: row["against"] for row in rows if row["against"] != row["method"]}
    if references:
        print("ratio:", ", ".join(f"{name} to {other}" for name, other in references.items()))
    print(
        "arithmetic: F, D and W of the layers as 1 each over full training's, without embedding, head and optimizer\n"
        "state: weights, gradients, optimizer state, all processes; peak: of the largest process"
        f"{'' if figures['has_gpu'] else ', its resident set with all libraries'}\n"
        f"{figures['hardware']}\n{figures['command']}"
    )


def gpu_name() -> str:
    """Empty on a CPU. Asked in a process of its own, which frees the device."""
    program = "from megatron.bcd.runtime import device; print(device.name() if device.has_cuda() else '')"
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def hardware(gpu: str, threads: int) -> str:
    """Device and versions."""
    name = gpu or f"{cpu_model()}, {threads} thread(s) per process of {os.cpu_count()} cores"
    packages = [package for package in ("torch", "megatron-core", "transformers", "badam", "peft")
                if importlib.util.find_spec(package.replace("-", ".")) is not None]  # fmt: skip
    return ", ".join([name, *(f"{package} {importlib.metadata.version(package)}" for package in packages)])


# ---------------------------------------------------------------- command line


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The tool's own flags, and those of the training. Raises ValueError."""
    parser = Parser(
        prog=PROG,
        usage="%(prog)s [flags below] [flags of pretrain_gpt_bcd.py]",
        description=__doc__,
        epilog="All other flags are those of the training scripts, whose --help describes them.",
    )
    add = parser.add_argument_group("benchmark").add_argument
    add("--methods", default="full,bcd", metavar="LIST", help=f"of {', '.join(METHODS)} (default: full,bcd)")
    add("--variant", action="append", default=[], metavar="NAME=FLAGS", help="one more row, with these flags besides")
    add("--schedule", action="store_true", help="the BCD and the stock pipeline schedule, in every layout")
    add("--prefix-cache", action="store_true", help="steps with and without a prefix cache")
    add("--model", metavar="NAME", help="a row of the model table")
    add("--models", metavar="FILE", default=str(ROOT / "examples" / "models.csv"), help="the model table")
    add("--family", choices=SCRIPTS, help="whose training script (default: gpt; with --model and --sft its own)")
    add("--num-processes", type=int, metavar="N", help="of each training (default: as few as the flags need)")
    add("--rounds", type=int, default=5, metavar="N", help="turns of each method (default: 5)")
    add("--steps", type=int, default=6, metavar="N", help="counted steps of each block in a turn (default: 6)")
    add_json(parser)
    arguments, given = parser.parse_known_args(list(argv))
    if "RANK" in os.environ:
        raise ValueError("start it with python, without torchrun: it starts --num-processes itself")
    for name in ("rounds", "steps", "num_processes"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    named = [name.strip() for name in arguments.methods.split(",")]
    for name in named:
        if name not in METHODS or named.count(name) > 1:
            raise ValueError(f"--methods {arguments.methods}: {name} must be one of {', '.join(METHODS)}, once")
        missing = [package for package in PEERS.get(name, ()) if importlib.util.find_spec(package) is None]
        if missing:
            raise ValueError(f"--methods {name} needs {' and '.join(missing)}: the pins are in requirements.txt")
    for entry in arguments.variant:
        name, _, flags = entry.partition("=")
        if not name or name in named or not flags.lstrip().startswith("--"):
            raise ValueError(f"--variant {entry}: must be a new NAME, =, and flags")
    for name in OWN:
        if any(word.split("=")[0] == f"--{name}" for word in given):
            raise ValueError(f"--{name} has no use in a benchmark: leave it out")
    check_can_write(arguments.json, flag="--json")
    return arguments, given


def measure(
    methods: Sequence[Method], num_rounds: int, *, threads: int
) -> tuple[dict[str, list[Turn]], dict[str, CannotRun]]:
    """The turns of every method, and why others have none."""
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
                    turns[method].append(turn_of(read_metrics(metrics)))
                except CannotRun as error:
                    failed[method] = error
                    del turns[method]
                    print(f"{method} is not run: {error}", file=sys.stderr)
                    continue
                ms = turns[method][-1].iteration_ms
                print(f"round {index + 1}/{num_rounds}: {method} {ms:,.1f} ms", file=sys.stderr, flush=True)
    return turns, failed


@command(PROG)
def main(argv: Sequence[str]) -> int:
    arguments, given = parse_arguments(argv)
    methods = methods_of(arguments, given)
    num_processes = max(method.num_processes for method in methods)
    threads = int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // num_processes))
    gpu = gpu_name()
    if not gpu and any(method.name == "offload" for method in methods):
        raise ValueError("--methods offload needs a CUDA GPU, and this machine shows none")
    turns, failed = measure(methods, arguments.rounds, threads=threads)
    figures = {
        "command": shlex.join(["python", PROG, *argv]),
        "hardware": hardware(gpu, threads),
        "has_gpu": bool(gpu),
        "rounds": arguments.rounds,
        "commands": {method.name: method.command() for method in methods},
        "rows": rows_of(methods, turns),
        "not_run": {name: str(error) for name, error in failed.items()},
        "turns": {name: [asdict(turn) for turn in of_method] for name, of_method in turns.items()},
    }
    tell(arguments.json, figures, lambda: show(figures))
    return 1 if not turns or any(not error.for_want_of_memory for error in failed.values()) else 0


if __name__ == "__main__":
    leave_with(main)
