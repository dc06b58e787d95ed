"""Draws the pipeline schedule of one phase: Megatron Core's 1F1B, and BCD's below it.

    python tools/show_schedule.py --pipeline-model-parallel-size 4 --microbatches 8 --pivot 2
    python tools/show_schedule.py --pipeline-model-parallel-size 4 --microbatches 8 --pivot 2 --figure out/schedule.png
    python tools/show_schedule.py --pipeline-model-parallel-size 4 --microbatches 8 --bcd-layout interleaved \\
        --bcd-num-blocks 3 --block 1

Nothing runs: the times follow from the plan and from the costs of its actions. BCD's iteration is one in the middle of
a phase, which begins with the microbatches that the iteration before ran ahead with. With --layout interleaved stock's
is full training, Megatron Core's interleaved 1F1B of the same chunks.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _parser import Parser, bad_input, leave_with

from megatron.bcd.pipeline.build import PlanShape, bcd_shape, build_plan, default_run_ahead, stock_shape
from megatron.bcd.pipeline.chunk_shape import ChunkShape, chunk_shape
from megatron.bcd.pipeline.interleaved import build_chunk_plan
from megatron.bcd.pipeline.render import (
    backward_messages,
    cell_unit,
    cell_width,
    describe,
    kept_activations,
    legend,
    render_grid,
)
from megatron.bcd.pipeline.simulate import Timeline, action_costs, simulate
from megatron.bcd.pipeline.simulate_interleaved import chunk_costs, simulate_chunk_plan
from megatron.bcd.pipeline.validate import validate_plan
from megatron.bcd.pipeline.validate_interleaved import validate_chunk_plan

PROG = "tools/show_schedule.py"
STOCK, BCD, INTERLEAVED = "stock", "bcd", "interleaved"
FIGURE_FORMATS = ("png", "svg")
MAX_STAGES, MAX_MICROBATCHES, MAX_CHUNKS = 64, 512, 64
MAX_COST = 1e9
"""More is a mistake rather than a picture that somebody wants to see."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The time of an action by stage, and of a message."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    backward_input: tuple[float, ...]
    message: float


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Raises ValueError for a flag that is unknown, missing or no number."""
    parser = Parser(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("--pipeline-model-parallel-size", "--stages", dest="stages", type=int, required=True, metavar="N",
        help="pipeline stages")  # fmt: skip
    add("--microbatches", type=int, required=True, metavar="N", help="microbatches of an iteration")
    add(
        "--pivot",
        dest="first_trainable",
        type=int,
        metavar="STAGE",
        help="the first trainable stage: holds the first active layer",
    )
    add(
        "--layout",
        "--bcd-layout",
        choices=(INTERLEAVED,),
        help="in place of --pivot: every stage holds chunks of every block",
    )
    add("--num-blocks", "--bcd-num-blocks", type=int, metavar="M", help="with --layout interleaved: blocks")
    add("--block", type=int, metavar="K", help="with --layout interleaved: the active block")
    add("--chunks", type=int, metavar="V", help="with --layout interleaved: chunks of a stage, a multiple of the blocks"
        " (default: the blocks)")  # fmt: skip
    add(
        "--active",
        type=int,
        nargs="+",
        metavar="STAGE",
        help="stages with active layers (default: the first trainable stage)",
    )
    add("--run-ahead", type=int, metavar="K", help="microbatches of the next iteration that forward-only stages run"
        " ahead with (default: what --bcd-run-ahead defaults to)")  # fmt: skip
    add("--schedule", choices=("both", STOCK, BCD), default="both", help="what to draw (default: both)")
    add("--figure", metavar="FILE", help="draw it as a picture too (.png or .svg)")
    group = parser.add_argument_group("costs", "times in any one unit: one number, or one per stage")
    group.add_argument("--forward", type=float, nargs="+", default=[1.0], metavar="TIME", help="(default: 1)")
    group.add_argument("--backward", type=float, nargs="+", default=[2.0], metavar="TIME",
                       help="of input and weight gradients (default: 2)")  # fmt: skip
    group.add_argument("--backward-input", type=float, nargs="+", default=[1.0], metavar="TIME",
                       help="of input gradients, on frozen stages (default: 1; with the stock schedule 0 on a frozen"
                       " stage 0, whose backward has nothing to compute)")  # fmt: skip
    group.add_argument("--message", type=float, default=0.0, metavar="TIME", help="of one message (default: 0)")
    return parser.parse_args(argv)


def shape_of(arguments: argparse.Namespace) -> PlanShape:
    """BCD's shape in the middle of a phase; raises ValueError naming the flag that does not fit."""
    stages, microbatches, first_trainable = arguments.stages, arguments.microbatches, arguments.first_trainable
    _check_range("--pipeline-model-parallel-size", stages, 1, MAX_STAGES)
    _check_range("--microbatches", microbatches, 1, MAX_MICROBATCHES)
    if first_trainable is None:
        raise ValueError("give --pivot STAGE, or --layout interleaved with --num-blocks and --block")
    for flag in ("num_blocks", "block", "chunks"):
        if getattr(arguments, flag) is not None:
            raise ValueError(f"--{flag.replace('_', '-')} needs --layout interleaved")
    _check_range("--pivot", first_trainable, 0, stages - 1)
    active = sorted(set(arguments.active or [first_trainable]))
    if active[0] != first_trainable or active[-1] >= stages:
        given = " ".join(map(str, arguments.active))
        raise ValueError(
            f"--active {given}: the first must be the first trainable stage {first_trainable}, the last at most "
            f"{stages - 1}"
        )
    run_ahead = arguments.run_ahead
    if run_ahead is None:
        run_ahead = min(default_run_ahead(num_stages=stages, first_trainable=first_trainable), microbatches)
    elif first_trainable == 0 and run_ahead:
        raise ValueError(f"--run-ahead {run_ahead}: must be 0 with --pivot 0, where no stage is forward-only")
    _check_range("--run-ahead", run_ahead, 0, microbatches)
    return bcd_shape(
        num_stages=stages,
        num_microbatches=microbatches,
        first_trainable=first_trainable,
        active=[stage in active for stage in range(stages)],
        done_ahead=run_ahead,
        run_ahead=run_ahead,
    )


