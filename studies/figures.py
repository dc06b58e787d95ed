"""Draw the pictures of studies/study.py: test metric against model state."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from report import FAINT, RUN_COLOURS, STYLE
from results import Row, Study, frontier

COLOURED = ("full training", "paper", "pretrain")


def draw(study: Study, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw a picture of every model and text as PNG files in `folder`; return their paths."""
    paths = []
    cases = [(case, list(group)) for case, group in groupby(rows, key=lambda row: (row.model, row.data))]
    for (model, data), case_rows in cases:
        case = f"{model}, {data}" if len(study.models) > 1 else data
        suffix = f"_{case.replace(', ', '_')}" if len(cases) > 1 else ""
        title = f"{study.title or study.name}" + (f": {case}" if suffix else "")
        paths.append(folder / f"{study.name}{suffix}_state.png")
        draw_state(paths[-1], case_rows, title=title, metric=study.metric, baseline=study.baseline)
    return paths


def draw_state(path: Path, rows: Sequence[Row], *, title: str, metric: str, baseline: str) -> None:
    """Draw every method by bytes of model state per parameter, and the Pareto frontier (PNG, 1500 x 780 pixels)."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(15, 7.8), dpi=100, layout="constrained")
        axes = figure.subplots()
        _scatter(axes, [(row, row.state) for row in rows if row.state is not None], rows, baseline)
        best = frontier(rows)
        corners = [(right.state, left.test) for left, right in pairwise(best)]
        steps = [*((row.state, row.test) for row in best), *corners]
        steps.sort(key=lambda corner: (corner[0], -(corner[1] or 0)))
        axes.plot(*zip(*steps, strict=True), color=FAINT, linewidth=1.4, linestyle=(0, (5, 3)), zorder=1)
        axes.set_xlabel("live model state, bytes per parameter")
        axes.set_ylabel("test error" if metric == "accuracy" else "test loss (nats per token)")
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        subtitle = "after equal training unless the label gives a length; dashed: Pareto frontier"
        axes.set_title(subtitle, loc="left", fontsize=10, color=FAINT)
        colours = _colours(rows)
        handles = [
            Line2D([], [], marker="o", linestyle="none", color=colours[row.group], label=_wrapped(number, row))
            for number, row in enumerate(rows, 1)
        ]
        figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
        figure.savefig(path)


def _colours(rows: Iterable[Row]) -> dict[str, str]:
    """Return a colour per group; those of COLOURED have the same colour in every picture."""
    groups = dict.fromkeys((*COLOURED, *(row.group for row in rows)))
    return {group: RUN_COLOURS[index % len(RUN_COLOURS)] for index, group in enumerate(groups)}


def _wrapped(number: int, row: Row) -> str:
    """Return a method's label in the legend, in lines of 40 characters."""
    return "\n".join(textwrap.wrap(f"{number} {row.label}", 40, subsequent_indent="   "))


def _scatter(axes: Axes, places: Sequence[tuple[Row, float]], rows: Sequence[Row], baseline: str) -> None:
    """Draw points with the range of their seeds, and a line at the baseline's height. Points at one place share a
    list of their numbers."""
    colours = _colours(rows)
    for row, x in places:
        axes.plot([x, x], [min(row.tests), max(row.tests)], color=colours[row.group], linewidth=1.5, zorder=2)
        axes.plot(x, row.test, "o", color=colours[row.group], markeredgecolor="white", markersize=8, zorder=3)
        if row.method == baseline:
            axes.axhline(row.test, color=FAINT, linewidth=0.8, zorder=0)
    axes.grid(color="#b5b5b5", linewidth=0.6, alpha=0.4)
    axes.set_axisbelow(True)
    axes.margins(x=0.12, y=0.08)
    size = axes.transData.transform((axes.get_xlim()[1], axes.get_ylim()[1])).max()
    near: list[tuple[float, float, list[Row]]] = []
    for row, x in places:
        left, bottom = axes.transData.transform((x, row.test or 0)) / size
        group = next((some for a, b, some in near if max(abs(left - a), abs(bottom - b)) < 0.015), None)
        if group is None:
            near.append((left, bottom, [row]))
        else:
            group.append(row)
    x_of = {id(row): x for row, x in places}
    for _, _, some in near:
        colour = colours[some[0].group] if len({row.group for row in some}) == 1 else FAINT
        text = ", ".join(str(rows.index(row) + 1) for row in some)
        axes.annotate(text, (x_of[id(some[0])], some[0].test or 0), (8, 8), textcoords="offset points", color=colour,
                      fontsize=9, va="center")  # fmt: skip
