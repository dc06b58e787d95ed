"""Times the BCD pipeline schedule and Megatron Core's 1F1B: tools/benchmark.py --schedule.

In each round every block of every layout is built once, and then steps with both schedules; which of them comes first
alternates from round to round. Interleaved blocks are timed in the same rounds, on a second model of the same sizes,
and compared with `spread`'s. A schedule's turn: untimed warm-up steps; timed steps, all together, each of which begins
with what the one before ran ahead with and runs ahead itself; a traced step, which says how long every action took; and
a step that runs nothing ahead. The plans predict the time of a step from the traced actions.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from _benchmark_common import Bench, command_line, cut, hardware, now, now_on_all_ranks, print_table, table
from _benchmark_figures import rotated
from _benchmark_messages import message_ends
from _benchmark_schedule_figures import (
    ActionTimes,
    ChunkFigures,
    LayoutMean,
    RankTimes,
    ScheduleFigures,
    ScheduleTurn,
    chunk_figures,
    layout_means,
    merged,
    paired,
    schedule_figures,
    steady_shape,
)
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator, get_num_microbatches
from rich.table import Table

from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import RunConfig
from megatron.bcd.model.implementation import implementation_here
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.pipeline.actions import Kind
from megatron.bcd.pipeline.build import PlanShape, stage_actions, stock_shape
from megatron.bcd.pipeline.chunk_shape import ChunkShape
from megatron.bcd.pipeline.interleaved import build_chunk_plan
from megatron.bcd.pipeline.iteration import TimedAction
from megatron.bcd.pipeline.schedule import PipelineSchedule
from megatron.bcd.runtime import collectives

DEFAULTS: dict[str, object] = {"hidden_size": 256, "seq_length": 128, "pipeline_model_parallel_size": 2}
NUM_MICROBATCHES = 4
NUM_ROUNDS = 8  # even: each schedule comes first equally often
NUM_RANKS = 2
NUM_TRACED_STEPS = 1
REFUSED = ("bcd-layout", "bcd-schedule")  # all of them are timed
STOCK, BCD = "stock", "bcd"


def has_ranks() -> bool:
    """Whether torchrun has started this process."""
    return "RANK" in os.environ


def start_ranks(script: str, argv: Sequence[str]) -> NoReturn:
    """Become a torchrun with NUM_RANKS processes of `script`, one thread each unless OMP_NUM_THREADS says otherwise."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    command = [sys.executable, *launcher, os.path.abspath(script), *argv]
    os.execve(sys.executable, command, {"OMP_NUM_THREADS": "1", **os.environ})


# the pipeline of `strided` is that of `spread`
_LAYOUTS = ("spread", "stage", "submodel")
_INTERLEAVED = "interleaved"


def partitions(config: RunConfig) -> dict[str, Partition]:
    """By layout. Raises ValueError where a layout does not fit the model."""
    if config.pipeline_size == 1:
        raise ValueError("--pipeline-model-parallel-size 1: --schedule needs at least 2 stages")
    num_blocks = dict.fromkeys(_LAYOUTS, config.bcd.bcd_num_blocks) | {"stage": None}
    return {layout: cut(config, num_blocks=num, layout=layout) for layout, num in num_blocks.items()}


def interleaved(config: RunConfig) -> RunConfig:
    """The same run with interleaved blocks, a chunk for each."""
    return config.replace_section("bcd", bcd_layout=_INTERLEAVED)


def interleaved_partition(config: RunConfig) -> Partition:
    """Raises ValueError where it does not fit the model."""
    return cut(config, num_blocks=config.bcd.bcd_num_blocks, layout=_INTERLEAVED)


def num_steps(config: RunConfig, *, num_rounds: int, num_steps_per_turn: int) -> int:
    """Steps of a whole run, whose turns have `num_steps_per_turn` steps and one traced and one closing step."""
    num_variants = sum(partition.num_blocks for partition in partitions(config).values())
    num_variants += interleaved_partition(config).num_blocks
    return (1 + num_rounds * num_variants) * 2 * (num_steps_per_turn + NUM_TRACED_STEPS + 1)


@dataclass(frozen=True)
class Variant:
    """What has a turn with both schedules."""

    layout: str
    block: int


Turns = dict[Variant, dict[str, list[ScheduleTurn]]]
"""By schedule, one per round."""


