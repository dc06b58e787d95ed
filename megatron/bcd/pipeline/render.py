"""A timeline as text: one row per stage, time to the right."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megatron.bcd.pipeline.actions import Action, Kind, sent
from megatron.bcd.pipeline.build import PlanShape
from megatron.bcd.pipeline.chunk_shape import ChunkShape
from megatron.bcd.pipeline.simulate import Span, Timeline

LETTERS = {Kind.FORWARD_ONLY: "f", Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.BACKWARD_INPUT: "I"}
IDLE = "."
MAX_CELLS = 400
_CELLS_PER_TICK = 5
_MEANINGS = {
    Kind.FORWARD_ONLY: "forward-only",
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward of input gradients",
}


def label(action: Action, shape: PlanShape | ChunkShape) -> str:
    """What a cell shows: letter and microbatch, the chunk as a small letter, an apostrophe for the next iteration's."""
    if isinstance(shape, ChunkShape):
        return f"{LETTERS[action.kind]}{action.microbatch}{chunk_letter(action.chunk)}"
    ahead = action.microbatch - shape.num_microbatches
    return f"{LETTERS[action.kind]}{action.microbatch}" if ahead < 0 else f"{LETTERS[action.kind]}{ahead}'"


def chunk_letter(chunk: int) -> str:
    """a, b, ...; beyond z the number after a dot."""
    return chr(ord("a") + chunk) if chunk < 26 else f".{chunk}"


def role(shape: PlanShape | ChunkShape, stage: int) -> str:
    """What the stage's layers are in this phase."""
    if isinstance(shape, ChunkShape):
        return shape.role(stage)
    if stage < shape.first_trainable:
        return "prefix"
    return "active" if shape.active[stage] else "frozen"


def kept_activations(actions: Iterable[Action]) -> int:
    """Most microbatches whose activations a stage keeps at once."""
    kept = most = 0
    for action in actions:
        if action.kind is Kind.FORWARD:
            kept += 1
            most = max(most, kept)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            kept -= 1
    return most


def backward_messages(stage: int, actions: Iterable[Action]) -> int:
    """Backward messages that a stage sends in one iteration."""
    messages = (sent(stage, action) for action in actions)
    return sum(message is not None and message.is_backward for message in messages)


def cell_unit(*timelines: Timeline) -> float:
    """Time of one cell: the shortest computing action, but long enough that MAX_CELLS hold every timeline."""
    durations = [
        span.duration
        for timeline in timelines
        for spans in timeline.spans
        for span in spans
        if span.action.kind.computes and span.duration > 0
    ]
    longest = max(timeline.iteration_time for timeline in timelines)
    return max(min(durations, default=1.0), longest / MAX_CELLS)


def cell_width(*timelines: Timeline) -> int:
    """Characters of one cell: the widest label and a space, which an apostrophe may take the place of."""
    texts = [
        label(span.action, timeline.plan.shape)
        for timeline in timelines
        for spans in timeline.spans
        for span in spans
        if span.action.kind.computes
    ]
    return max((max(len(text), len(text.rstrip("'")) + 1) for text in texts), default=3)


def legend(*timelines: Timeline) -> str:
    """One line for the letters that occur in any of the timelines."""
    spans = (span for timeline in timelines for spans in timeline.spans for span in spans)
    kinds = {span.action.kind for span in spans if span.duration > 0}
    parts = [f"{LETTERS[kind]} {meaning}" for kind, meaning in _MEANINGS.items() if kind in kinds]
    chunks = {timeline.plan.shape.num_chunks for timeline in timelines if isinstance(timeline.plan.shape, ChunkShape)}
    if chunks:
        parts.append(f"a to {chunk_letter(max(chunks) - 1)} the chunk; stages by chunk: p prefix, A active, s suffix")
    if any(timeline.plan.shape.run_ahead for timeline in timelines):
        parts.append(f"{LETTERS[Kind.FORWARD_ONLY]}0' next iteration's microbatch 0")
    return ", ".join([*parts, f"{IDLE} idle"])


def render_grid(timeline: Timeline, *, unit: float | None = None, width: int | None = None) -> str:
    """The rows of all stages under a ruler of cells, `width` characters for each `unit` of time.

    By default as `cell_unit` and `cell_width` say; give them to draw several timelines to one scale. An action fills
    the cells between its start and its end, both rounded: with the default costs exactly, and one that costs nothing
    fills none.
    """
    unit = cell_unit(timeline) if unit is None else unit
    width = cell_width(timeline) if width is None else width
    shape = timeline.plan.shape
    num_cells = _nearest(timeline.iteration_time / unit)
    heads = [f"stage {stage} {role(shape, stage)}" for stage in range(shape.num_stages)]
    margin = max(map(len, heads)) + 2
    ticks = (str(cell).ljust(width * _CELLS_PER_TICK) for cell in range(0, num_cells + 1, _CELLS_PER_TICK))
    rows = [f"{'time':<{margin}}{''.join(ticks)}"]
    for head, spans in zip(heads, timeline.spans, strict=True):
        rows.append(f"{head:<{margin}}{_row(spans, shape, unit=unit, width=width, num_cells=num_cells)}")
    return "\n".join(row.rstrip() for row in rows)


def _row(spans: Sequence[Span], shape: PlanShape | ChunkShape, *, unit: float, width: int, num_cells: int) -> str:
    cells = [IDLE.center(width)] * num_cells
    for span in spans:
        first, end = _nearest(span.start / unit), _nearest(span.end / unit)
        if span.action.kind.computes and first < end:
            text = label(span.action, shape)
            space = (end - first) * width
            # dashes join the cells of one action; the last character keeps it from the next one
            bar = text if end - first == 1 else text.ljust(space - 1, "-")
            cells[first:end] = [bar.ljust(space)] + [""] * (end - first - 1)
    return "".join(cells)


def _nearest(cells: float) -> int:
    """Rounded, halves always up: Python's round may put two borders a whole cell apart onto one."""
    return math.floor(cells + 0.5)


def describe(timeline: Timeline) -> str:
    """The text below the grid: iteration time and bubble, then work, activations and messages by stage.

    Work is in units of time. A stage that receives ahead keeps those inputs until the next iteration.
    """
    plan = timeline.plan
    stages = range(plan.shape.num_stages)
    bubbles = [f"{100 * fraction:.0f} %" for fraction in timeline.bubble_fractions]
    busy = timeline.busy_times
    kept = [kept_activations(actions) for actions in plan.stages]
    messages = [backward_messages(stage, actions) for stage, actions in enumerate(plan.stages)]
    rows = [
        ["stage", *map(str, stages), "all"],
        ["work", *(f"{time:g}" for time in busy), f"{sum(busy):g}"],
        ["bubble", *bubbles, f"{100 * timeline.bubble:.0f} %"],
        ["activations kept (microbatches)", *map(str, kept), str(sum(kept))],
        ["backward messages sent", *map(str, messages), str(sum(messages))],
    ]
    if plan.shape.run_ahead:
        ahead = [sum(action.kind is Kind.RECEIVE_AHEAD for action in actions) for actions in plan.stages]
        rows.append(["next iteration's inputs kept", *map(str, ahead), str(sum(ahead))])
    margin = max(len(row[0]) for row in rows)
    width = max(len(cell) for row in rows for cell in row[1:]) + 2
    lines = [row[0].ljust(margin) + "".join(cell.rjust(width) for cell in row[1:]) for row in rows]
    return "\n".join([f"iteration time {timeline.iteration_time:g}, bubble {100 * timeline.bubble:.0f} %", *lines])
