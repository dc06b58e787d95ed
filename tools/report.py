"""Compare runs by their metrics files: a short table, ratios, and one picture of the loss curves.

    python tools/report.py out/bcd.jsonl out/full.jsonl
    python tools/report.py --run "BCD=out/bcd.jsonl" --run "full=out/full.jsonl" --figure out/loss.png

"ms per step" is each block's median, averaged over the iterations. Model state is the maximum over the phases, per
rank. Validation figures are those of the last evaluation.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _parser import (
    STDOUT,
    Parser,
    add_json,
    check_writable,
    command,
    run_main,
    table,
    write_atomically,
    write_figures,
)
from board_views import View, draw_chart, write_page

PROG = "tools/report.py"
MIB = 2**20
NUM_RANKS_SHOWN = 4
FIGURE_FORMATS = (".png", ".svg", ".pdf")
COLUMNS = ("run", "model state per rank", "ms per step", "tokens/s", "validation loss", "perplexity")

RUN_COLOURS = ("#1f4e9c", "#c8453b", "#2f7d4f", "#7b4fa3", "#8a6d1f", "#2b8a99")
LINES: dict[str, dict[str, Any]] = {
    "thin": {"linewidth": 0.7, "alpha": 0.35},
    "line": {"linewidth": 1.9},
    "dots": {"linestyle": "none", "marker": "o", "markeredgecolor": "white", "markersize": 8, "clip_on": False},
}
"""The kinds of curves of `draw_chart`, in Matplotlib's words."""
BLOCK_TINTS = ("#fdeccb", "#ddefd8", "#dfe7f7", "#f8dfe8", "#ece5f6", "#dcf1f0")
INK, FAINT = "#2b2b2b", "#6f6f6f"
MAX_BANDS = 150  # more could not be told apart
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "xtick.color": FAINT, "ytick.color": FAINT}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One metrics file."""

    name: str
    file: str
    steps: tuple[dict[str, Any], ...]
    validations: tuple[dict[str, Any], ...]
    test: dict[str, Any]
    """The last test line; empty if there is none."""

    @property
    def num_ranks(self) -> tuple[int, ...]:
        """The number of ranks at the start, then at each resumption that changed it."""
        return tuple(number for number, _ in groupby(len(step["model_state_bytes"]) for step in self.steps))


_NUMBERS = {
    "loss": ("iteration", "phase", "block", "step_time_ms", "tokens_per_second"),
    "validation_loss": ("iteration", "validation_perplexity"),
    "test_loss": ("iteration", "test_perplexity"),
}


def is_metrics_file(path: str | Path) -> bool:
    """Return whether the first line of a file has figures of training or evaluation."""
    if not Path(path).is_file():  # a pipe would wait for its writer
        return False
    try:
        with open(path, encoding="utf-8") as file:
            return bool(_NUMBERS.keys() & json.loads(file.readline()).keys())
    except (OSError, ValueError, AttributeError):
        return False


def with_names(files: Sequence[str | Path]) -> list[str]:
    """Return NAME=FILE of each file. The name is that of the file or, if it is called metrics.jsonl, of its folder;
    equal names become paths."""
    paths = [Path(file).with_suffix("") for file in files]
    names = [(path.parent.name if path.name == "metrics" else "") or path.name for path in paths]
    names = [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]
    return [f"{name.replace('=', ' ')}={file}" for name, file in zip(names, files, strict=True)]


def read_run(argument: str) -> Run:
    """Read NAME=FILE. Raises ValueError that names the bad file and line."""
    name, _, path = argument.partition("=")
    if not (name.strip() and path):
        raise ValueError(f'--run {argument}: give NAME=FILE, such as --run "BCD=out/bcd.jsonl"')
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); give a file of --metrics-file") from None
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            lines += [_checked(json.loads(line))] if line.strip() else []
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: not from a metrics file ({error})") from None
    steps, validations, tests = (tuple(line for line in lines if kind in line) for kind in _NUMBERS)
    if not (steps or validations or tests):
        raise ValueError(f"{path}: has no line of training or evaluation")
    return Run(name=name.strip(), file=path, steps=steps, validations=validations, test=tests[-1] if tests else {})


def read_runs(arguments: Sequence[str]) -> list[Run]:
    """Read several runs. Raises ValueError if two have the same name."""
    runs = [read_run(argument) for argument in arguments]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"--run: two runs have the same name ({', '.join(names)}). Give different names.")
    return runs


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """Check a line, and restore the NaN and infinite values that it stores as null, so that diverged runs can be
    shown."""
    values |= {key: float(value) for key, value in values.pop("non_finite", {}).items()}
    for kind in _NUMBERS.keys() & values.keys():
        for key in (kind, *_NUMBERS[kind]):
            if not isinstance(values[key], int | float):
                raise TypeError(f"{key} is not a number")
    if "loss" in values and not (values["model_state_bytes"] and min(values["model_state_bytes"]) >= 0):
        raise ValueError("model_state_bytes is empty")
    values["switches"] = [(int(start), int(block)) for start, block in values.get("switches", ())]
    return values


Figures = dict[str, Any]
"""A run as --json writes it; None for what the run does not have. Memory and time are those of the last number of
ranks; model state is given by rank, as maximum over the phases and as mean over the blocks."""
RATIOS = ("step_time_ms", "tokens_per_second", "validation_loss", "validation_perplexity")


def typical_step_ms(steps: Sequence[dict[str, Any]]) -> float:
    """Return each block's median, averaged over all iterations, because step times differ between blocks.

    A line counts once per iteration that it covers: the log interval may have changed at a resumption.
    """
    medians = {
        block: statistics.median(step["step_time_ms"] for step in steps if step["block"] == block)
        for block in {step["block"] for step in steps}
    }
    spans = [after["iteration"] - before["iteration"] for before, after in pairwise(steps)]
    return statistics.fmean((medians[step["block"]] for step in steps), weights=[*(spans[:1] or [1]), *spans])


def run_figures(run: Run) -> Figures:
    """Return a run's row."""
    backwards = takewhile(lambda step: len(step["model_state_bytes"]) == run.num_ranks[-1], reversed(run.steps))
    steps = list(backwards)[::-1]  # only those on the last number of ranks are comparable
    by_block: dict[int, list[int]] = {}  # largest model state, by rank
    for step in steps:
        state = step["model_state_bytes"]
        by_block[step["block"]] = list(map(max, state, by_block.get(step["block"], state)))
    by_rank = list(zip(*by_block.values(), strict=True))
    validation = run.validations[-1] if run.validations else {}
    step_ms = typical_step_ms(steps) if steps else None
    tokens = [step["tokens_per_second"] * step["step_time_ms"] for step in steps]
    return {
        "run": run.name,
        "file": run.file,
        "iterations": max(line["iteration"] for line in (*run.steps, *run.validations, run.test) if line),
        "num_ranks": run.num_ranks,
        "validation_iteration": validation.get("iteration"),
        "model_state_bytes": tuple(map(max, by_rank)) if steps else None,
        "mean_model_state_bytes": tuple(map(statistics.fmean, by_rank)) if steps else None,
        "step_time_ms": step_ms,
        "tokens_per_second": statistics.median(tokens) / step_ms if step_ms else None,
        **{name: validation.get(name) for name in ("validation_loss", "validation_perplexity")},
        **{name: run.test.get(name) for name in ("test_loss", "test_perplexity")},
    }