class StockPlan(PipelineSchedule):
    """Megatron Core's own schedule, executed action by action from its plan: only so can it be traced."""

    def __call__(self, *, model: Any, num_microbatches: int, forward_only: bool = False, **arguments: Any) -> list[Any]:
        shape = stock_shape(self._shape(num_microbatches, forward_only=forward_only))
        return self.execute(shape, model=model, **arguments)


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """One layout's active set and schedules; `traced` gives the plan, step for step, that `timed` follows."""

    bench: Bench
    partition: Partition
    active: ActiveBlock
    timed: Mapping[str, PipelineSchedule]
    traced: Mapping[str, PipelineSchedule]


class ScheduleBenchmark:
    """One model; for each layout an active set on it, and both schedules."""

    def __init__(self, config: RunConfig, *, num_warm_up_steps: int, num_steps: int) -> None:
        self.bench = Bench(config)
        self.num_warm_up_steps, self.num_steps = num_warm_up_steps, num_steps
        self._run_ahead = config.bcd.bcd_run_ahead
        self.layouts = {layout: self._layout(config, partition) for layout, partition in partitions(config).items()}
        destroy_num_microbatches_calculator()  # each set-up begins one, of the same numbers
        self.layouts[_INTERLEAVED] = self._interleaved(interleaved(config))

    def _layout(self, config: RunConfig, partition: Partition) -> _Layout:
        bcd = PipelineSchedule(name=BCD, partition=partition, run_ahead=self._run_ahead)
        return _Layout(
            bench=self.bench,
            partition=partition,
            active=ActiveBlock(
                model=self.bench.components.model, config=config, partition=partition, stage=self.bench.stage
            ),
            timed={STOCK: PipelineSchedule(name=STOCK, partition=partition, run_ahead=0), BCD: bcd},
            traced={STOCK: StockPlan(name=STOCK, partition=partition, run_ahead=0), BCD: bcd},
        )

    def _interleaved(self, config: RunConfig) -> _Layout:
        """With a model of its own, whose chunks are not the other layouts' stages."""
        bench = Bench(config)
        pipeline = bench.components.pipeline
        return _Layout(
            bench=bench,
            partition=bench.components.partition,
            active=bench.components.active,
            timed={BCD: pipeline},
            traced={BCD: pipeline},
        )

    def measure(self, num_rounds: int, argv: Sequence[str]) -> dict[str, Any] | None:
        """Time, and show the table; on rank 0 the figures, else None."""
        turns = self.run(num_rounds)
        if torch.distributed.get_rank() != 0:
            return None
        rows = self.rows(turns)
        chunks = self.chunk_rows(turns)
        figures = result(self.bench.components.config, rows, chunks, turns, argv)
        show(figures, rows, chunks)
        return figures

    def run(self, num_rounds: int) -> Turns:
        """The turns of every variant; the same on every rank."""
        variants = [
            Variant(name, block)
            for name, layout in self.layouts.items()
            for block in range(layout.partition.num_blocks)
        ]
        turns: Turns = {variant: {name: [] for name in self.layouts[variant.layout].timed} for variant in variants}
        self._turn(variants[0], (STOCK, BCD))  # the first steps of a process load kernels and fetch memory
        for index in range(num_rounds):
            order = (STOCK, BCD) if index % 2 == 0 else (BCD, STOCK)
            for variant in rotated(variants, index):
                names = [name for name in order if name in turns[variant]]
                for name, turn in self._turn(variant, names).items():
                    turns[variant][name].append(turn)
                _tell(f"round {index + 1}/{num_rounds}, {variant.layout} {variant.block}", turns[variant])
        return turns

    def _turn(self, variant: Variant, order: Sequence[str]) -> dict[str, ScheduleTurn]:
        layout = self.layouts[variant.layout]
        bench, chunks = layout.bench, layout.partition.num_chunks
        parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks if chunks > 1 else None)
        bench.use(layout.active, layout.timed[order[0]])
        bench.build(variant.block)
        turns = {}
        for name in order:
            for schedule in (layout.timed[name], layout.traced[name]):
                schedule.begin_phase(variant.block)
            shape = self._shape(layout, variant.block, name)
            mine = self._measure(bench, layout.timed[name], layout.traced[name], shape)
            turns[name] = merged(collectives.gather_objects(mine), shape)
        bench.dispose()
        bench.separate_weights()
        return turns

    def _shape(self, layout: _Layout, block: int, name: str) -> PlanShape | ChunkShape:
        if layout.partition.num_chunks > 1:
            return layout.timed[name].chunk_shape(get_num_microbatches())
        shape = steady_shape(
            layout.partition, block, num_microbatches=get_num_microbatches(), run_ahead=self._run_ahead
        )
        return stock_shape(shape) if name == STOCK else shape

    def _measure(
        self, bench: Bench, timed: PipelineSchedule, traced: PipelineSchedule, shape: PlanShape | ChunkShape
    ) -> RankTimes:
        following = shape.num_microbatches
        bench.use(bench.active, timed)
        bench.warm_up(self.num_warm_up_steps, num_microbatches_next=following)
        start = now_on_all_ranks()
        for _ in range(self.num_steps):
            bench.step(num_microbatches_next=following)
        step_ms = (now() - start) * 1e3 / self.num_steps
        bench.use(bench.active, traced)
        steps = [self._traced_step(bench, traced, shape) for _ in range(NUM_TRACED_STEPS)]
        if shape.run_ahead:
            bench.step()  # what was run ahead with is used up, and nothing new is begun
        return RankTimes(
            step_ms=step_ms,
            outside_ms=tuple(outside_ms for outside_ms, _ in steps),
            actions=_by_kind(bench.stage, shape.num_stages, [action for _, actions in steps for action in actions]),
            message_ends=tuple(message_ends(actions, shape, bench.stage) for _, actions in steps)
            if isinstance(shape, ChunkShape)
            else (),
        )

    def _traced_step(
        self, bench: Bench, schedule: PipelineSchedule, shape: PlanShape | ChunkShape
    ) -> tuple[float, list[TimedAction]]:
        """Milliseconds outside of the schedule's actions, and the actions."""
        trace: list[TimedAction] = []
        schedule.trace = trace
        result = bench.step(num_microbatches_next=shape.num_microbatches)
        schedule.trace = None
        done = tuple(timed.action for timed in trace)
        planned = (
            build_chunk_plan(shape).stages[bench.stage]
            if isinstance(shape, ChunkShape)
            else stage_actions(shape, bench.stage)
        )
        assert done == planned, "what is predicted is not what was done"
        return result.milliseconds - (trace[-1].end - trace[0].start) * 1e3, trace

    def rows(self, turns: Turns) -> list[ScheduleFigures]:
        """The table's rows, one per layout and block."""
        return [
            schedule_figures(
                of_variant[STOCK],
                of_variant[BCD],
                partition=self.layouts[variant.layout].partition,
                block=variant.block,
            )
            for variant, of_variant in turns.items()
            if STOCK in of_variant
        ]

    def chunk_rows(self, turns: Turns) -> list[ChunkFigures]:
        """Interleaved blocks beside those of spread, by block."""
        blocks = range(self.layouts[_INTERLEAVED].partition.num_blocks)
        return [
            chunk_figures(
                turns[Variant(_INTERLEAVED, block)][BCD],
                turns[Variant("spread", block)][BCD],
                partition=self.layouts[_INTERLEAVED].partition,
                block=block,
            )
            for block in blocks
        ]


