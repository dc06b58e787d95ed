"""The picture of tools/compare.py: model state, peak memory and iteration time of every method, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from _compare_figures import Row
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from report_figure import FAINT, INK, STYLE

COLOURS = {"full": "#8d99ae", "offload": "#8a6d1f", "bcd": "#1f4e9c", "bcd, 1 process": "#5b84c4", "badam": "#c8453b"}
NAMES = {"full": "full training", "offload": "CPU offload", "bcd": "BCD", "bcd, 1 process": "BCD, 1 process",
         "badam": "BAdam"}  # fmt: skip
MARK = "#111111"


def draw(path: str, rows: Sequence[Row], figures: dict[str, Any]) -> None:
    """Write a PNG of 1300 x 560 pixels."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 5.6), dpi=100, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.14, h_pad=0.12, wspace=0.06)
        state, peak, seconds = figure.subplots(1, 3)
        _draw_memory(state, rows, "model_state_bytes", "Model state", "weights, gradients, optimizer; largest phase")
        where = "largest GPU" if figures["machine"]["gpus"] else "resident set, libraries included"
        _draw_memory(peak, rows, "peak_memory_bytes", "Peak memory", where)
        _draw_times(seconds, rows, figures)
        model = figures["model"]
        figure.suptitle(
            f"{model['name']}: {model['parameters'] / 1e6:,.1f} M parameters, "
            f"{figures['tokens_per_iteration']:,} tokens per iteration, the same samples",
            x=0.012, ha="left", fontsize=14, fontweight="bold",
        )  # fmt: skip
        figure.savefig(path, format="png")


def _bars(axes: Axes, rows: Sequence[Row], heights: Sequence[float], form: str, *, inside: bool = False) -> None:
    """One bar per method, with its value above, or inside if something else is drawn at its top."""
    bars = axes.bar(range(len(rows)), heights, width=0.62, color=[COLOURS.get(row.name, FAINT) for row in rows])
    labels = [format(height, form) for height in heights]
    if inside:
        axes.bar_label(bars, labels=labels, label_type="center", fontsize=12, fontweight="bold", color="white")
    else:
        axes.bar_label(bars, labels=labels, padding=4, fontsize=10.5, color=INK)
    axes.set_xticks(range(len(rows)), [NAMES.get(row.name, row.name).replace(", ", ",\n") for row in rows])
    axes.tick_params(axis="x", length=0, labelcolor=INK)
    axes.grid(axis="y", color="#b5b5b5", linewidth=0.6, alpha=0.5)
    axes.set_axisbelow(True)
    axes.margins(y=0.14)


def _title(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=22)
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, fontsize=10, color=FAINT, va="bottom")


def _draw_memory(axes: Axes, rows: Sequence[Row], name: str, title: str, subtitle: str) -> None:
    counts = [getattr(row, name) for row in rows]
    unit, size = ("GiB", 2**30) if max(counts) >= 10 * 2**30 else ("MiB", 2**20)
    _bars(axes, rows, [count / size for count in counts], ",.1f" if max(counts) < 1000 * size else ",.0f")
    axes.set_ylabel(unit)
    _title(axes, title, subtitle)


def _draw_times(axes: Axes, rows: Sequence[Row], figures: dict[str, Any]) -> None:
    """Means as bars, every round as a dot, the layers' arithmetic as a line."""
    _bars(axes, rows, [row.iteration_ms for row in rows], ",.0f", inside=True)
    full = next((row.iteration_ms for row in rows if row.name == "full"), None)
    for index, row in enumerate(rows):
        times = [turn["iteration_ms"] for turn in figures["turns"][row.name]]
        spread = [index + 0.44 * ((number + 0.5) / len(times) - 0.5) for number in range(len(times))]
        axes.plot(spread, times, "o", color="white", markeredgecolor=MARK, markersize=5, markeredgewidth=0.9, zorder=4)
        if full is not None and row.planned.arithmetic < 1:
            axes.hlines(
                full * row.planned.arithmetic, index - 0.38, index + 0.38, color=MARK, linestyle=(0, (4, 2)), zorder=5
            )
    axes.set_ylabel("ms")
    _title(axes, "Iteration", _ratios_text(rows, figures))
    handles = [Line2D([], [], linestyle="none", marker="o", color="white", markeredgecolor=MARK, label="a round")]
    if full is not None and any(row.planned.arithmetic < 1 for row in rows):
        handles.append(Line2D([], [], color=MARK, linestyle=(0, (4, 2)), label="layers' arithmetic"))
    axes.legend(handles=handles, loc="upper right", fontsize=9.5)
    axes.set_ylim(0, 1.22 * max(max(turn["iteration_ms"] for turn in turns) for turns in figures["turns"].values()))


def _ratios_text(rows: Sequence[Row], figures: dict[str, Any]) -> str:
    bcd = next((row for row in rows if row.name == "bcd" and row.ratio_to_full), None)
    parts = []
    if bcd is not None:
        parts.append(f"BCD {bcd.ratio_to_full:.2f} x full training")
    if figures["peer"]:
        parts.append(f"{figures['peer']['tokens_per_second_ratio']:.2f} x BAdam's tokens/s")
    return "; ".join(parts) or "mean of the rounds"