def compare_figures(first: Figures, second: Figures) -> dict[str, Any]:
    """Return first / second for the figures that both have; model state by rank, if the numbers of ranks are equal."""

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if above is not None and below else None

    states = first["model_state_bytes"] or (), second["model_state_bytes"] or ()
    same_ranks = len(states[0]) == len(states[1])
    return {
        "model_state_bytes": list(map(ratio, *states)) if same_ranks and states[0] else None,
        **{name: ratio(first[name], second[name]) for name in RATIOS},
    }


def table_rows(figures: Sequence[Figures]) -> list[tuple[str, ...]]:
    """Return the cells of the table. With two runs, the last row has their ratios."""

    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    def by_rank(values: Sequence[float] | None, form: str, unit: str = "") -> str:
        if not values:
            return "-"
        if len(values) > NUM_RANKS_SHOWN:
            return f"at most {form.format(max(values))}{unit}"
        return ", ".join(form.format(value) for value in values) + unit

    forms = ("{:,.1f}", "{:,.0f}", "{:.4f}", "{:,.2f}")
    rows: list[tuple[str, ...]] = []
    for row in figures:
        cells = (cell(row[name], form) for name, form in zip(RATIOS, forms, strict=True))
        rows.append((row["run"], by_rank([n / MIB for n in row["model_state_bytes"] or ()], "{:,.1f}", " MiB"), *cells))
    if len(figures) == 2:
        ratios = compare_figures(*figures)
        label = f"{figures[0]['run']} / {figures[1]['run']}"
        cells = (cell(ratios[name], "{:.3f}") for name in RATIOS)
        rows.append((label, by_rank(ratios["model_state_bytes"], "{:.3f}"), *cells))
    return rows


