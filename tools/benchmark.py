"""Times BCD steps and full-parameter steps alternately in one run: ratio, bound, model state, switch.

    python tools/benchmark.py --num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 256
    torchrun --nproc-per-node 2 tools/benchmark.py --pipeline-model-parallel-size 2 --json out/benchmark.json
    python tools/benchmark.py --schedule

In each round full training and every block have one turn: build, untimed warm-up steps, timed steps, dispose. The
order rotates from round to round. All turns train the same model with the training loop's step. Takes the flags of
pretrain_gpt_bcd.py; the default is the model above with mock data, without dropout.

--prefix-cache times steps that read their prefix from a cache, steps that compute it, and a fill.

--schedule times the BCD pipeline schedule and Megatron Core's 1F1B for every layout and block, with predictions; by
default on two pipeline stages. Without torchrun it starts two processes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import _benchmark_prefix_cache as prefix_cache
import _benchmark_schedule as schedule
import torch
from _benchmark_common import (
    PROG,
    SPARE_STEPS,
    Bench,
    check_can_write,
    command_line,
    cut,
    hardware,
    now,
    now_on_all_ranks,
    print_table,
    table,
    write_json,
)
from _benchmark_figures import BlockFigures, Turn, block_figures, mean_ratio, rotated, slowest
from _parser import STDOUT, Parser, add_json, leave_with
from megatron.core.num_microbatches_calculator import get_num_microbatches
from rich.table import Table

from megatron.bcd.arguments import parse_run_config
from megatron.bcd.config import RunConfig
from megatron.bcd.metrics.console import bytes_by_rank
from megatron.bcd.model.implementation import implementation_here
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.pipeline.schedule import PipelineSchedule
from megatron.bcd.planner.cost import compute_ratio
from megatron.bcd.runtime import collectives, distributed, rng
from megatron.bcd.runtime.exit import exit_on_error

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
NUM_ROUNDS = 7
# Training flags that a benchmark does not use: refused, not ignored.
REFUSED = ("train-iters", "train-samples", "rampup-batch-size", "skip-train", "save", "save-interval", "eval-iters",
           "eval-interval", "log-interval", "metrics-file", "tensorboard-dir", "wandb-project", "wandb-entity",
           "wandb-exp-name", "wandb-save-dir", "manual-gc", "manual-gc-interval")  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """This tool's own flags."""
    parser = Parser(
        prog=PROG,
        usage="%(prog)s [flags below] [flags of pretrain_gpt_bcd.py]",
        description=__doc__,
        epilog="All other flags are those of pretrain_gpt_bcd.py, whose --help describes them.",
    )
    group = parser.add_argument_group("benchmark")
    group.add_argument(
        "--schedule", action="store_true", help="time the BCD and the stock pipeline schedule, in every layout"
    )
    group.add_argument("--prefix-cache", action="store_true", help="time steps with and without a prefix cache")
    group.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help=f"turns of each variant (default: {NUM_ROUNDS}, with --schedule {schedule.NUM_ROUNDS}, with "
        f"--prefix-cache {prefix_cache.NUM_ROUNDS})",
    )
    group.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"timed steps of a turn (default: 3, with --prefix-cache {prefix_cache.NUM_STEPS})",
    )
    group.add_argument(
        "--warm-up-steps", type=int, default=1, metavar="N", help="untimed steps before them (default: 1)"
    )
    add_json(group)
    return parser


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, RunConfig]:
    """This tool's own flags, and the run that all others describe.

    Raises:
        ValueError: one line that names the flag, what is wrong and what would be right.
        SystemExit: code 0, after ``--help``.
    """
    own, rest = build_parser().parse_known_args(list(argv))
    if own.schedule and own.prefix_cache:
        raise ValueError("--schedule and --prefix-cache are two benchmarks: give one of them")
    own_mode = schedule if own.schedule else prefix_cache if own.prefix_cache else None
    if own.rounds is None:
        own.rounds = own_mode.NUM_ROUNDS if own_mode else NUM_ROUNDS
    if own.steps is None:
        own.steps = prefix_cache.NUM_STEPS if own.prefix_cache else 3
    given = {word.split("=", 1)[0] for word in rest}
    has_data = any(flag.endswith("-data-path") for flag in given)
    defaults = DEFAULTS | (own_mode.DEFAULTS if own_mode else {}) | ({} if has_data else MOCK_DEFAULTS)
    for flag in ("rounds", "steps", "warm_up_steps"):
        if getattr(own, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {getattr(own, flag)}: must be at least 1")
    for name in (*REFUSED, *(own_mode.REFUSED if own_mode else ())):
        if f"--{name}" in given:
            raise ValueError(f"--{name} has no use in a benchmark: leave it out")
    if own.json not in (None, STDOUT):
        check_can_write(own.json)
    starts_ranks = own.schedule and not schedule.has_ranks()
    config = parse_run_config(
        rest, prog=PROG, defaults=defaults, world_size=schedule.NUM_RANKS if starts_ranks else None
    )
    config = _with_length(config, own, has_batch="--global-batch-size" in given)
    return own, prefix_cache.with_phases(config, own) if own.prefix_cache else config


def _with_length(config: RunConfig, own: argparse.Namespace, *, has_batch: bool) -> RunConfig:
    """As many samples as the turns take; and a few microbatches a step unless a flag says how many."""
    batch = config.training.global_batch_size
    assert batch is not None, "the parser fills it in"
    steps_per_turn = max(own.warm_up_steps, SPARE_STEPS if config.precision == "fp16" else 0) + own.steps
    if own.schedule:
        num_microbatches = schedule.NUM_MICROBATCHES
        num_steps = schedule.num_steps(config, num_rounds=own.rounds, num_steps_per_turn=steps_per_turn)
    else:
        num_microbatches = NUM_MICROBATCHES
        num_blocks = cut(config, num_blocks=config.bcd.bcd_num_blocks, layout=config.bcd.bcd_layout).num_blocks
        num_steps = (1 + own.rounds * (1 + num_blocks)) * steps_per_turn
    training = dataclasses.replace(
        config.training, train_iters=num_steps, global_batch_size=batch if has_batch else num_microbatches * batch
    )
    return dataclasses.replace(config, training=training)


class Benchmark:
    """One model and two active sets on it: a single block that covers everything, and the blocks of the flags."""

    def __init__(self, config: RunConfig, *, num_warm_up_steps: int, num_steps: int) -> None:
        self.bench = Bench(config)
        self.num_warm_up_steps, self.num_steps = num_warm_up_steps, num_steps
        components = self.bench.components
        self.partition = components.partition
        self.blocks, self.blocks_schedule = components.active, components.pipeline
        whole = cut(config, num_blocks=1, layout="spread")
        self.full = ActiveBlock(model=components.model, config=config, partition=whole, stage=self.bench.stage)
        self.full_schedule = PipelineSchedule(name=config.bcd.bcd_schedule, partition=whole, run_ahead=None)

    def measure(self, num_rounds: int, argv: Sequence[str]) -> dict[str, Any] | None:
        """Time, and show the table; on rank 0 the figures, else None."""
        turns = self.run(num_rounds)
        if torch.distributed.get_rank() != 0:
            return None
        rows = self.rows(turns)
        figures = result(self.bench.components.config, rows, turns, argv)
        show(figures, rows)
        return figures

    def run(self, num_rounds: int) -> dict[int, list[Turn]]:
        """Turns by variant (FULL or a block), one per round; the same on every rank."""
        variants = [FULL, *range(self.partition.num_blocks)]
        turns: dict[int, list[Turn]] = {variant: [] for variant in variants}
        self._turn(FULL)  # the first steps of a process load kernels and fetch memory: no variant's fault
        for index in range(num_rounds):
            for variant in rotated(variants, index):
                mine = self._turn(variant)
                turns[variant].append(slowest(collectives.gather_objects(mine)))
            self._tell(index, num_rounds, turns)
        return turns

    def _turn(self, variant: int) -> Turn:
        bench, is_full = self.bench, variant == FULL
        active = self.full if is_full else self.blocks
        pipeline = self.full_schedule if is_full else self.blocks_schedule
        bench.use(active, pipeline)
        start = now_on_all_ranks()
        bench.build(max(variant, 0))
        pipeline.begin_phase(max(variant, 0))
        build_ms = (now() - start) * 1e3
        num_microbatches = get_num_microbatches()
        warm_up_ms = bench.warm_up(self.num_warm_up_steps, num_microbatches_next=num_microbatches)
        # all steps but the last prepare the next one, as in training
        following = [num_microbatches] * (self.num_steps - 1) + [0]
        step_ms = [bench.step(num_microbatches_next=num).milliseconds for num in following]
        model_state_bytes = active.state_bytes().model_state
        start = now_on_all_ranks()
        bench.dispose()
        dispose_ms = (now() - start) * 1e3
        bench.separate_weights()
        return Turn(
            build_ms=build_ms,
            warm_up_ms=tuple(warm_up_ms),
            step_ms=tuple(step_ms),
            dispose_ms=dispose_ms,
            model_state_bytes=(model_state_bytes,),
        )

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


def result(config: RunConfig, rows: Sequence[BlockFigures], turns: dict[int, list[Turn]], argv: Sequence[str]) -> Any:
    """Everything that --json writes: times in milliseconds, bytes by rank."""
    steps_per_block = round(config.bcd.mean_steps)
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


def _table(rows: Sequence[BlockFigures], *, mean: float, bound: float) -> Table:
    shown = table(COLUMNS, num_left=2)
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
    print_table(_table(rows, mean=figures["mean_ratio"], bound=figures["mean_bound"]))
    print(
        f"with a switch every {figures['steps_per_block']} steps (--bcd-steps-per-block): mean ratio "
        f"{figures['mean_ratio_with_switches']:.3f}\n"
        "bound: F, D and W of the layers as 1 each, on the slowest stage, without embedding, head and optimizer\n"
        "switch: dispose and build, and what the first step after it takes longer\n"
        f"{figures['hardware']}\n{figures['implementation']}\n{figures['command']}"
    )


def main(argv: Sequence[str]) -> None:
    with exit_on_error(ValueError, prog=PROG):
        own, config = parse(argv)
        if own.schedule and not schedule.has_ranks():
            schedule.start_ranks(__file__, argv)
        distributed.initialize(
            backend=config.training.distributed_backend,
            timeout_minutes=config.training.distributed_timeout_minutes,
            tensor_size=config.tensor_size,
            pipeline_size=config.pipeline_size,
            context_size=config.context_size,
        )
        rng.seed_everything(config.training.seed)
        kind: Any = Benchmark
        if own.schedule or own.prefix_cache:
            kind = schedule.ScheduleBenchmark if own.schedule else prefix_cache.PrefixCacheBenchmark
        benchmark = kind(config, num_warm_up_steps=own.warm_up_steps, num_steps=own.steps)
    with contextlib.redirect_stdout(sys.stderr if own.json == STDOUT else sys.stdout):
        figures = benchmark.measure(own.rounds, argv)
    if figures and own.json == STDOUT:
        print(json.dumps(figures, indent=1))
    elif figures and own.json:
        write_json(own.json, figures)
        print(f"wrote {own.json}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":  # reader processes may import this file
    leave_with(lambda: main(sys.argv[1:]))
