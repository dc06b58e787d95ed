"""The picture of tools/show_schedule.py: one panel per schedule, to one scale of time."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from megatron.bcd.pipeline.actions import Kind
from megatron.bcd.pipeline.build import PlanShape
from megatron.bcd.pipeline.chunk_shape import ChunkShape
from megatron.bcd.pipeline.render import backward_messages, kept_activations, label, role
from megatron.bcd.pipeline.simulate import Span, Timeline

# Okabe and Ito's colours: told apart with any colour vision, and by brightness in print
FILLS = {
    Kind.FORWARD_ONLY: "#8fcbee",
    Kind.FORWARD: "#0072b2",
    Kind.BACKWARD: "#d55e00",
    Kind.BACKWARD_INPUT: "#f2b84b",
}
DARK_FILLS = (Kind.FORWARD, Kind.BACKWARD)
NAMES = {
    Kind.FORWARD_ONLY: "forward-only",
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward of input gradients",
}
INK, FAINT, EDGE = "#2b2b2b", "#6f6f6f", "#ffffff"
AHEAD_HATCH = "////"
BOX_HEIGHT = 0.84  # of a row
WIDTH, MARGIN_LEFT, MARGIN_RIGHT = 13.0, 1.5, 2.05  # inches
ROW_HEIGHT, LOW_ROW_HEIGHT, PANEL_GAP, MARGIN_TOP, MARGIN_BOTTOM = 0.46, 0.25, 0.95, 0.75, 1.15  # inches
MAX_HIGH_ROWS = 16
MIN_FONT, MAX_FONT = 4.5, 11.0  # points; a number that would be smaller is left out
STYLE = {
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": "#9a9a9a",
    "axes.labelcolor": INK,
    "xtick.color": FAINT,
    "ytick.color": INK,
    "hatch.linewidth": 1.2,
    "svg.fonttype": "none",
}


def draw(path: str, kind: str, timelines: Sequence[Timeline]) -> None:
    """Writes the picture, 13 inches wide; `kind` is the format (`path` is a temporary name)."""
    num_stages = timelines[0].plan.shape.num_stages
    panel = num_stages * (ROW_HEIGHT if num_stages <= MAX_HIGH_ROWS else LOW_ROW_HEIGHT)
    height = MARGIN_TOP + len(timelines) * panel + (len(timelines) - 1) * PANEL_GAP + MARGIN_BOTTOM
    end = max(timeline.iteration_time for timeline in timelines) or 1.0
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), dpi=160)
        for index, timeline in enumerate(timelines):
            bottom = height - MARGIN_TOP - (index + 1) * panel - index * PANEL_GAP
            axes_width = WIDTH - MARGIN_LEFT - MARGIN_RIGHT
            axes = figure.add_axes(
                (MARGIN_LEFT / WIDTH, bottom / height, axes_width / WIDTH, panel / height), xlim=(0, end)
            )
            _draw_panel(axes, timeline, points_per_unit=axes_width * 72 / end)
            _label_axes(axes, timeline, is_lowest=index == len(timelines) - 1)
        if len(timelines) == 2:
            _mark_saved_time(axes, *timelines)
        handles = _legend_handles(timelines)
        figure.legend(
            handles=handles, loc="lower left", bbox_to_anchor=((MARGIN_LEFT - 0.08) / WIDTH, 0.12 / height),
            ncols=len(handles), frameon=False, borderaxespad=0, handlelength=1.6, columnspacing=1.8,
        )  # fmt: skip
        figure.savefig(path, format=kind)


def _draw_panel(axes: Axes, timeline: Timeline, *, points_per_unit: float) -> None:
    shape = timeline.plan.shape
    boxes = [span for spans in timeline.spans for span in spans if span.action.kind.computes and span.duration > 0]
    for stage in range(shape.num_stages):
        axes.axhline(stage, color="#ececec", linewidth=1, zorder=0)
    for (stage, kind, is_ahead), same in _grouped(boxes, shape).items():
        places = [(span.start, span.duration) for span in same]
        axes.broken_barh(
            places, (stage - BOX_HEIGHT / 2, BOX_HEIGHT), facecolor=FILLS[kind], edgecolor=EDGE, zorder=2,
            linewidth=min(1.2, same[0].duration * points_per_unit / 8), hatch=AHEAD_HATCH if is_ahead else None,
        )  # fmt: skip
    longest = max((len(_number(span, shape)) for span in boxes), default=1)
    for span in boxes:
        size = min(MAX_FONT, span.duration * points_per_unit / (0.62 * longest + 0.4))
        if size >= MIN_FONT:
            _write_number(axes, span, shape, size)
    axes.axvline(timeline.iteration_time, color=INK, linewidth=1.3, zorder=3, clip_on=False)


def _grouped(spans: Sequence[Span], shape: PlanShape | ChunkShape) -> dict[tuple[int, Kind, bool], list[Span]]:
    """By stage, kind, and whether it is the next iteration's: boxes that are drawn alike."""
    groups: dict[tuple[int, Kind, bool], list[Span]] = {}
    for span in spans:
        groups.setdefault((span.stage, span.action.kind, _is_ahead(span, shape)), []).append(span)
    return groups


