"""Times BCD steps beside full-parameter steps, alternately and in one run: ratio, bound, model state, switch.

    python tools/benchmark.py --num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 256
    torchrun --nproc-per-node 2 tools/benchmark.py --pipeline-model-parallel-size 2 --json out/benchmark.json

In each round full training and every block have one turn: build, untimed warm-up steps, timed steps, dispose; the
order rotates from round to round. All turns train the same model object with the training loop's own step. Takes the
flags of pretrain_gpt_bcd.py; without them the model is the one above, on made-up tokens, without dropout.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib.metadata
import json
import os
import platform as python_platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from _benchmark_figures import BlockFigures, Turn, block_figures, mean_ratio, rotated, slowest
from rich.console import Console
from rich.table import Table

from megatron.bcd import data, platform
from megatron.bcd.active_set import ActiveSet
from megatron.bcd.arguments import parse_run_config
from megatron.bcd.blocks import Partition, partition
from megatron.bcd.config import RunConfig
from megatron.bcd.cost import compute_ratio
from megatron.bcd.models import build_model, implementation_here
from megatron.bcd.refusal import refusing
from megatron.bcd.report.lines import bytes_by_rank
from megatron.bcd.report.silent import SilentReporter
from megatron.bcd.train import Trainer

PROG = "tools/benchmark.py"
FULL = -1  # the variant that is not a block
DEFAULTS: dict[str, object] = {
    "num_layers": 12,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 256,
    "micro_batch_size": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "lr": 1e-4,
    "lr_decay_style": "constant",
    "train_iters": 1_000_000,  # the parser wants one; the turns decide how many steps there are
    "eval_iters": 0,
    "num_workers": 0,  # a reader process would take a core from the steps that are timed
}
MOCK_DEFAULTS: dict[str, object] = {"mock_data": True, "tokenizer_type": "NullTokenizer", "vocab_size": 1023}
NUM_MICROBATCHES = 2
SPARE_STEPS = 64  # more than fp16's loss scale can be halved
# Flags of training that a benchmark has no use for: refused, not ignored.
REFUSED = ("train-iters", "train-samples", "rampup-batch-size", "skip-train", "save", "save-interval", "eval-iters",
           "eval-interval", "log-interval", "metrics-file", "tensorboard-dir", "wandb-project", "wandb-entity",
           "wandb-exp-name", "wandb-save-dir", "manual-gc", "manual-gc-interval")  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, RunConfig]:
    """This tool's own flags, and the run that all others describe.

    Raises:
        ValueError: one line that names the flag, what is wrong and what would be right.
        SystemExit: code 0, after ``--help``.
    """
    parser = _Parser(prog=PROG, allow_abbrev=False, add_help=False, usage=argparse.SUPPRESS, description=__doc__,
                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    group = parser.add_argument_group("benchmark")
    group.add_argument("--rounds", type=int, default=7, metavar="N", help="turns of each variant (default: 7)")
    group.add_argument("--steps", type=int, default=3, metavar="N", help="timed steps of a turn (default: 3)")
    group.add_argument(
        "--warm-up-steps", type=int, default=1, metavar="N", help="untimed steps before them (default: 1)"
    )
    group.add_argument("--json", metavar="FILE", help="write all figures and every single time to this file")
    own, rest = parser.parse_known_args(list(argv))
    given = {word.split("=", 1)[0] for word in rest}
    has_data = any(flag.endswith("-data-path") for flag in given)
    defaults = DEFAULTS if has_data else DEFAULTS | MOCK_DEFAULTS
    if given & {"-h", "--help"}:
        print(parser.format_help())
        parse_run_config(["--help"], prog=PROG, defaults=defaults)
    for flag in ("rounds", "steps", "warm_up_steps"):
        if getattr(own, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {getattr(own, flag)}: must be at least 1")
    for name in REFUSED:
        if f"--{name}" in given:
            raise ValueError(f"--{name} has no use in a benchmark: leave it out (--help describes every flag)")
    if own.json:
        check_can_write(own.json)
    config = parse_run_config(rest, prog=PROG, defaults=defaults)
    return own, _with_length(config, own, has_batch="--global-batch-size" in given)


def check_can_write(path: str) -> None:
    """Try the folder of --json before hours are spent; raises ValueError where nothing can be written."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise ValueError(f"--json {path}: is a folder; give a file")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--json {path}: {error.strerror}: {folder}; give a folder that can be written") from None


def cut(config: RunConfig, *, num_blocks: int | None, layout: str) -> Partition:
    return partition(
        num_layers=config.num_layers,
        num_stages=config.pipeline_size,
        num_blocks=num_blocks,
        layout=layout,
        tied=config.tied,
    )


