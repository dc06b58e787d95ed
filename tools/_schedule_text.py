"""A timeline of a pipeline schedule as text: one row per stage, time to the right."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.bcd.pipeline.build import most_graphs
from megatron.bcd.pipeline.plan import Action, Kind, PlanShape
from megatron.bcd.pipeline.simulate import Span, Timeline

LETTERS = {Kind.FORWARD_ONLY: "f", Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_INPUT: "I"}
IDLE = "."
MAX_CELLS = 400
_CELLS_PER_TICK = 5


def label(action: Action, shape: PlanShape) -> str:
    """What a cell shows: letter and microbatch, of several chunks also the chunk as a small letter; an apostrophe for
    the next iteration's."""
    letter, ahead = LETTERS[action.kind], action.microbatch - shape.num_microbatches
    if shape.num_chunks > 1:
        return f"{letter}{action.microbatch}{chunk_letter(action.chunk)}"
    return f"{letter}{action.microbatch}" if ahead < 0 else f"{letter}{ahead}'"


def role(shape: PlanShape, stage: int) -> str:
    """What the stage's layers are in this phase; of several chunks a letter each."""
    roles = []
    for virtual in range(stage, shape.num_virtual, shape.num_stages):
        is_prefix = not any(shape.active[: virtual + 1])
        roles.append("active" if shape.active[virtual] else "prefix" if is_prefix else "frozen")
    if shape.num_chunks == 1:
        return roles[0]
    return "".join({"prefix": "p", "active": "A", "frozen": "s"}[one] for one in roles)


def chunk_letter(chunk: int) -> str:
    """a, b, ...; beyond z the number after a dot."""
    return chr(ord("a") + chunk) if chunk < 26 else f".{chunk}"


def passes(*timelines: Timeline) -> list[Span]:
    """All passes that take time."""
    spans = (span for timeline in timelines for of_stage in timeline.spans for span in of_stage)
    return [span for span in spans if span.duration > 0]


def legend(*timelines: Timeline) -> str:
    """One line for the letters that occur in any of the timelines."""
    kinds, shapes = {span.action.kind for span in passes(*timelines)}, [one.plan.shape for one in timelines]
    parts = [f"{letter} {kind}" for kind, letter in LETTERS.items() if kind in kinds]
    num_chunks = max(shape.num_chunks for shape in shapes)
    if num_chunks > 1:
        parts.append(f"a to {chunk_letter(num_chunks - 1)} the chunk; stages by chunk: p prefix, A active, s suffix")
    if any(shape.run_ahead for shape in shapes):
        parts.append(f"{LETTERS[Kind.FORWARD_ONLY]}0' next iteration's microbatch 0")
    return ", ".join([*parts, f"{IDLE} idle"])


def cell_unit(*timelines: Timeline) -> float:
    """Time of one cell: the shortest pass, but long enough that MAX_CELLS hold every timeline."""
    shortest = min((span.duration for span in passes(*timelines)), default=1.0)
    return max(shortest, max(timeline.iteration_time for timeline in timelines) / MAX_CELLS)


def render_grids(*timelines: Timeline) -> list[str]:
    """The rows of all stages under a ruler of cells, every timeline to one scale.

    A pass fills the cells between its start and its end, both rounded: with the default costs exactly, and one that
    costs nothing fills none. A cell is as wide as the widest label and a space, which an apostrophe may take the place
    of.
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
    """Rounded, halves always up: Python's round may put two borders a whole cell apart onto one."""
    return math.floor(cells + 0.5)


def backward_messages(actions: Sequence[Action]) -> int:
    """Gradients that a stage sends in one iteration."""
    return sum(action.kind is Kind.SEND_BACKWARD for action in actions)


def describe(timeline: Timeline) -> str:
    """The text below the grid: iteration time and bubble, then work, activations and messages by stage.

    Work is in units of time. A stage that receives ahead keeps those inputs until the next iteration.
    """
    plan, busy = timeline.plan, timeline.busy_times
    kept = [most_graphs(actions) for actions in plan.stages]
    sent = [backward_messages(actions) for actions in plan.stages]
    rows = [
        ["stage", *map(str, range(plan.shape.num_stages)), "all"],
        ["work", *(f"{time:g}" for time in (*busy, sum(busy)))],
        ["bubble", *(f"{100 * fraction:.0f} %" for fraction in (*timeline.bubble_fractions, timeline.bubble))],
        ["activations kept (microbatches)", *map(str, (*kept, sum(kept)))],
        ["backward messages sent", *map(str, (*sent, sum(sent)))],
    ]
    if plan.shape.run_ahead:
        ahead = [plan.shape.run_ahead * (stage == plan.shape.first_trainable) for stage in range(len(plan.stages))]
        rows.append(["next iteration's inputs kept", *map(str, (*ahead, sum(ahead)))])
    margin = max(len(row[0]) for row in rows)
    width = max(len(cell) for row in rows for cell in row[1:]) + 2
    lines = [row[0].ljust(margin) + "".join(cell.rjust(width) for cell in row[1:]) for row in rows]
    return "\n".join([f"iteration time {timeline.iteration_time:g}, bubble {100 * timeline.bubble:.0f} %", *lines])