def _is_ahead(span: Span, shape: PlanShape | ChunkShape) -> bool:
    return span.action.microbatch >= shape.num_microbatches


def _number(span: Span, shape: PlanShape | ChunkShape) -> str:
    return label(span.action, shape)[1:]  # the colour stands for the letter


def _write_number(axes: Axes, span: Span, shape: PlanShape | ChunkShape, size: float) -> None:
    is_dark = span.action.kind in DARK_FILLS
    written = axes.text(
        span.start + span.duration / 2, span.stage, _number(span, shape), ha="center", va="center_baseline",
        fontsize=size, color="white" if is_dark else INK, fontweight="bold" if is_dark else "normal", zorder=4,
    )  # fmt: skip
    if _is_ahead(span, shape):
        written.set_path_effects([withStroke(linewidth=3, foreground=FILLS[span.action.kind])])


def _label_axes(axes: Axes, timeline: Timeline, *, is_lowest: bool) -> None:
    plan = timeline.plan
    stages = range(plan.shape.num_stages)
    is_interleaved = isinstance(plan.shape, ChunkShape)
    kind = "interleaved 1F1B, full training" if is_interleaved else "1F1B"
    name = f"Stock: Megatron Core's {kind}" if plan.shape.is_stock else "BCD"
    if is_interleaved and not plan.shape.is_stock:
        name = "BCD: interleaved"
    elif not plan.shape.is_stock and plan.shape.first_trainable:
        name = f"BCD: no backward before stage {plan.shape.first_trainable}"
        name += f", run-ahead {plan.shape.run_ahead}" if plan.shape.run_ahead else ""
    figures = f"iteration time {timeline.iteration_time:g}   bubble {100 * timeline.bubble:.0f} %"
    axes.set_title(name, loc="left", fontsize=14, fontweight="bold", pad=12)
    axes.set_title(figures, loc="right", fontsize=13, pad=12)
    axes.set_ylim(len(stages) - 0.5, -0.5)
    axes.set_yticks(stages, [f"stage {stage}, {role(plan.shape, stage)}" for stage in stages])
    axes.tick_params(axis="y", length=0, pad=8)
    axes.tick_params(axis="x", labelbottom=is_lowest)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if is_lowest:
        axes.set_xlabel("time", fontsize=11)
    columns = (
        (("activations", "kept"), [kept_activations(actions) for actions in plan.stages]),
        (("backward", "messages"), [backward_messages(stage, actions) for stage, actions in enumerate(plan.stages)]),
    )
    for inches, (head, values) in zip((0.6, 1.5), columns, strict=True):
        place = 1 + inches / (WIDTH - MARGIN_LEFT - MARGIN_RIGHT)
        style = {"transform": axes.get_yaxis_transform(), "ha": "center", "clip_on": False}
        for line, points in zip(head, (18, 6), strict=True):
            axes.annotate(
                line, (place, -0.5), xycoords=axes.get_yaxis_transform(), xytext=(0, points), fontsize=9.5, color=FAINT,
                textcoords="offset points", ha="center", va="baseline", annotation_clip=False,
            )  # fmt: skip
        for stage, value in enumerate(values):
            axes.text(place, stage, str(value), va="center_baseline", color=INK if value else "#b0b0b0", **style)


def _mark_saved_time(axes: Axes, stock: Timeline, bcd: Timeline) -> None:
    """Shades, in BCD's panel, the time by which it ends before the stock schedule."""
    first, last = bcd.iteration_time, stock.iteration_time
    if not 0 < first < last:
        return
    axes.axvspan(first, last, color="#e6f2e6", linewidth=0, zorder=0)
    middle = (axes.get_ylim()[0] + axes.get_ylim()[1]) / 2
    change = f"\N{MINUS SIGN}{100 * (1 - first / last):.0f} %"
    axes.text((first + last) / 2, middle, change, ha="center", va="center", fontsize=13, fontweight="bold",
              color="#2f6b3a", rotation=90 if (last - first) / last < 0.07 else 0)  # fmt: skip


def _legend_handles(timelines: Sequence[Timeline]) -> list[Patch]:
    spans = [span for timeline in timelines for spans in timeline.spans for span in spans]
    kinds = {span.action.kind for span in spans if span.duration > 0}
    handles = [Patch(facecolor=FILLS[kind], label=name) for kind, name in NAMES.items() if kind in kinds]
    if any(timeline.plan.shape.run_ahead for timeline in timelines):
        fill = FILLS[Kind.FORWARD_ONLY]
        handles.append(Patch(facecolor=fill, edgecolor=EDGE, hatch=AHEAD_HATCH, label="next iteration's (run-ahead)"))
    handles.append(Patch(facecolor="white", edgecolor="#b0b0b0", label="idle"))
    return handles
