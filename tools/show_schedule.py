"""Draw the pipeline schedule of one phase: Megatron Core's 1F1B, and BCD's below it.

    python tools/show_schedule.py --pipeline-model-parallel-size 4 --microbatches 8 --pivot 2
    python tools/show_schedule.py --pipeline-model-parallel-size 4 --microbatches 8 --bcd-layout interleaved \\
        --bcd-num-blocks 3 --block 1

Nothing is executed: times are simulated from the plan and the costs of its actions. BCD's iteration is one in the
middle of a phase, so the previous iteration has already run some of its microbatches ahead. With --layout interleaved,
the stock schedule is full training by Megatron Core's interleaved 1F1B with the same chunks.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import chain

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _parser import Parser, command, run_main

from megatron.bcd.blocks.partition import partition
from megatron.bcd.pipeline.build import build_plan, peak_graphs
from megatron.bcd.pipeline.plan import Action, Kind, PlanShape, phase_shape, stock_shape
from megatron.bcd.pipeline.simulate import Span, Timeline, simulate

PROG = "tools/show_schedule.py"
STOCK, BCD, INTERLEAVED, BREADTH_FIRST = "stock", "bcd", "interleaved", "breadth-first"
MAX_STAGES, MAX_MICROBATCHES, MAX_CHUNKS = 64, 512, 64
MAX_COST = 1e9
"""A larger cost is a mistake."""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed flags. Raises ValueError for a bad flag."""
    parser = Parser(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("--pipeline-model-parallel-size", "--stages", dest="stages", type=int, required=True, metavar="N",
        help="pipeline stages")  # fmt: skip
    add("--microbatches", type=int, required=True, metavar="N", help="microbatches of an iteration")
    add("--pivot", type=int, metavar="STAGE", help="the first trainable stage: holds the first active layer")
    add("--active", type=int, nargs="+", metavar="STAGE",
        help="stages with active layers (default: the first trainable stage)")  # fmt: skip
    add("--layout", "--bcd-layout", choices=(INTERLEAVED,),
        help="instead of --pivot: every stage holds chunks of every block")  # fmt: skip
    add("--num-blocks", "--bcd-num-blocks", type=int, metavar="M", help="with --layout interleaved: blocks")
    add("--block", type=int, metavar="K", help="with --layout interleaved: the active block; M is the head"
        " (--bcd-head-phase)")  # fmt: skip
    add("--chunks", type=int, metavar="V", help="with --layout interleaved: chunks per stage, a multiple of M"
        " (default: M); with --schedule breadth-first: chunks of a stage (default: 4)")  # fmt: skip
    add("--schedule", choices=("both", STOCK, BCD, BREADTH_FIRST), default="both",
        help="what to draw (default: both); breadth-first takes --chunks per stage")  # fmt: skip
    group = parser.add_argument_group("costs", "times in any unit: one number, or one per stage")
    group.add_argument("--forward", type=float, nargs="+", default=[1.0], metavar="TIME", help="(default: 1)")
    group.add_argument("--backward", type=float, nargs="+", default=[2.0], metavar="TIME",
                       help="input and weight gradients (default: 2)")  # fmt: skip
    group.add_argument("--backward-input", type=float, nargs="+", default=[1.0], metavar="TIME",
                       help="input gradients, on frozen stages (default: 1; the stock schedule takes 0 on a frozen"
                       " stage 0, which needs no input gradient)")  # fmt: skip
    group.add_argument("--message", type=float, default=0.0, metavar="TIME", help="one message (default: 0)")
    return parser.parse_args(argv)


def plan_shapes(arguments: argparse.Namespace) -> dict[str, PlanShape]:
    """Return the shape of each schedule. Raises ValueError naming the flag that does not fit."""
    if arguments.schedule == BREADTH_FIRST:
        return {BREADTH_FIRST: _breadth_first(arguments)}
    is_interleaved = arguments.layout == INTERLEAVED
    _check_range("--pipeline-model-parallel-size", arguments.stages, 2 if is_interleaved else 1, MAX_STAGES)
    _check_range("--microbatches", arguments.microbatches, 1, MAX_MICROBATCHES)
    excluded = ("pivot", "active") if is_interleaved else ("num_blocks", "block", "chunks")
    for name in excluded:
        if getattr(arguments, name) is not None:
            flag, how = f"--{name.replace('_', '-')}", "cannot be combined with" if is_interleaved else "needs"
            raise ValueError(f"{flag} {how} --layout {INTERLEAVED}")
    return _interleaved_shapes(arguments) if is_interleaved else _shapes(arguments)


def _breadth_first(arguments: argparse.Namespace) -> PlanShape:
    """Return the shape of chunks that are all updated, from virtual stage --pivot on."""
    chunks, pivot = arguments.chunks or 4, arguments.pivot or 0
    _check_range("--stages", arguments.stages, 1, MAX_STAGES)
    _check_range("--microbatches", arguments.microbatches, 1, MAX_MICROBATCHES)
    _check_range("--chunks", chunks, 1, MAX_CHUNKS)
    _check_range("--pivot", pivot, 0, arguments.stages * chunks - 1)
    active = tuple(virtual >= pivot for virtual in range(arguments.stages * chunks))
    return PlanShape(
        num_stages=arguments.stages,
        num_chunks=chunks,
        num_microbatches=arguments.microbatches,
        first_trainable=pivot,
        active=active,
        is_breadth_first=True,
        updated=active,
    )


def _shapes(arguments: argparse.Namespace) -> dict[str, PlanShape]:
    stages, microbatches, pivot = arguments.stages, arguments.microbatches, arguments.pivot
    if pivot is None:
        raise ValueError("give --pivot STAGE, or --layout interleaved with --num-blocks and --block")
    _check_range("--pivot", pivot, 0, stages - 1)
    active = sorted(set(arguments.active or [pivot]))
    if active[0] != pivot or active[-1] >= stages:
        stages_given = " ".join(map(str, arguments.active))
        raise ValueError(f"--active {stages_given}: the first must be --pivot {pivot}, the last at most {stages - 1}")
    shape = PlanShape(
        num_stages=stages,
        num_microbatches=microbatches,
        first_trainable=pivot,
        active=tuple(stage in active for stage in range(stages)),
    ).mid_phase(microbatches)
    return {STOCK: stock_shape(shape), BCD: shape}


def _interleaved_shapes(arguments: argparse.Namespace) -> dict[str, PlanShape]:
    if arguments.num_blocks is None or arguments.block is None:
        raise ValueError("--layout interleaved needs --num-blocks and --block")
    _check_range("--num-blocks", arguments.num_blocks, 1, MAX_CHUNKS)
    _check_range("--block", arguments.block, 0, arguments.num_blocks)
    chunks = arguments.num_blocks if arguments.chunks is None else arguments.chunks
    _check_range("--chunks", chunks, 1, MAX_CHUNKS)
    if chunks % arguments.num_blocks:
        raise ValueError(f"--chunks {chunks}: must be a multiple of --num-blocks {arguments.num_blocks}")
    one_layer_each = partition(
        num_layers=arguments.stages * chunks,
        num_stages=arguments.stages,
        num_blocks=arguments.num_blocks,
        layout=INTERLEAVED,
        num_parts=chunks,
        tied=False,
        head_phase=True,
    )
    shape = phase_shape(one_layer_each, arguments.block, num_microbatches=arguments.microbatches)
    return {STOCK: shape.full_training, BCD: shape}


def _check_range(flag: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{flag} {value}: must be {least} to {most}")


def simulate_plan(shape: PlanShape, arguments: argparse.Namespace) -> Timeline:
    """Simulate the plan; the costs are those of one chunk of a stage. Raises ValueError if a cost is not a valid time,
    or there is neither one number nor one per stage."""
    costs = {}
    for name in ("forward", "backward", "backward_input", "message"):
        times = [arguments.message] if name == "message" else getattr(arguments, name)
        words = f"--{name.replace('_', '-')} {' '.join(f'{time:g}' for time in times)}"
        if not all(0 <= time <= MAX_COST for time in times):
            raise ValueError(f"{words}: must be 0 to {MAX_COST:g}")
        if len(times) not in (1, shape.num_stages):
            raise ValueError(f"{words}: must be one number, or one for each of {shape.num_stages} stages")
        costs[name] = times * (shape.num_virtual // len(times))
    plan = build_plan(shape)
    forward, backward, backward_input = (costs[name] for name in ("forward", "backward", "backward_input"))
    # in a stock plan a frozen stage 0 receives gradients, but it has no weight and no input that requires one
    both = zip(shape.active, backward, [0.0, *backward_input[1:]], strict=True)
    work = zip(forward, (whole if is_active else part for is_active, whole, part in both), strict=True)
    return simulate(plan, [*work], message=arguments.message)


def title(name: str, shape: PlanShape) -> str:
    if name == STOCK:
        return "stock: Megatron Core's " + ("interleaved 1F1B, full training" if shape.num_chunks > 1 else "1F1B")
    if shape.is_breadth_first:
        return "breadth-first: all microbatches pass through a chunk before the next one; each is updated at its end"
    if shape.num_chunks > 1:
        return "bcd: interleaved, every stage holds prefix, active and suffix layers"
    if shape.first_trainable == 0:
        return "bcd: 1F1B, no stage is forward-only"
    return f"bcd: no backward before stage {shape.first_trainable}, run-ahead {shape.run_ahead}"


LETTERS = {
    Kind.FORWARD_ONLY: "f",
    Kind.FORWARD: "F",
    Kind.RECOMPUTE: "R",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "I",
}
IDLE = "."
MAX_CELLS = 400
_CELLS_PER_TICK = 5


def label(action: Action, shape: PlanShape) -> str:
    """Return the text of a cell: letter and microbatch, with a chunk letter if there are several chunks.

    An apostrophe marks a microbatch of the next iteration.
    """
    letter, ahead = LETTERS[action.kind], action.microbatch - shape.num_microbatches
    if shape.num_chunks > 1:
        return f"{letter}{action.microbatch}{chunk_letter(action.chunk)}"
    return f"{letter}{action.microbatch}" if ahead < 0 else f"{letter}{ahead}'"


def role(shape: PlanShape, stage: int) -> str:
    """Return the role of a stage in this phase: a word, or with several chunks one letter per chunk."""
    roles = []
    for virtual in range(stage, shape.num_virtual, shape.num_stages):
        is_prefix = not any(shape.active[: virtual + 1])
        roles.append("active" if shape.active[virtual] else "prefix" if is_prefix else "suffix")
    if shape.num_chunks == 1:
        return roles[0]
    return "".join({"prefix": "p", "active": "A", "suffix": "s"}[name] for name in roles)


def chunk_letter(chunk: int) -> str:
    """Return a, b, ...; after z a dot and the number."""
    return chr(ord("a") + chunk) if chunk < 26 else f".{chunk}"


def passes(*timelines: Timeline) -> list[Span]:
    """Return all passes that take time."""
    spans = (span for timeline in timelines for stage_spans in timeline.spans for span in stage_spans)
    return [span for span in spans if span.duration > 0]


def legend(*timelines: Timeline) -> str:
    """Return a line that explains the letters used in any of the timelines."""
    kinds, shapes = {span.action.kind for span in passes(*timelines)}, [timeline.plan.shape for timeline in timelines]
    parts = [f"{letter} {kind}" for kind, letter in LETTERS.items() if kind in kinds]
    num_chunks = max(shape.num_chunks for shape in shapes)
    if num_chunks > 1:
        parts.append(f"a to {chunk_letter(num_chunks - 1)} the chunk; stages by chunk: p prefix, A active, s suffix")
    if any(shape.run_ahead for shape in shapes):
        parts.append(f"{LETTERS[Kind.FORWARD_ONLY]}0' next iteration's microbatch 0")
    return ", ".join([*parts, f"{IDLE} idle"])


def cell_unit(*timelines: Timeline) -> float:
    """Return the time of one cell: the shortest pass, or longer if MAX_CELLS would not hold every timeline."""
    shortest = min((span.duration for span in passes(*timelines)), default=1.0)
    return max(shortest, max(timeline.iteration_time for timeline in timelines) / MAX_CELLS)


def render_grids(*timelines: Timeline) -> list[str]:
    """Return a grid of cells per timeline, all to one scale, with one row per stage.

    A pass fills the cells between its rounded start and end: exact with the default costs, none if it costs nothing. A
    cell is as wide as the widest label and a space, which an apostrophe may replace.
    """
    unit = cell_unit(*timelines)
    labels = [label(span.action, timeline.plan.shape) for timeline in timelines for span in passes(timeline)]
    width = max((max(len(text), len(text.rstrip("'")) + 1) for text in labels), default=3)
    return [_grid(timeline, unit, width) for timeline in timelines]


def _grid(timeline: Timeline, unit: float, width: int) -> str:
    shape, num_cells = timeline.plan.shape, _nearest(timeline.iteration_time / unit)
    heads = [f"stage {stage} {role(shape, stage)}" for stage in range(shape.num_stages)]
    margin = max(map(len, heads)) + 2
    ticks = (str(cell).ljust(width * _CELLS_PER_TICK) for cell in range(0, num_cells + 1, _CELLS_PER_TICK))
    rows = [f"{'time':<{margin}}{''.join(ticks)}"]
    for head, spans in zip(heads, timeline.spans, strict=True):
        cells = [IDLE.center(width)] * num_cells
        for span in spans:
            first, end = _nearest(span.start / unit), _nearest(span.end / unit)
            if span.action.kind.computes and first < end:
                text, space = label(span.action, shape), (end - first) * width
                # dashes join the cells of one pass; the last character keeps it from the next one
                bar = text if end - first == 1 else text.ljust(space - 1, "-")
                cells[first:end] = [bar.ljust(space)] + [""] * (end - first - 1)
        rows.append(f"{head:<{margin}}{''.join(cells)}")
    return "\n".join(row.rstrip() for row in rows)


def _nearest(cells: float) -> int:
    """Round half up: Python's round could map two borders that are one cell apart to the same cell."""
    return math.floor(cells + 0.5)


def figures(timelines: Mapping[str, Timeline]) -> str:
    """Return a table of the schedules' costs, with one column per schedule."""
    rows = [["", *timelines]]
    for name, value_of in (
        ("iteration time", lambda timeline: f"{timeline.iteration_time:g}"),
        ("bubble", lambda timeline: f"{100 * timeline.bubble:.0f} %"),
        ("work", lambda timeline: f"{sum(timeline.busy_times):g}"),
        ("activations kept (microbatches)", lambda timeline: str(sum(map(peak_graphs, timeline.plan.stages)))),
        (
            "backward messages",
            lambda timeline: str([each.kind for each in chain(*timeline.plan.stages)].count(Kind.SEND_BACKWARD)),
        ),
    ):
        rows.append([name, *map(value_of, timelines.values())])
    return "\n".join(f"{name:<32}{''.join(value.rjust(9) for value in values)}".rstrip() for name, *values in rows)


def show(timelines: Mapping[str, Timeline]) -> str:
    """Return the legend, the grids and the figures."""
    shown = list(timelines.values())
    parts = [f"{legend(*shown)}\na cell is a time of {cell_unit(*shown):g}"]
    for (name, timeline), grid in zip(timelines.items(), render_grids(*shown), strict=True):
        parts.append(f"{title(name, timeline.plan.shape)}\n\n{grid}")
    return "\n\n".join([*parts, figures(timelines)])


@command(PROG)
def main(argv: Sequence[str]) -> None:
    arguments = parse_arguments(argv)
    shapes = plan_shapes(arguments)
    names = (STOCK, BCD) if arguments.schedule == "both" else (arguments.schedule,)
    timelines = {name: simulate_plan(shapes[name], arguments) for name in names}
    print(show(timelines))


if __name__ == "__main__":
    run_main(main)
