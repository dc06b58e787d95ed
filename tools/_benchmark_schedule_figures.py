"""Numbers of tools/benchmark.py --schedule: measured times and predictions of the schedules. Pure.

A turn is one schedule with one block active, in one round. Times in milliseconds.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from _benchmark_messages import MessageEnd, awaited_message_ms

from megatron.bcd.blocks.partition import Partition
from megatron.bcd.pipeline.actions import Kind
from megatron.bcd.pipeline.build import PlanShape, bcd_shape, build_plan, default_run_ahead
from megatron.bcd.pipeline.chunk_shape import ChunkShape
from megatron.bcd.pipeline.interleaved import build_chunk_plan
from megatron.bcd.pipeline.simulate import ActionCosts, Timeline, simulate
from megatron.bcd.pipeline.simulate_interleaved import simulate_chunk_plan


@dataclass(frozen=True, kw_only=True)
class ActionTimes:
    """How often one pipeline stage did actions of one kind, and how long each took."""

    stage: int
    kind: Kind
    milliseconds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """What one rank measured in a turn."""

    step_ms: float
    """The timed steps together, divided by their number."""
    outside_ms: tuple[float, ...]
    """By traced step: what it took before its first action and after its last one."""
    actions: tuple[ActionTimes, ...]
    """In the traced steps."""
    message_ends: tuple[tuple[MessageEnd, ...], ...] = ()
    """By traced step, of an interleaved plan."""


@dataclass(frozen=True, kw_only=True)
class ScheduleTurn:
    """One schedule in one round, as all ranks saw it."""

    step_ms: float
    """The slowest rank's."""
    outside_ms: float
    """Of a step: the rank that waits least for the others. Median over the traced steps."""
    message_ms: float
    """Of a message: the shortest one. Of an interleaved plan: the median of those for which a pass waits."""
    actions: tuple[ActionTimes, ...]
    """Those that compute, by stage and kind."""
    iteration_ms: float
    """The plan's iteration time with the medians of these actions and messages: predicted."""

    @property
    def predicted_ms(self) -> float:
        """The step that the plan predicts; what is outside of the schedule is measured."""
        return self.iteration_ms + self.outside_ms


@dataclass(frozen=True, kw_only=True)
class ScheduleFigures:
    """One block's row. Every figure is a median over the rounds, ratios of two times that of the rounds' ratios."""

    layout: str
    block: int
    layers: str
    extras: tuple[str, ...]
    first_trainable_stage: int
    stock_ms: float
    bcd_ms: float
    ratio: float
    """BCD / stock."""
    predicted_ratio: float
    predicted_stock_ms: float
    stock_deviation: float
    """Predicted / measured - 1."""
    predicted_bcd_ms: float
    bcd_deviation: float
    """Predicted / measured - 1."""


def steady_shape(partition: Partition, block: int, *, num_microbatches: int, run_ahead: int | None) -> PlanShape:
    """A step in the middle of a phase: its forward-only stages run ahead as far as those of the step before did.

    `run_ahead` is --bcd-run-ahead; None: `default_run_ahead`.
    """
    first_trainable = partition.first_trainable_stage(block)
    default = default_run_ahead(num_stages=partition.num_stages, first_trainable=first_trainable)
    ahead = min(default if run_ahead is None else run_ahead, num_microbatches) if first_trainable else 0
    return bcd_shape(
        num_stages=partition.num_stages,
        num_microbatches=num_microbatches,
        first_trainable=first_trainable,
        active=[partition.stage_active(block, stage) for stage in range(partition.num_stages)],
        done_ahead=ahead,
        run_ahead=ahead,
    )


def merged(ranks: Sequence[RankTimes], shape: PlanShape | ChunkShape) -> ScheduleTurn:
    """One turn out of what its ranks measured, with the prediction of the plan of `shape`."""
    by_stage_and_kind: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for rank in ranks:
        for times in rank.actions:
            by_stage_and_kind[times.stage, times.kind] += times.milliseconds
    computed = {key: times for key, times in sorted(by_stage_and_kind.items()) if key[1].computes}
    message_ms = _awaited_message_ms(ranks) if isinstance(shape, ChunkShape) else _message_ms(by_stage_and_kind, shape)
    medians = {key: statistics.median(times) / 1e3 for key, times in computed.items()}
    costs = ActionCosts(seconds=medians, message=message_ms / 1e3)
    outside_ms = statistics.median(min(of_step) for of_step in zip(*(rank.outside_ms for rank in ranks), strict=True))
    return ScheduleTurn(
        step_ms=max(rank.step_ms for rank in ranks),
        outside_ms=outside_ms,
        message_ms=message_ms,
        actions=tuple(
            ActionTimes(stage=stage, kind=kind, milliseconds=tuple(times)) for (stage, kind), times in computed.items()
        ),
        iteration_ms=_timeline(shape, costs).iteration_time * 1e3,
    )