def _with_length(config: RunConfig, own: argparse.Namespace, *, has_batch: bool) -> RunConfig:
    """As many samples as the turns take; and two microbatches a step unless a flag says how many."""
    num_blocks = cut(config, num_blocks=config.bcd.bcd_num_blocks, layout=config.bcd.bcd_layout).num_blocks
    batch = config.training.global_batch_size
    assert batch is not None, "the parser fills it in"
    steps_per_turn = max(own.warm_up_steps, SPARE_STEPS if config.precision == "fp16" else 0) + own.steps
    training = dataclasses.replace(
        config.training,
        train_iters=(1 + own.rounds * (1 + num_blocks)) * steps_per_turn,
        global_batch_size=batch if has_batch else NUM_MICROBATCHES * batch,
    )
    return dataclasses.replace(config, training=training)


class Benchmark:
    """One model and two active sets on it: a single block that covers everything, and the blocks of the flags."""

    def __init__(self, config: RunConfig, *, num_warm_up_steps: int, num_steps: int) -> None:
        self.trainer = Trainer(config, build_model, SilentReporter())
        self.num_warm_up_steps, self.num_steps = num_warm_up_steps, num_steps
        self.partition = self.trainer.partition
        self.blocks = self.trainer.active
        self.full = ActiveSet(
            model=self.trainer.model,
            config=config,
            partition=cut(config, num_blocks=1, layout="spread"),
            stage=self.trainer.stage,
        )
        self._batches: Iterator[data.Batch] = (
            data.no_batches()
            if self.trainer.splits.train is None
            else data.batches(self.trainer.splits.train, config, consumed_samples=0)
        )
        if self.blocks.wrapped is not None:  # the trainer begins with block 0, and here every turn builds for itself
            self.trainer.scheduler.optimizer = None
            self.blocks.dispose()
            self._separate_weights()
        gc.freeze()  # as the training loop does

    def run(self, num_rounds: int) -> dict[int, list[Turn]]:
        """Turns by variant (FULL or a block), one per round; the same on every rank."""
        variants = [FULL, *range(self.partition.num_blocks)]
        turns: dict[int, list[Turn]] = {variant: [] for variant in variants}
        self._turn(FULL)  # the first steps of a process load kernels and fetch memory: no variant's fault
        for index in range(num_rounds):
            for variant in rotated(variants, index):
                mine = self._turn(variant)
                ranks: list[Any] = [None] * torch.distributed.get_world_size()
                torch.distributed.all_gather_object(ranks, mine)
                turns[variant].append(slowest(ranks))
            self._tell(index, num_rounds, turns)
        return turns

    def _turn(self, variant: int) -> Turn:
        trainer = self.trainer
        trainer.active = self.full if variant == FULL else self.blocks
        start = _now_on_all_ranks()
        trainer.active.build(max(variant, 0))
        trainer.scheduler.optimizer = trainer.active.optimizer
        trainer.scheduler.step(0)
        build_ms = (_now() - start) * 1e3
        warm_up_ms = self._warm_up()
        step_ms = [trainer.train_step(self._batches).milliseconds for _ in range(self.num_steps)]
        model_state_bytes = trainer.active.model_state_bytes()
        start = _now_on_all_ranks()
        trainer.scheduler.optimizer = None
        trainer.active.dispose()
        dispose_ms = (_now() - start) * 1e3
        self._separate_weights()
        return Turn(
            build_ms=build_ms,
            warm_up_ms=tuple(warm_up_ms),
            step_ms=tuple(step_ms),
            dispose_ms=dispose_ms,
            model_state_bytes=(model_state_bytes,),
        )

    def _warm_up(self) -> list[float]:
        """Untimed steps, in fp16 as many more as its loss scale takes to come down: a skipped step is a short one."""
        times: list[float] = []
        is_usual = False
        while not is_usual or len(times) < self.num_warm_up_steps:
            result = self.trainer.train_step(self._batches)
            times.append(result.milliseconds)
            is_usual = not result.skipped or len(times) >= SPARE_STEPS
        return times

    @torch.no_grad()
    def _separate_weights(self) -> None:
        """Give each weight its own storage again.

        The distributed optimizer leaves them as views of its buffer. Full training's buffer covers all of them, so a
        block that moves its own into another would be counted, and would pay, for both.
        """
        for parameter in self.trainer.model.parameters():
            parameter.data = parameter.data.clone()

    def _tell(self, index: int, num_rounds: int, turns: dict[int, list[Turn]]) -> None:
        if torch.distributed.get_rank() != 0:
            return
        times = {variant: statistics.median(of_variant[-1].step_ms) for variant, of_variant in turns.items()}
        blocks = ", ".join(f"block {block} {ms:,.1f}" for block, ms in times.items() if block != FULL)
        print(f"round {index + 1}/{num_rounds}: full {times[FULL]:,.1f} ms, {blocks}", file=sys.stderr, flush=True)

    def rows(self, turns: dict[int, list[Turn]]) -> list[BlockFigures]:
        """The table's rows, one per block."""
        return [
            block_figures(
                turns[block.index],
                turns[FULL],
                block=block.index,
                layers=self.partition.describe_layers(block.index),
                extras=self.partition.describe_extras(block.index),
                bound=compute_ratio(self.partition, block.index),
            )
            for block in self.partition.blocks
        ]


def _now() -> float:
    platform.synchronize()
    return time.perf_counter()


def _now_on_all_ranks() -> float:
    torch.distributed.barrier()
    return _now()


