"""The picture of tools/report.py: loss curves over the shaded phases, and model state per rank."""

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from report import Figures, Run

MIB = 2**20
RUN_COLOURS = ("#1f4e9c", "#c8453b", "#2f7d4f", "#7b4fa3", "#8a6d1f", "#2b8a99")
RUN_MARKERS = "oDs^vP"
BLOCK_TINTS = ("#fdeccb", "#ddefd8", "#dfe7f7", "#f8dfe8", "#ece5f6", "#dcf1f0")
INK, FAINT = "#2b2b2b", "#6f6f6f"
MAX_BANDS = 150  # more of them would be a grey wash
MIN_LABELLED_BAND = 0.02  # of the axis; a narrower band has no room for its number
MAX_RANKS_AS_BARS = 16
STYLE = {
    "font.size": 11,
    "axes.edgecolor": "#9a9a9a",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "legend.frameon": True,
    "legend.framealpha": 0.92,
    "legend.edgecolor": "#dddddd",
}


def phase_bands(run: "Run") -> list[tuple[float, float, int]]:
    """(start, end, block) of each phase on the iteration axis, neighbours of the same block joined.

    A switch that no line has (of an older version, or lost when the run was stopped) is put at the line before it.
    """
    starts: list[tuple[float, int]] = []
    before = run.steps[0]["iteration"] - 1
    for step in run.steps:
        for start, block in (*step.get("switches", ()), (before, step["block"])):
            if not starts or block != starts[-1][1]:
                starts.append((float(start), block))
        before = step["iteration"]
    ends = [*(start for start, _ in starts[1:]), float(before)]
    return [(start, end, block) for (start, block), end in zip(starts, ends, strict=True)]


def smoothed(values: Sequence[float]) -> list[float]:
    """Centred mean over about a fiftieth of the curve, over less at its ends so that nothing is shifted."""
    half = max(1, len(values) // 100)
    reaches = (min(half, index, len(values) - 1 - index) for index in range(len(values)))
    return [statistics.fmean(values[i - reach : i + reach + 1]) for i, reach in enumerate(reaches)]


def _finite(lines: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(line["iteration"], line[key]) for line in lines if math.isfinite(line[key])]
    return [x for x, _ in points], [y for _, y in points]


def _draw_bands(axes: Axes, run: "Run", width: float) -> list[Any]:
    """Shades the phases and numbers their blocks; returns legend handles, one per block."""
    bands = phase_bands(run)
    if not 1 < len(bands) <= MAX_BANDS:
        return []
    for start, end, block in bands:
        axes.axvspan(start, end, color=BLOCK_TINTS[block % len(BLOCK_TINTS)], linewidth=0, zorder=0)
        if (end - start) / width >= MIN_LABELLED_BAND:
            place = {"ha": "center", "va": "top", "transform": axes.get_xaxis_transform()}
            axes.text((start + end) / 2, 0.99, str(block), fontsize=9, color=FAINT, **place)
    blocks = sorted({block for _, _, block in bands})
    if len(blocks) > len(BLOCK_TINTS):
        return []  # tints repeat: the numbers above the bands must do
    return [Patch(color=BLOCK_TINTS[block], label=f"block {block} active") for block in blocks]


def _draw_run(axes: Axes, run: "Run", index: int) -> Line2D:
    """Training loss thin and smoothed, validation loss as markers; returns the legend handle."""
    colour = RUN_COLOURS[index % len(RUN_COLOURS)]
    marker = {"marker": RUN_MARKERS[index % len(RUN_MARKERS)], "markeredgecolor": "white", "markersize": 8}
    iterations, losses = _finite(run.steps, "loss")
    axes.plot(iterations, losses, color=colour, linewidth=0.7, alpha=0.35)
    axes.plot(iterations, smoothed(losses), color=colour, linewidth=1.9)
    points = _finite(run.validations, "validation_loss")
    axes.plot(*points, color=colour, linestyle="none", zorder=4, **marker)
    return Line2D([], [], color=colour, linewidth=2, label=_plain(run.name), **marker)


def _plain(name: str) -> str:
    """Not a formula, though it may have dollars."""
    return name.replace("$", r"\$")


def _draw_losses(axes: Axes, runs: Sequence["Run"]) -> None:
    iterations = [line["iteration"] for run in runs for line in (*run.steps, *run.validations)]
    first, last = min(iterations, default=1) - 1, max(iterations, default=1)
    handles: list[Any] = [_draw_run(axes, run, index) for index, run in enumerate(runs)]
    phased = next((run for run in runs if run.num_blocks > 1), None)
    if phased is not None:
        handles += _draw_bands(axes, phased, last - first)
    axes.set(xlim=(first, first + (last - first) * 1.01), xlabel="iteration", ylabel="loss (nats per token)")
    axes.set_title("Loss", loc="left", fontsize=13, fontweight="bold", pad=22)
    subtitle = "line: training (smoothed over thin), marker: validation"
    if _leave_out_the_fall(axes, runs):
        subtitle += ", the first fall is cut off"
    if phased is not None:
        subtitle += f", shade: active block of {_plain(phased.name)}"
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, fontsize=10, color=FAINT, va="bottom")
    axes.grid(axis="y", color="#b5b5b5", linewidth=0.6, alpha=0.5)
    axes.legend(handles=handles, loc="upper right", bbox_to_anchor=(0.99, 0.95))


