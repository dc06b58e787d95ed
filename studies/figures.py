"""Draw the two pictures of studies/study.py: test metric against model state, and against cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise, product
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox
from report import FAINT, RUN_COLOURS, STYLE
from results import Row, Study, frontier

COLOURED = ("full training", "paper", "pretrain")
MARKER_PIXELS = 11
RADII = (14, 22, 32, 44, 58, 74, 92, 112, 136, 164)
DIRECTIONS = 16
MAX_LABELS = 20
"""With more points, only some are labelled."""
LEADER_FROM = 20
"""Distance in pixels from which a label needs a line to its point; it also needs one if another point is nearer."""


def draw(study: Study, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw both pictures of every model and text as PNG files in `folder`; return their paths."""
    paths = []
    cases = [(case, list(group)) for case, group in groupby(rows, key=lambda row: (row.model, row.data))]
    for (model, data), case_rows in cases:
        case = f"{model}, {data}" if len(study.models) > 1 else data
        suffix = f"_{case.replace(', ', '_')}" if len(cases) > 1 else ""
        title = f"{study.title or study.name}" + (f": {case}" if suffix else "")
        for kind, draw_picture in (("state", draw_state), ("cost", draw_cost)):
            paths.append(folder / f"{study.name}{suffix}_{kind}.png")
            draw_picture(paths[-1], case_rows, title=title, metric=study.metric, baseline=study.baseline)
    return paths


def draw_state(path: Path, rows: Sequence[Row], *, title: str, metric: str, baseline: str) -> None:
    """Draw every method by bytes of model state per parameter, and the Pareto frontier (PNG, 1300 x 780 pixels)."""
    known = [row for row in rows if row.state is not None]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 7.8), dpi=100, layout="constrained")
        axes = figure.subplots()
        _scatter(axes, known, [row.state or 0 for row in known], baseline)
        best = frontier(known)
        corners = [(right.state, left.test) for left, right in pairwise(best)]
        steps = [*((row.state, row.test) for row in best), *corners]
        steps.sort(key=lambda corner: (corner[0], -(corner[1] or 0)))
        axes.plot(*zip(*steps, strict=True), color=FAINT, linewidth=1.4, linestyle=(0, (5, 3)), zorder=1)
        axes.set_xlabel("live model state, bytes per parameter")
        axes.set_ylabel(_axis_name(metric))
        shown = _labelled_methods(known, baseline)
        some = "" if len(shown) == len(known) else "; labelled: frontier, full training, the lowest two of each colour"
        _title(axes, title, f"after equal training unless the label gives a length; dashed: Pareto frontier{some}")
        _legend(figure, known)
        figure.draw_without_rendering()
        _label(axes, known, [row.state or 0 for row in known], shown)
        figure.savefig(path)


def draw_cost(path: Path, rows: Sequence[Row], *, title: str, metric: str, baseline: str) -> None:
    """Draw every method by a run's arithmetic and time, relative to the baseline's run (PNG, 1500 x 780 pixels)."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(15, 7.8), dpi=100, layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        names = ("arithmetic of the layers", "time on this machine")
        drawn = []
        for axes, key, name in zip(panels, ("arithmetic", "relative_time"), names, strict=True):
            known = [row for row in rows if getattr(row, key) is not None]
            costs = [getattr(row, key) * row.length for row in known]
            _scatter(axes, known, costs, baseline)
            axes.set_xlabel(f"{name} (full run of the baseline = 1)")
            drawn.append((axes, known, costs))
        full = next((row for row in rows if row.method == baseline and row.dollars), None)
        if full is not None:
            scale = full.dollars / full.length
            dollars = panels[1].secondary_xaxis("top", functions=(lambda x: x * scale, lambda x: x / scale))
            dollars.set_xlabel("dollars of a run")
        panels[0].set_ylabel(_axis_name(metric))
        _title(panels[0], title, "left and below is better")
        _legend(figure, rows)
        figure.draw_without_rendering()
        for axes, known, costs in drawn:
            _label(axes, known, costs, _labelled_methods(known, baseline))
        figure.savefig(path)


def _axis_name(metric: str) -> str:
    return "test error" if metric == "accuracy" else "test loss (nats per token)"


def _title(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=22)
    axes.text(0, 1.015, subtitle, transform=axes.transAxes, fontsize=10, color=FAINT, va="bottom")


def _colours(rows: Iterable[Row]) -> dict[str, str]:
    """Return a colour per group; those of COLOURED have the same colour in every picture."""
    groups = dict.fromkeys((*COLOURED, *(row.group for row in rows)))
    return {group: RUN_COLOURS[index % len(RUN_COLOURS)] for index, group in enumerate(groups)}


def _scatter(axes: Axes, rows: Sequence[Row], xs: Sequence[float], baseline: str) -> None:
    """Draw points with the range of their seeds, and a line at the baseline's height."""
    colours = _colours(rows)
    for row, x in zip(rows, xs, strict=True):
        colour = colours[row.group]
        axes.plot([x, x], [min(row.tests), max(row.tests)], color=colour, linewidth=1.5, zorder=2)
        axes.plot(x, row.test, "o", color=colour, markeredgecolor="white", markersize=8, zorder=3)
        if row.method == baseline:
            axes.axhline(row.test, color=FAINT, linewidth=0.8, zorder=0)
    axes.grid(color="#b5b5b5", linewidth=0.6, alpha=0.4)
    axes.set_axisbelow(True)
    axes.margins(x=0.12, y=0.08)