def _timeline(shape: PlanShape | ChunkShape, costs: ActionCosts) -> Timeline:
    if isinstance(shape, ChunkShape):
        return simulate_chunk_plan(build_chunk_plan(shape), costs)
    return simulate(build_plan(shape), costs)


def _awaited_message_ms(ranks: Sequence[RankTimes]) -> float:
    """Median over the traced steps."""
    steps = zip(*(rank.message_ends for rank in ranks), strict=True)
    times = [awaited_message_ms(list(itertools.chain(*of_ranks))) for of_ranks in steps]
    return statistics.median(times) if times else 0.0


def _message_ms(times: Mapping[tuple[int, Kind], Sequence[float]], shape: PlanShape) -> float:
    """The shortest message. One-way ones, which travel while both ends compute, count where there are no others."""

    def is_one_way(stage: int, kind: Kind) -> bool:
        link = {Kind.SEND_FORWARD: stage, Kind.RECEIVE_FORWARD: stage - 1, Kind.RECEIVE_AHEAD: stage - 1}.get(kind)
        return link is not None and shape.is_one_way(link)

    messages = {key: of_key for key, of_key in times.items() if not key[1].computes}
    awaited = {key: of_key for key, of_key in messages.items() if not is_one_way(*key)}
    return min((time for of_key in (awaited or messages).values() for time in of_key), default=0.0)


def schedule_figures(
    stock: Sequence[ScheduleTurn], bcd: Sequence[ScheduleTurn], *, partition: Partition, block: int
) -> ScheduleFigures:
    """A block's row from the turns of both schedules, by round."""
    return ScheduleFigures(
        layout=partition.layout,
        block=block,
        layers=partition.describe_layers(block),
        extras=partition.describe_extras(block),
        first_trainable_stage=partition.first_trainable_stage(block),
        stock_ms=statistics.median(turn.step_ms for turn in stock),
        bcd_ms=statistics.median(turn.step_ms for turn in bcd),
        ratio=paired([turn.step_ms for turn in bcd], [turn.step_ms for turn in stock]),
        predicted_ratio=paired([turn.predicted_ms for turn in bcd], [turn.predicted_ms for turn in stock]),
        predicted_stock_ms=statistics.median(turn.predicted_ms for turn in stock),
        stock_deviation=_deviation(stock),
        predicted_bcd_ms=statistics.median(turn.predicted_ms for turn in bcd),
        bcd_deviation=_deviation(bcd),
    )


@dataclass(frozen=True, kw_only=True)
class ChunkFigures:
    """An interleaved block's row beside the block of that number in layout spread. Medians over the rounds."""

    block: int
    layers: str
    spread_ms: float
    interleaved_ms: float
    ratio: float
    """Interleaved / spread."""
    predicted_ms: float
    deviation: float
    """Predicted / measured - 1."""


def chunk_figures(
    interleaved: Sequence[ScheduleTurn], spread: Sequence[ScheduleTurn], *, partition: Partition, block: int
) -> ChunkFigures:
    """A block's row from the turns of both layouts, by round."""
    return ChunkFigures(
        block=block,
        layers=partition.describe_layers(block),
        spread_ms=statistics.median(turn.step_ms for turn in spread),
        interleaved_ms=statistics.median(turn.step_ms for turn in interleaved),
        ratio=paired([turn.step_ms for turn in interleaved], [turn.step_ms for turn in spread]),
        predicted_ms=statistics.median(turn.predicted_ms for turn in interleaved),
        deviation=_deviation(interleaved),
    )


def paired(above: Sequence[float], below: Sequence[float]) -> float:
    """Median of the ratios, each of one round: a machine that is slower for some rounds leaves it alone."""
    return statistics.median(one / other for one, other in zip(above, below, strict=True))


def _deviation(turns: Sequence[ScheduleTurn]) -> float:
    return paired([turn.predicted_ms for turn in turns], [turn.step_ms for turn in turns]) - 1


@dataclass(frozen=True, kw_only=True)
class LayoutMean:
    """Over the blocks of a layout, which all get equally many steps."""

    layout: str
    ratio: float
    predicted_ratio: float


def layout_means(rows: Sequence[ScheduleFigures]) -> list[LayoutMean]:
    """In the order of the rows."""
    layouts: dict[str, list[ScheduleFigures]] = defaultdict(list)
    for row in rows:
        layouts[row.layout].append(row)
    return [
        LayoutMean(
            layout=layout,
            ratio=statistics.fmean(row.ratio for row in of_layout),
            predicted_ratio=statistics.fmean(row.predicted_ratio for row in of_layout),
        )
        for layout, of_layout in layouts.items()
    ]