def _leave_out_the_fall(axes: Axes, runs: Sequence["Run"]) -> bool:
    """End the axis a little above where a twentieth of the run was done; whether that cuts anything off.

    The first steps fall so far that all later ones would lie on one line.
    """
    curves = [smoothed(_finite(run.steps, "loss")[1]) for run in runs]
    settled = [value for curve in curves if len(curve) >= 40 for value in curve[len(curve) // 20 :]]
    if not settled:
        return False
    low, high = min(settled), max(settled)
    top = high + 0.15 * (high - low)
    is_cut = top < max(max(curve) for curve in curves if curve)
    if is_cut:
        axes.set_ylim(low - 0.12 * (high - low), top)
    return is_cut


def _draw_model_state(axes: Axes, figures: Sequence["Figures"]) -> None:
    """Grouped bars: a group per rank, a bar per run; beyond MAX_RANKS_AS_BARS the highest rank only."""
    states = [row.model_state_bytes or () for row in figures]
    num_ranks = max(map(len, states), default=0)
    if num_ranks > MAX_RANKS_AS_BARS:
        states = [(max(state),) if state else () for state in states]
    bar = 0.8 / len(figures)
    form = "{:,.0f}" if max((max(state) for state in states if state), default=0) >= 100 * MIB else "{:,.1f}"
    for index, state in enumerate(states):
        centres = [rank + (index - (len(figures) - 1) / 2) * bar for rank in range(len(state))]
        heights = [num_bytes / MIB for num_bytes in state]
        bars = axes.bar(centres, heights, width=bar * 0.92, color=RUN_COLOURS[index % len(RUN_COLOURS)])
        if len(states) * len(state) <= 8:
            axes.bar_label(bars, fmt=form, padding=2, fontsize=9, color=INK)
    shown = max(map(len, states), default=0)
    labels = ["highest rank"] if num_ranks > shown else [f"rank {rank}" for rank in range(shown)]
    axes.set_xticks(range(shown), labels, rotation=0 if shown <= 3 else 90)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("MiB")
    axes.set_title("Model state", loc="left", fontsize=13, fontweight="bold", pad=22)
    axes.text(0, 1.02, "maximum over phases", transform=axes.transAxes, fontsize=10, color=FAINT, va="bottom")
    axes.margins(y=0.1)
    axes.grid(axis="y", color="#b5b5b5", linewidth=0.6, alpha=0.5)
    axes.set_axisbelow(True)


def draw(path: str, kind: str, runs: Sequence["Run"], figures: Sequence["Figures"]) -> None:
    """Writes the picture, as a png 1200 x 675 pixels; `kind` is the format (`path` is a temporary name)."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 6.75), dpi=100, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.04)
        losses, model_state = figure.subplots(1, 2, width_ratios=(3.4, 1))
        _draw_losses(losses, runs)
        _draw_model_state(model_state, figures)
        figure.savefig(path, format=kind)
