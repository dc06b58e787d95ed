"""Times steps that read their prefix from a cache and steps that compute it: tools/benchmark.py --prefix-cache.

In each round every block with a prefix is built once, as a phase of its own: a new subset of the data, which is used
NUM_USES times. Steps that compute the prefix and steps with the cache go through the phase side by side, one of each in
turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _benchmark_common import Bench, command_line, cut, hardware, now, print_table, table
from _benchmark_figures import rotated

from megatron.bcd import data
from megatron.bcd.blocks.schedule import PhaseState
from megatron.bcd.config import RunConfig
from megatron.bcd.metrics.console import format_bytes
from megatron.bcd.model.implementation import implementation_here
from megatron.bcd.planner.cost import compute_ratio

NUM_ROUNDS = 4
NUM_STEPS = 15  # and one untimed: with 4 sequences a step, 16 samples are used 4 times
NUM_USES = 4
REFUSED = ("bcd-layout", "bcd-schedule", "bcd-order", "bcd-switch", "bcd-steps-per-block", "bcd-sample-ratio",
           "bcd-always-active", "data-path", "train-data-path")  # fmt: skip
DEFAULTS: dict[str, object] = {"bcd_sample_ratio": 1.0}
_UNITS_OF_FULL_TRAINING = 3  # forward, input gradient, weight gradient


def with_phases(config: RunConfig, own: argparse.Namespace) -> RunConfig:
    """Phases of as many steps as a turn has, on a subset that they use NUM_USES times; the cache in a folder that goes
    with this process unless --bcd-prefix-cache names one.

    Raises:
        ValueError: there is nothing to measure with these flags.
    """
    blocks = cut(config, num_blocks=config.bcd.bcd_num_blocks, layout=config.bcd.bcd_layout)
    if config.pipeline_size > 1:
        raise ValueError(
            f"--pipeline-model-parallel-size {config.pipeline_size}: --prefix-cache measures one pipeline stage"
        )
    if blocks.num_blocks < 2:
        raise ValueError("--bcd-num-blocks 1: no block has a prefix; give at least 2 for --prefix-cache")
    batch = config.training.global_batch_size
    steps = own.warm_up_steps + own.steps
    if batch is None or steps * batch % NUM_USES:
        raise ValueError(
            f"--steps {own.steps} and --warm-up-steps {own.warm_up_steps}: together, times --global-batch-size, they "
            f"must be a multiple of {NUM_USES}"
        )
    num_steps = (own.rounds + 1) * blocks.num_blocks * steps
    return dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, train_iters=num_steps),
        bcd=dataclasses.replace(
            config.bcd,
            bcd_steps_per_block=steps,
            bcd_sample_ratio=steps / NUM_USES / num_steps,
            bcd_prefix_cache=config.bcd.bcd_prefix_cache or _folder_of_this_process().name,
        ),
    )


_folders: list[tempfile.TemporaryDirectory[str]] = []


def _folder_of_this_process() -> tempfile.TemporaryDirectory[str]:
    _folders.append(tempfile.TemporaryDirectory(prefix="prefix_cache_"))
    return _folders[-1]


@dataclass(frozen=True, kw_only=True)
class CacheTurn:
    """One block in one round. Times in milliseconds."""

    computed_ms: tuple[float, ...]
    served_ms: tuple[float, ...]
    fill_ms: float
    """From the decision to keep the outputs until the first of them could be read."""
    num_samples: int

    @property
    def ratio(self) -> float:
        """Median over the pairs of steps that followed each other."""
        return statistics.median(
            served / computed for served, computed in zip(self.served_ms, self.computed_ms, strict=True)
        )


class PrefixCacheBenchmark:
    """One model, and turns of its blocks that have a prefix."""

    def __init__(self, config: RunConfig, *, num_warm_up_steps: int, num_steps: int) -> None:
        self.bench = Bench(config)
        self.num_warm_up_steps, self.num_steps = num_warm_up_steps, num_steps
        self.partition = self.bench.components.partition
        self.blocks = [block.index for block in self.partition.blocks if self.partition.prefix_layers(block.index)]

    def measure(self, num_rounds: int, argv: Sequence[str]) -> dict[str, Any] | None:
        """Time, and show the table; on rank 0 the figures, else None."""
        turns: dict[int, list[CacheTurn]] = {block: [] for block in self.blocks}
        for index in range(num_rounds):
            for block in self.blocks:
                turns[block].append(self._turn(index, block))
            if torch.distributed.get_rank() == 0:
                told = ", ".join(f"block {block} {of_block[-1].ratio:.3f}" for block, of_block in turns.items())
                print(f"round {index + 1}/{num_rounds}: {told}", file=sys.stderr, flush=True)
        if torch.distributed.get_rank() != 0:
            return None
        figures = self._figures(turns, argv)
        _show(figures)
        return figures

    def _turn(self, index: int, block: int) -> CacheTurn:
        bench, samples, cache = self.bench, self.bench.components.samples, self.bench.components.prefix_cache
        phase = index * self.partition.num_blocks + block
        bench.state.phase_state = PhaseState(phase=phase)
        bench.build(block)
        bench.components.module.train()
        samples.end_phase()
        num_uses = bench.components.block_schedule.least_steps(0) * data.global_batch_size(bench.components.config)
        start = now()
        is_served = cache.begin_phase(phase, block, num_samples=num_uses)
        fill_ms = (now() - start) * 1e3
        assert is_served and samples.subset is not None, "the flags say so"
        bench.components.pipeline.begin_phase(block, is_prefix_served=True)
        served = cache.serve(samples.batches(phase=phase, consumed_samples=0, position=0), position=0)
        samples.end_phase()
        computed = samples.batches(phase=phase, consumed_samples=0, position=0)
        times = self._steps({"computed": computed, "served": served}, index)
        cache.close()
        bench.dispose()
        bench.separate_weights()
        return CacheTurn(
            computed_ms=times["computed"],
            served_ms=times["served"],
            fill_ms=fill_ms,
            num_samples=samples.subset.size,
        )

    def _steps(self, ways: dict[str, Any], index: int) -> dict[str, tuple[float, ...]]:
        """Milliseconds of the timed steps, by way; one of each in turn, so that both meet the same machine."""
        times: dict[str, list[float]] = {way: [] for way in ways}
        for step in range(self.num_warm_up_steps + self.num_steps):
            for way in rotated(list(ways), index + step):
                times[way].append(self.bench.step(batches=ways[way]).milliseconds)
        return {way: tuple(of_way[self.num_warm_up_steps :]) for way, of_way in times.items()}

    def _figures(self, turns: dict[int, list[CacheTurn]], argv: Sequence[str]) -> dict[str, Any]:
        config = self.bench.components.config
        return {
            "command": command_line(argv),
            "hardware": hardware(),
            "implementation": implementation_here(config).describe(),
            "cache_dtype": config.bcd.bcd_prefix_cache_dtype,
            "uses": NUM_USES,
            "blocks": [self._row(block, of_block) for block, of_block in turns.items()],
            "turns": {f"block {block}": list(map(dataclasses.asdict, all_)) for block, all_ in turns.items()},
        }

    def _row(self, block: int, turns: Sequence[CacheTurn]) -> dict[str, Any]:
        layers = len(self.partition.prefix_layers(block))
        units = _UNITS_OF_FULL_TRAINING * self.partition.num_layers * compute_ratio(self.partition, block)
        config = self.bench.components.config
        value_bytes = 2 if config.bcd.bcd_prefix_cache_dtype == "bf16" else 4
        return {
            "block": block,
            "layers": self.partition.describe_layers(block),
            "prefix_layers": layers,
            "computed_ms": statistics.median(time for turn in turns for time in turn.computed_ms),
            "served_ms": statistics.median(time for turn in turns for time in turn.served_ms),
            "ratio": statistics.median(turn.ratio for turn in turns),
            "bound": (units - layers) / units,
            "fill_ms_per_sample": statistics.median(turn.fill_ms / turn.num_samples for turn in turns),
            "bytes_per_sample": config.model.seq_length * config.hidden_size * value_bytes,
        }


COLUMNS = ("block", "layers", "prefix", "computed ms", "cached ms", "ratio", "bound", "fill ms/sample", "per sample")


def _show(figures: dict[str, Any]) -> None:
    shown = table(COLUMNS, num_left=2)
    for row in figures["blocks"]:
        shown.add_row(
            str(row["block"]),
            row["layers"],
            f"{row['prefix_layers']}",
            f"{row['computed_ms']:,.1f}",
            f"{row['served_ms']:,.1f}",
            f"{row['ratio']:.3f}",
            f"{row['bound']:.3f}",
            f"{row['fill_ms_per_sample']:,.2f}",
            format_bytes(row["bytes_per_sample"]),
        )
    print_table(shown)
    print(
        f"ratio: step with the cache / step that computes its prefix; each sample is used {NUM_USES} times\n"
        "bound: F, D and W of the layers as 1 each, without embedding, head and optimizer\n"
        f"{figures['hardware']}\n{figures['implementation']}\n{figures['command']}"
    )