def command_line(argv: Sequence[str]) -> str:
    """What was typed, torchrun included, so that the figures can be had again."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    launcher = ["python"] if ranks is None else ["torchrun", "--nproc-per-node", ranks]
    threads = os.environ.get("OMP_NUM_THREADS")
    return (f"OMP_NUM_THREADS={threads} " if threads else "") + shlex.join([*launcher, PROG, *argv])


def hardware() -> str:
    """GPU or CPU model, threads, and the versions that decide the speed."""
    device = platform.device()
    if device.type == "cpu":
        name = f"{_cpu_model()}, {torch.get_num_threads()} thread(s) per process of {os.cpu_count()} cores"
    else:
        name = f"{torch.get_device_module(device).get_device_name(device)}"
    return f"{name}, torch {torch.__version__}, Megatron Core {importlib.metadata.version('megatron-core')}"


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else python_platform.processor() or python_platform.machine()


def result(config: RunConfig, rows: Sequence[BlockFigures], turns: dict[int, list[Turn]], argv: Sequence[str]) -> Any:
    """Everything that --json writes: times in milliseconds, bytes by rank."""
    steps_per_block = config.bcd.bcd_steps_per_block
    return {
        "command": command_line(argv),
        "hardware": hardware(),
        "implementation": implementation_here(config).describe(),
        "world_size": torch.distributed.get_world_size(),
        "layout": config.bcd.bcd_layout,
        "mean_ratio": mean_ratio(rows),
        "mean_bound": statistics.fmean(row.bound for row in rows),
        "steps_per_block": steps_per_block,
        "mean_ratio_with_switches": mean_ratio(rows, steps_per_block=steps_per_block),
        "blocks": [dataclasses.asdict(row) for row in rows],
        "turns": {
            "full" if variant == FULL else f"block {variant}": [dataclasses.asdict(turn) for turn in of_variant]
            for variant, of_variant in turns.items()
        },
    }


COLUMNS = ("block", "layers", "full ms", "BCD ms", "ratio", "bound", "state full", "state BCD", "switch ms", "in steps")


def table(rows: Sequence[BlockFigures], *, mean: float, bound: float) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(COLUMNS):
        shown.add_column(column, justify="left" if index < 2 else "right", no_wrap=True)
    for row in rows:
        shown.add_row(
            str(row.block),
            ", ".join((row.layers, *row.extras)),
            f"{row.full_step_ms:,.1f}",
            f"{row.step_ms:,.1f}",
            f"{row.ratio:.3f}",
            f"{row.bound:.3f}",
            bytes_by_rank(row.full_model_state_bytes),
            bytes_by_rank(row.model_state_bytes),
            f"{row.switch_ms:,.1f}",
            f"{row.switch_steps:.2f}",
            end_section=row is rows[-1],
        )
    shown.add_row("mean", "", "", "", f"{mean:.3f}", f"{bound:.3f}", style="bold")
    return shown


def show(figures: dict[str, Any], rows: Sequence[BlockFigures]) -> None:
    """The table and what is needed to read it; plain text where stdout is no terminal."""
    shown = table(rows, mean=figures["mean_ratio"], bound=figures["mean_bound"])
    if sys.stdout.isatty():
        Console(highlight=False).print(shown)
    else:
        text = StringIO()
        Console(file=text, force_terminal=False, width=1000, highlight=False).print(shown)
        print("\n".join(line.rstrip() for line in text.getvalue().splitlines()))
    print(
        f"with a switch every {figures['steps_per_block']} steps (--bcd-steps-per-block): mean ratio "
        f"{figures['mean_ratio_with_switches']:.3f}\n"
        "bound: F, D and W of the layers as 1 each, on the slowest stage, without embedding, head and optimizer\n"
        "switch: dispose and build, and what the first step after it takes longer\n"
        f"{figures['hardware']}\n{figures['implementation']}\n{figures['command']}"
    )


def write_json(path: str, figures: dict[str, Any]) -> None:
    """Written aside and renamed, so that the file is whole or as it was."""
    aside = f"{path}.{os.getpid()}.tmp"
    with open(aside, "w", encoding="utf-8") as file:
        json.dump(figures, file, indent=1)
        file.write("\n")
    os.replace(aside, path)


def main(argv: Sequence[str]) -> None:
    with refusing(ValueError, prog=PROG):
        own, config = parse(argv)
        platform.initialize_distributed(
            backend=config.training.distributed_backend,
            timeout_minutes=config.training.distributed_timeout_minutes,
            tensor_size=config.tensor_size,
            pipeline_size=config.pipeline_size,
        )
        platform.seed_everything(config.training.seed)
        benchmark = Benchmark(config, num_warm_up_steps=own.warm_up_steps, num_steps=own.steps)
    turns = benchmark.run(own.rounds)
    rows = benchmark.rows(turns)
    if torch.distributed.get_rank() == 0:
        figures = result(config, rows, turns, argv)
        show(figures, rows)
        if own.json:
            write_json(own.json, figures)
            print(f"wrote {own.json}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":  # reader processes may import this file
    main(sys.argv[1:])