def _legend(figure: Figure, rows: Sequence[Row]) -> None:
    groups, colours = {row.group for row in rows}, _colours(rows)
    if len(groups) > 1:
        handles = [Line2D([], [], marker="o", linestyle="none", color=colour, markeredgecolor="white", markersize=8,
                          label=group or "other") for group, colour in colours.items() if group in groups]  # fmt: skip
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _labelled_methods(rows: Sequence[Row], baseline: str) -> set[str]:
    """Return the methods to label: all, or the most important ones if there are many."""
    if len(rows) <= MAX_LABELS:
        return {row.method for row in rows}
    labelled = {row.method for row in frontier(rows)} | {baseline}
    for group in {row.group for row in rows}:
        members = sorted((row for row in rows if row.group == group), key=lambda row: row.test)
        labelled |= {row.method for row in members[:2]}
    return labelled


def _label(axes: Axes, rows: Sequence[Row], xs: Sequence[float], shown: set[str]) -> None:
    """Write the methods' names near their points, where they cover neither points nor other names."""
    places = [axes.transData.transform((x, row.test)) for row, x in zip(rows, xs, strict=True)]
    taken = [_box(x, y, MARKER_PIXELS, MARKER_PIXELS) for x, y in places] + _line_boxes(axes)
    inside = axes.get_window_extent()
    colours = _colours(rows)
    renderer = axes.figure._get_renderer()
    # label crowded points first
    order = sorted(range(len(rows)), key=lambda i: sum(1 / (1 + math.dist(places[i], other)) for other in places))
    for index in reversed(order):
        row, (x, y) = rows[index], places[index]
        if row.method not in shown:
            continue
        text = axes.text(0, 0, row.label, fontsize=9.5, color=colours[row.group], ha="center", va="center", zorder=5)
        text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
        size = text.get_window_extent(renderer)
        box = _free_box(x, y, size.width + 4, size.height + 2, taken, inside)
        taken.append(box)
        centre = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
        text.set_position(axes.transData.inverted().transform(centre))
        nearest = _nearest(box, x, y)
        distances = [math.dist(_nearest(box, *place), place) for place in places]
        if distances[index] > min(LEADER_FROM, *distances):
            ends = axes.transData.inverted().transform([(x, y), nearest])
            axes.plot(ends[:, 0], ends[:, 1], color=colours[row.group], linewidth=0.7, alpha=0.6, zorder=1)


def _line_boxes(axes: Axes) -> list[Bbox]:
    """Return boxes in pixels around the horizontal and vertical lines."""
    paths = (line.get_transform().transform_path(line.get_path()).vertices for line in axes.lines)
    return [
        Bbox.from_extents(*(min(a, b) - 2 for a, b in zip(start, end, strict=True)),
                          *(max(a, b) + 2 for a, b in zip(start, end, strict=True)))
        for path in paths for start, end in pairwise(path)
    ]  # fmt: skip


def _free_box(x: float, y: float, width: float, height: float, taken: Sequence[Bbox], inside: Bbox) -> Bbox:
    """Return the nearest box beside (x, y) that covers nothing, or else the one that covers least."""
    best, least = None, math.inf
    for radius, step in product(RADII, range(DIRECTIONS)):
        angle = 2 * math.pi * step / DIRECTIONS
        # the box's edge, not its centre, is `radius` away
        dx, dy = math.cos(angle), math.sin(angle)
        box = _box(x + dx * (radius + width / 2), y + dy * (radius + height / 2), width, height)
        covered = sum(_overlap(box, other) for other in taken) + width * height - _overlap(box, inside)
        if covered < least:
            best, least = box, covered
        if covered < 1:
            break
    assert best is not None
    return best


def _box(x: float, y: float, width: float, height: float) -> Bbox:
    return Bbox.from_bounds(x - width / 2, y - height / 2, width, height)


def _nearest(box: Bbox, x: float, y: float) -> tuple[float, float]:
    """Return the point of the box that is nearest to (x, y)."""
    return min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1)


def _overlap(box: Bbox, other: Bbox) -> float:
    width = min(box.x1, other.x1) - max(box.x0, other.x0)
    height = min(box.y1, other.y1) - max(box.y0, other.y0)
    return max(0.0, width) * max(0.0, height)