def notes(figures: Sequence[Figures]) -> list[str]:
    """Return notes that help to compare the rows."""
    lines = []
    for row in figures:
        if len(row["num_ranks"]) > 1:
            ranks = ", then ".join(map(str, row["num_ranks"]))
            about = f"resumed on another number of ranks ({ranks}); state and time are those of the last"
            lines.append(f"{row['run']}: {about}")
    ends = {row["run"]: row["validation_iteration"] for row in figures if row["validation_iteration"] is not None}
    if len(set(ends.values())) > 1:
        places = ", ".join(f"{name} {iteration:,}" for name, iteration in ends.items())
        lines.append(f"validation is from different iterations: {places}")
    return lines


def as_json(figures: Sequence[Figures]) -> dict[str, Any]:
    """Return {"runs": [...], "ratios": {...} or null}; values that are not finite become null."""

    def nullable(values: dict[str, Any]) -> dict[str, Any]:
        return {key: None if value != value or value == math.inf else value for key, value in values.items()}

    ratios = nullable(compare_figures(*figures)) if len(figures) == 2 else None
    return {"runs": [nullable(row) for row in figures], "ratios": ratios}


def phase_bands(run: Run) -> list[tuple[float, float, int]]:
    """Return (start, end, block) of each phase in iterations, joining neighbours of the same block.

    A switch that no line records (older versions, interrupted runs) is put at the line before it.
    """
    starts: list[tuple[float, int]] = []
    before = run.steps[0]["iteration"] - 1
    for step in run.steps:
        for start, block in (*step["switches"], (before, step["block"])):
            if not starts or block != starts[-1][1]:
                starts.append((float(start), block))
        before = step["iteration"]
    ends = [*(start for start, _ in starts[1:]), float(before)]
    return [(start, end, block) for (start, block), end in zip(starts, ends, strict=True)]


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the centred mean over about 1/50 of the curve; the window shrinks at the ends, so nothing is shifted."""
    half = max(1, len(values) // 100)
    reaches = (min(half, index, len(values) - 1 - index) for index in range(len(values)))
    return [statistics.fmean(values[i - reach : i + reach + 1]) for i, reach in enumerate(reaches)]


def draw(path: str, kind: str, runs: Sequence[Run], figures: Sequence[Figures]) -> None:
    """Write the picture to `path`, a png with 1200 x 675 pixels. `kind` is the format, as `path` is a temporary
    name."""
    import matplotlib  # slow to import
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 6.75), dpi=100, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.04)  # type: ignore[union-attr]
        losses, model_state = figure.subplots(1, 2, width_ratios=(3.4, 1))
        _draw_losses(losses, loss_chart(runs))
        _draw_model_state(model_state, figures)
        figure.savefig(path, format=kind)


def finite(lines: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(line["iteration"], line[key]) for line in lines if math.isfinite(line[key])]
    return [x for x, _ in points], [y for _, y in points]


def loss_chart(runs: Sequence[Run]) -> View:
    """Return the arguments of `draw_chart` for training losses, validation losses, and phases of the first run with
    blocks."""
    curves, smooth = list[Any](), []
    for index, run in enumerate(runs):
        colour, (places, values) = index % len(RUN_COLOURS), finite(run.steps, "loss")
        smooth.append(smoothed(values))
        curves += [(run.name, colour, "thin", places, values), (run.name, colour, "line", places, smooth[-1])]
        curves.append((f"{run.name}, validation", colour, "dots", *finite(run.validations, "validation_loss")))
    phased = next((run for run in runs if len({step["block"] for step in run.steps}) > 1), None)
    limits = loss_limits(smooth)
    bands = phase_bands(phased) if phased else []
    hint = "thin: before smoothing; dots: validation" + "; initial losses cut off" * bool(limits)
    hint += f"; shade: active block of {phased.name}" if phased else ""
    bands = bands if len(bands) <= MAX_BANDS else []
    return {"title": "Loss", "hint": hint, "curves": curves, "limits": limits, "bands": bands}


def _draw_losses(axes: Any, chart: View) -> None:
    """Draw `loss_chart`. The legend names the runs and, if their tints differ, the blocks."""
    for name, colour, kind, places, values in chart["curves"]:
        label = name.replace("$", r"\$") if kind == "line" else None
        axes.plot(places, values, color=RUN_COLOURS[colour], label=label, **LINES[kind])
    unnamed = {block for *_, block in chart["bands"]}
    unnamed = unnamed if len(unnamed) <= len(BLOCK_TINTS) else set()
    for start, end, block in chart["bands"]:
        label = f"block {block} active" if block in unnamed else None
        unnamed.discard(block)
        axes.axvspan(start, end, color=BLOCK_TINTS[block % len(BLOCK_TINTS)], linewidth=0, zorder=0, label=label)
    axes.set(xlabel="iteration", ylabel="loss (nats per token)", ylim=chart["limits"])
    axes.margins(x=0)
    axes.set_title(f"{chart['title']}\n{chart['hint']}".replace("$", r"\$"), loc="left", fontsize=10, color=FAINT)
    axes.grid(axis="y", color="#b5b5b5", linewidth=0.6, alpha=0.5)
    axes.legend(loc="upper right")


def loss_limits(curves: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Return the vertical range without the first losses, from which the loss falls so far that all later steps would
    lie on one line: it ends a little above the loss after a twentieth of the run. None if there is nothing to cut."""
    settled = [value for curve in curves if len(curve) >= 40 for value in curve[len(curve) // 20 :]]
    if settled:
        low, high = min(settled), max(settled)
        top = high + 0.15 * (high - low)
        if top < max(max(curve) for curve in curves if curve):
            return low - 0.12 * (high - low), top
    return None


def _draw_model_state(axes: Any, figures: Sequence[Figures]) -> None:
    """Draw a bar per run: the model state of its largest rank."""
    sizes = [max(row["model_state_bytes"] or (0,)) / MIB for row in figures]
    colours = [RUN_COLOURS[index % len(RUN_COLOURS)] for index in range(len(sizes))]
    bars = axes.bar(range(len(sizes)), sizes, color=colours)
    axes.bar_label(bars, fmt="{:,.1f}", padding=2, fontsize=9, color=INK)
    axes.set_xticks([])
    axes.set_ylabel("MiB")
    axes.margins(y=0.1)
    axes.set_title("Model state\nlargest rank and phase", loc="left", fontsize=10, color=FAINT)
    axes.grid(axis="y", color="#b5b5b5", linewidth=0.6, alpha=0.5)


def report_view(runs: Sequence[Run], figures: Sequence[Figures]) -> View:
    """Return the charts and the table of a page."""
    speeds, memory = list[Any](), list[Any]()
    for index, run in enumerate(runs):
        name, colour = run.name, index % len(RUN_COLOURS)
        speeds.append((name, colour, "line", *finite(run.steps, "tokens_per_second")))
        for field, label, kind in (("peak_memory_bytes", "", "line"), ("model_state_bytes", ", state", "dashed")):
            most = {step["iteration"]: max(step[field]) / MIB for step in run.steps if step.get(field)}
            memory.append((name + label, colour, kind, [*most], [*most.values()]))
    charts = [
        draw_chart(**loss_chart(runs)),
        draw_chart("Tokens per second", "all ranks together", speeds, limits=(0, 0)),
        draw_chart("Memory, MiB", "peak; dashed: model state; on the rank with the most", memory, limits=(0, 0)),
    ]
    tests = [f"{row['run']}: test loss {row['test_loss']:.4f}" for row in figures if row["test_loss"] is not None]
    shown = {"names": [run.name for run in runs], "charts": [chart for chart in charts if chart]}
    return shown | {"columns": COLUMNS, "rows": table_rows(figures), "notes": notes(figures) + tests}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed flags. Raises ValueError for a bad flag."""
    parser = Parser(prog=PROG, description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="of --metrics-file; its name is the run's")
    parser.add_argument("--run", action="append", default=[], metavar="NAME=FILE", help="may be given several times")
    parser.add_argument("--figure", metavar="FILE", help="draw the loss curves (.png, .svg or .pdf)")
    parser.add_argument("--html", metavar="FILE", help="write the curves and the table as a page (docs/board.md)")
    add_json(parser)
    options = parser.parse_args(argv)
    options.run += with_names(options.files)
    if not options.run:
        raise ValueError("give FILE or --run NAME=FILE")
    if options.json and is_metrics_file(options.json):
        raise ValueError(f"--json {options.json}: is a metrics file. Give another, or --json after the files.")
    return options


def report(arguments: argparse.Namespace) -> None:
    """Read everything, then write. Raises ValueError for a user's mistake."""
    kind = os.path.splitext(arguments.figure or "loss.png")[1].lower()
    if kind not in FIGURE_FORMATS:
        raise ValueError(f"--figure {arguments.figure}: must end in {', '.join(FIGURE_FORMATS)}")
    check_writable(arguments.json, flag="--json")
    runs = read_runs(arguments.run)
    figures = [run_figures(run) for run in runs]
    text = "\n".join([table(COLUMNS, table_rows(figures)), *notes(figures)])
    if arguments.figure:
        write_atomically(arguments.figure, lambda name: draw(name, kind[1:], runs, figures), flag="--figure")
    if arguments.html:
        write_page(arguments.html, "watch", report_view(runs, figures))
    write_figures(arguments.json, as_json(figures), lambda: print(text))
    for path in filter(None, (arguments.figure, arguments.html)):
        if arguments.json != STDOUT:
            print(f"wrote {path}")


@command(PROG)
def main(argv: Sequence[str]) -> None:
    report(parse_arguments(argv))


if __name__ == "__main__":
    run_main(main)