def _by_kind(stage: int, num_stages: int, actions: Sequence[TimedAction]) -> tuple[ActionTimes, ...]:
    """By virtual stage, which is the stage where it has one chunk."""
    times: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for timed in actions:
        place = timed.action.chunk * num_stages + stage
        times[place, timed.action.kind].append((timed.end - timed.start) * 1e3)
    return tuple(
        ActionTimes(stage=place, kind=kind, milliseconds=tuple(of_kind)) for (place, kind), of_kind in times.items()
    )


def _tell(what: str, turns: Mapping[str, Sequence[ScheduleTurn]]) -> None:
    if torch.distributed.get_rank() == 0:
        times = ", ".join(f"{name} {done[-1].step_ms:,.1f} ms" for name, done in turns.items())
        print(f"{what}: {times}", file=sys.stderr, flush=True)


def result(
    config: RunConfig,
    rows: Sequence[ScheduleFigures],
    chunks: Sequence[ChunkFigures],
    turns: Turns,
    argv: Sequence[str],
) -> dict[str, Any]:
    """Everything that --json writes: times in milliseconds."""
    starts_ranks = torch.distributed.get_world_size() == NUM_RANKS and os.environ.get("OMP_NUM_THREADS") == "1"
    return {
        "command": command_line(argv, starts_ranks=starts_ranks),
        "hardware": hardware(),
        "implementation": implementation_here(config).describe(),
        "world_size": torch.distributed.get_world_size(),
        "pipeline_size": config.pipeline_size,
        "num_microbatches": get_num_microbatches(),
        "means": [dataclasses.asdict(mean) for mean in layout_means(rows)],
        "mean_ratio": statistics.fmean(row.ratio for row in rows),
        "blocks": [dataclasses.asdict(row) for row in rows],
        "interleaved": [dataclasses.asdict(row) for row in chunks],
        "interleaved_to_spread": mean_to_spread(turns),
        "turns": {
            f"{variant.layout} {variant.block}": {
                name: [dataclasses.asdict(turn) for turn in of_schedule] for name, of_schedule in of_variant.items()
            }
            for variant, of_variant in turns.items()
        },
    }