def chunk_shape_of(arguments: argparse.Namespace) -> ChunkShape:
    """Of --layout interleaved; raises ValueError naming the flag that does not fit."""
    for flag in ("first_trainable", "active", "run_ahead"):
        if getattr(arguments, flag) is not None:
            name = "pivot" if flag == "first_trainable" else flag.replace("_", "-")
            raise ValueError(f"--{name} does not go with --layout interleaved: give --num-blocks and --block")
    if arguments.num_blocks is None or arguments.block is None:
        raise ValueError("--layout interleaved needs --num-blocks and --block")
    _check_range("--pipeline-model-parallel-size", arguments.stages, 2, MAX_STAGES)
    _check_range("--microbatches", arguments.microbatches, 1, MAX_MICROBATCHES)
    _check_range("--num-blocks", arguments.num_blocks, 1, MAX_CHUNKS)
    _check_range("--block", arguments.block, 0, arguments.num_blocks - 1)
    chunks = arguments.num_blocks if arguments.chunks is None else arguments.chunks
    _check_range("--chunks", chunks, 1, MAX_CHUNKS)
    if chunks % arguments.num_blocks:
        raise ValueError(f"--chunks {chunks}: must be a multiple of --num-blocks {arguments.num_blocks}")
    return chunk_shape(
        num_stages=arguments.stages,
        num_chunks=chunks,
        num_microbatches=arguments.microbatches,
        num_blocks=arguments.num_blocks,
        block=arguments.block,
    )


def costs_of(arguments: argparse.Namespace) -> Costs:
    """Raises ValueError naming the flag that is no time, or that has neither one number nor one per stage."""
    return Costs(
        forward=_by_stage("--forward", arguments.forward, arguments.stages),
        backward=_by_stage("--backward", arguments.backward, arguments.stages),
        backward_input=_by_stage("--backward-input", arguments.backward_input, arguments.stages),
        message=_by_stage("--message", [arguments.message], 1)[0],
    )