def mean_to_spread(turns: Turns) -> float:
    """Interleaved over spread, each the mean over its blocks; median over the rounds."""

    def means(layout: str) -> list[float]:
        by_block = [[turn.step_ms for turn in done[BCD]] for variant, done in turns.items() if variant.layout == layout]
        return [statistics.fmean(of_round) for of_round in zip(*by_block, strict=True)]

    return paired(means(_INTERLEAVED), means("spread"))


def _chunk_table(chunks: Sequence[ChunkFigures], mean: float) -> Table:
    shown = table(("layout", "block", "layers", "spread ms", "interleaved ms", "ratio", "predicted", "off"), num_left=3)
    for row in chunks:
        times = f"{row.spread_ms:,.1f}", f"{row.interleaved_ms:,.1f}", f"{row.ratio:.3f}", f"{row.predicted_ms:,.1f}"
        shown.add_row(_INTERLEAVED, str(row.block), row.layers, *times, f"{row.deviation:+.1%}")
    shown.add_row(_INTERLEAVED, "mean", "", "", "", f"{mean:.3f}", style="bold")
    return shown


COLUMNS = ("layout", "block", "layers", "first stage", "stock ms", "BCD ms", "ratio", "predicted", "BCD predicted",
           "off", "stock predicted", "off")  # fmt: skip


def _table(rows: Sequence[ScheduleFigures], means: Sequence[LayoutMean]) -> Table:
    shown = table(COLUMNS, num_left=3)
    for mean in means:
        of_layout = [row for row in rows if row.layout == mean.layout]
        for row in of_layout:
            shown.add_row(
                row.layout,
                str(row.block),
                ", ".join((row.layers, *row.extras)),
                str(row.first_trainable_stage),
                f"{row.stock_ms:,.1f}",
                f"{row.bcd_ms:,.1f}",
                f"{row.ratio:.3f}",
                f"{row.predicted_ratio:.3f}",
                f"{row.predicted_bcd_ms:,.1f}",
                f"{row.bcd_deviation:+.1%}",
                f"{row.predicted_stock_ms:,.1f}",
                f"{row.stock_deviation:+.1%}",
            )
        ratios = f"{mean.ratio:.3f}", f"{mean.predicted_ratio:.3f}"
        shown.add_row(mean.layout, "mean", "", "", "", "", *ratios, style="bold", end_section=True)
    return shown


def show(figures: Mapping[str, Any], rows: Sequence[ScheduleFigures], chunks: Sequence[ChunkFigures]) -> None:
    """The tables and what is needed to read them."""
    print_table(_table(rows, layout_means(rows)))
    print_table(_chunk_table(chunks, figures["interleaved_to_spread"]))
    print(
        f"{figures['pipeline_size']} stages, {figures['num_microbatches']} microbatches\n"
        "ratio: BCD schedule over stock schedule, median over the rounds\n"
        "predicted: the plan's iteration time with the times of its traced actions and messages, plus what a step\n"
        "does outside of the schedule (zero_grad, gradient and loss reduction, optimizer), which is measured\n"
        "off: predicted over measured step time, minus 1\n"
        f"{figures['hardware']}\n{figures['implementation']}\n{figures['command']}"
    )