def _check_range(flag: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{flag} {value}: must be {least} to {most}")


def _by_stage(flag: str, times: Sequence[float], num_stages: int) -> tuple[float, ...]:
    given = " ".join(f"{time:g}" for time in times)
    if not all(0 <= time <= MAX_COST for time in times):
        raise ValueError(f"{flag} {given}: must be 0 to {MAX_COST:g}")
    if len(times) not in (1, num_stages):
        raise ValueError(f"{flag} {given}: must be one number, or one for each of {num_stages} stages")
    return tuple(times) * (num_stages if len(times) == 1 else 1)


def timeline_of(shape: PlanShape, costs: Costs) -> Timeline:
    """The times of a plan that was checked."""
    plan = build_plan(shape)
    validate_plan(plan)
    by_stage = {"forward": costs.forward, "backward": costs.backward, "backward_input": costs.backward_input}
    return simulate(plan, action_costs(shape, **by_stage, message=costs.message))


def chunk_timeline_of(shape: ChunkShape, costs: Costs) -> Timeline:
    """As `timeline_of`; the costs are those of one chunk of a stage."""
    plan = build_chunk_plan(shape)
    validate_chunk_plan(plan)
    by_stage = {"forward": costs.forward, "backward": costs.backward, "backward_input": costs.backward_input}
    by_virtual = {name: times * shape.num_chunks for name, times in by_stage.items()}
    return simulate_chunk_plan(plan, chunk_costs(shape, **by_virtual, message=costs.message))


def headline(timeline: Timeline) -> str:
    """Which schedule it is."""
    shape = timeline.plan.shape
    if isinstance(shape, ChunkShape):
        if shape.is_stock:
            return "stock: Megatron Core's interleaved 1F1B, full training"
        return "bcd: interleaved, every stage holds prefix, active and suffix alike"
    if shape.is_stock:
        is_idle = shape.num_stages > 1 and not shape.active[0]
        note = "; stage 0 receives gradients and has nothing to compute with them" if is_idle else ""
        return f"stock: Megatron Core's 1F1B{note}"
    if shape.first_trainable == 0:
        return "bcd: 1F1B, no stage is forward-only"
    return (
        f"bcd: no backward before stage {shape.first_trainable}, run-ahead {shape.run_ahead}, in the middle of a phase"
    )


def comparison(stock: Timeline, bcd: Timeline) -> str:
    """What BCD's schedule saves, as a table."""
    rows = [("", STOCK, BCD, "change")]
    for name, of in (
        ("iteration time", lambda timeline: timeline.iteration_time),
        ("work", lambda timeline: sum(timeline.busy_times)),
        ("activations kept", lambda timeline: sum(map(kept_activations, timeline.plan.stages))),
        ("backward messages", _all_backward_messages),
    ):
        before, after = of(stock), of(bcd)
        change = f"{100 * (after / before - 1):+.1f} %" if before else ""
        rows.append((name, f"{before:g}", f"{after:g}", change))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = (
        row[0].ljust(widths[0])
        + "".join(cell.rjust(width + 3) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _all_backward_messages(timeline: Timeline) -> int:
    return sum(backward_messages(stage, actions) for stage, actions in enumerate(timeline.plan.stages))


def show(timelines: Sequence[Timeline]) -> str:
    """Legend, grids to one scale, and what is saved where there are both."""
    unit, width = cell_unit(*timelines), cell_width(*timelines)
    parts = [f"{legend(*timelines)}\na cell is a time of {unit:g}"]
    for timeline in timelines:
        parts.append(f"{headline(timeline)}\n\n{render_grid(timeline, unit=unit, width=width)}\n\n{describe(timeline)}")
    if len(timelines) == 2:
        parts.append(comparison(*timelines))
    return "\n\n".join(parts)


def run(argv: Sequence[str] | None) -> None:
    """Raises ValueError for a user's mistake; the picture is written before anything is printed."""
    arguments = parse_arguments(argv)
    names = (STOCK, BCD) if arguments.schedule == "both" else (arguments.schedule,)
    if arguments.layout == INTERLEAVED:
        chunked = chunk_shape_of(arguments)
        full = replace(chunked, first_trainable=0, active=(True,) * chunked.num_virtual)
        chunked_shapes, costs = {STOCK: full, BCD: chunked}, costs_of(arguments)
        timelines = [chunk_timeline_of(chunked_shapes[name], costs) for name in names]
    else:
        shape, costs = shape_of(arguments), costs_of(arguments)
        shapes = {STOCK: stock_shape(shape), BCD: shape}
        timelines = [timeline_of(shapes[name], costs) for name in names]
    if arguments.figure:
        write_figure(arguments.figure, timelines)
    print(show(timelines))
    if arguments.figure:
        print(f"\nwrote {arguments.figure}")


def write_figure(path: str, timelines: Sequence[Timeline]) -> None:
    """Raises ValueError for another kind of file, and where it cannot be written."""
    kind = os.path.splitext(path)[1][1:].lower()
    if kind not in FIGURE_FORMATS:
        raise ValueError(f"--figure {path}: must end in {' or '.join(f'.{name}' for name in FIGURE_FORMATS)}")
    try:
        from _schedule_figure import draw  # matplotlib takes a second to import
    except ImportError as error:
        raise ValueError(f"--figure {path}: needs {error.name}; install it, or leave the flag out") from None
    from report import write_aside

    write_aside(path, lambda name: draw(name, kind, timelines), flag="--figure")


def main(argv: Sequence[str] | None = None) -> int:
    # not through megatron.bcd.runtime.exit: it is for ranks that fail together, and imports torch
    try:
        run(argv)
    except ValueError as error:
        return bad_input(PROG, error)
    return 0


if __name__ == "__main__":
    leave_with(main)
