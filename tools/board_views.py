"""The views of tools/board.py and of --html: a plan, and curves of runs, as HTML and SVG that need no script."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plan
import report
from _parser import check_writable, write_atomically

from megatron.bcd.planner.estimate import Estimate, make_estimate
from megatron.bcd.planner.measured import finding
from megatron.bcd.planner.memory import node_bytes
from megatron.bcd.planner.search import compare
from megatron.bcd.planner.tables import GIB

PAGE = Path(__file__).with_name("board_page")
MAX_POINTS = 400  # of a curve: more would be closer together than pixels
View = dict[str, Any]
"""The values of a template in board_page."""


def render(**values: Any) -> str:
    """Return the page as HTML."""
    try:
        import jinja2
    except ImportError:
        raise ValueError("the page needs jinja2. Install it with pip install jinja2.") from None
    engine = jinja2.Environment(loader=jinja2.FileSystemLoader(PAGE), autoescape=True, trim_blocks=True)
    return engine.get_template("page.html").render(**values)


def write_page(path: str, tab: str, view: View) -> None:
    """Write one static file that shows a view. Raises ValueError if it cannot be written."""
    check_writable(path, flag="--html")
    text = render(tab=tab, view=view, is_static=True)
    write_atomically(path, lambda name: Path(name).write_text(text, encoding="utf-8"), flag="--html")


def plan_view(arguments: argparse.Namespace) -> View:
    """Return the answer to a command line of tools/plan.py, and the methods side by side."""
    cost = {"tokens": arguments.tokens, "multiplier": arguments.bf_multiplier}
    values = vars(arguments) | {"search": False, "compare": False}
    estimate = make_estimate(plan.recipe_of(argparse.Namespace(**values)), **cost)
    every = argparse.Namespace(**values | {"compare": True, "method": None, "bcd_preset": None})
    try:
        estimates, reason = compare(plan.recipe_of(every), stages=every.pipeline_model_parallel_size, **cost), ""
    except ValueError as error:  # a flag that only the planned method has, or nothing fits
        estimates, reason = [], str(error)
    return {
        "estimate": estimate,
        "sentence": sentence(estimate, arguments),
        "quality": quality(estimate),
        "bars": bars(estimate),
        "figures": plan.show_figures(estimate),
        "methods": [(each, bars(each)[0], quality(each), node_bytes(each.recipe) / 1e9) for each in estimates],
        "plan": plan,
        "reason": reason,
        "command": plan.command_of(estimate) if estimate.fits else "",
        "remedies": [] if estimate.fits else plan.what_fits(argparse.Namespace(**values))[1],
    }


def sentence(estimate: Estimate, arguments: argparse.Namespace) -> str:
    """Return the answer in one sentence."""
    recipe, number, host = estimate.recipe, estimate.recipe.num_gpus, node_bytes(estimate.recipe)
    cards = f"{'one' if number == 1 else number} {recipe.cluster.gpu}{'s' * (number > 1)}"
    what, blocks = "every layer trained", recipe.partition.num_blocks
    if recipe.is_factored:
        what += " in every step"
    elif recipe.has_blocks and blocks > 1:
        what += f", one of {blocks} blocks at a time"
    if not estimate.fits:
        return f"{recipe.model.name}, {what}: does not fit {cards}."
    memory = f" and {host / 1e9:,.0f} GB of host memory" if host >= 1e9 else ""
    length = f"{plan.amount(estimate.cost.tokens)} tokens"
    length = "three epochs of Alpaca" if recipe.task == "sft" and arguments.tokens is None else length
    return (
        f"{recipe.model.name}: {what}, fits {cards}{memory}, {estimate.tokens_per_second:,.0f} tokens/s, "
        f"{plan.duration(estimate)} and {plan.price(estimate)} for {length}."
    )


def quality(estimate: Estimate) -> tuple[str, str]:
    """Return whether a method reaches full training's loss, or after how many iterations, and who measured it."""
    result, cost = finding(estimate.recipe), estimate.cost
    if cost.is_to_full_loss:
        return f"{cost.multiplier:.2f} x full training's iterations to its loss", cost.multiplier_source
    source = "; ".join(filter(None, (result.runs, result.model, result.source)))
    return f"full training's loss {plan.to_full(estimate, None)}", source if result.loss else ""


def bars(estimate: Estimate) -> list[View]:
    """Return the memory of the fullest GPU by place, and that of a node's host if it stores anything."""
    peak, recipe, cluster = estimate.peak, estimate.recipe, estimate.recipe.cluster
    moving = {"activations": peak.activations, "inputs of pieces": peak.pieces, "communication": peak.communication}
    if peak.optimizer_work > sum(moving.values()):
        moving = {"temporary memory of the optimizer": peak.optimizer_work}
    parts = {"weights": peak.weights, "gradients": peak.gradients, "optimizer": peak.optimizer, **moving}
    where = f", stage {peak.stage}, phase of block {peak.block}" * (len(estimate.ranks) > 1)
    shown = [_bar(f"{cluster.gpu}{where}", parts | {"framework": peak.framework}, GIB, cluster.memory_gib, "GiB")]
    own = recipe.gpus_per_node * estimate.host_bytes
    parts = {"layers, optimizer state, saved inputs": own, "more while saving": estimate.saving_bytes}
    return shown + ([_bar("Host memory of a node", parts, 1e9, recipe.host_memory_gb, "GB")] if own else [])


def _bar(name: str, parts: Mapping[str, float], size: float, limit: float | None, unit: str) -> View:
    total = sum(parts.values()) / size
    scale = 100 / max(total, limit or 0)
    sizes = [(label, number / size, scale * number / size) for label, number in parts.items()]
    text = f"{total:,.1f}{f' of {limit:,.4g}' if limit else ''} {unit}"
    return {"name": name, "text": text, "limit": scale * limit if limit else 100, "parts": sizes, "unit": unit}


def report_view(arguments: Sequence[str]) -> View:
    """Return charts and table of runs, each given as NAME=FILE. Raises ValueError for a bad file."""
    runs = report.read_runs(arguments)
    figures = [report.run_figures(run) for run in runs]
    losses, speeds, memory, smooth = list[Any](), list[Any](), list[Any](), []
    for index, run in enumerate(runs):
        name, colour = run.name, index % len(report.RUN_COLOURS)
        places, values = report.finite(run.steps, "loss")
        smooth.append(report.smoothed(values))
        losses += [(name, colour, "thin", places, values), (name, colour, "line", places, smooth[-1])]
        validations = report.finite(run.validations, "validation_loss")
        losses.append((f"{name}, validation", colour, "dots", *validations))
        speeds.append((name, colour, "line", *report.finite(run.steps, "tokens_per_second")))
        for field, label, kind in (("peak_memory_bytes", "", "line"), ("model_state_bytes", ", state", "dashed")):
            most = {step["iteration"]: max(step[field]) / report.MIB for step in run.steps if step.get(field)}
            memory.append((name + label, colour, kind, [*most], [*most.values()]))
    phased, limits = report.phased_run(runs), report.loss_limits(smooth)
    bands = report.phase_bands(phased) if phased else []
    hint = "thin: before smoothing; dots: validation" + "; initial losses cut off" * bool(limits)
    hint += f"; shade: active block of {phased.name}" if phased else ""
    charts = [
        _chart("Loss", hint, losses, limits=limits, bands=bands if len(bands) <= report.MAX_BANDS else []),
        _chart("Tokens per second", "all ranks together", speeds, limits=(0, 0)),
        _chart("Memory, MiB", "peak; dashed: model state; on the rank with the most", memory, limits=(0, 0)),
    ]
    tests = [f"{row['run']}: test loss {row['test_loss']:.4f}" for row in figures if row["test_loss"] is not None]
    table = {"columns": report.COLUMNS, "rows": report.table_rows(figures), "notes": report.notes(figures) + tests}
    return {"names": [run.name for run in runs], "charts": [chart for chart in charts if chart], **table}


def _chart(title: str, hint: str, curves: Sequence[Any], *, limits: Any, bands: Sequence[Any] = ()) -> View | None:
    """Return a chart of 1000 x 1000 units, which the page stretches; None without points.

    A curve is a name, the number of a colour, line, thin, dashed or dots, iterations and values. `limits` is the range
    of the vertical axis; (0, 0) makes it begin at 0.
    """
    every_x, every_y = [x for *_, xs, _ in curves for x in xs], [y for *_, ys in curves for y in ys]
    if not every_x:
        return None
    first, last, low, high = min(every_x) - 1, max(every_x), min(every_y), max(every_y)
    margin = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    low, high = limits if limits and limits[0] < limits[1] else (0.0 if limits else low - margin, high + margin)
    wide, tall, drawn, series = 1000 / (last - first), 1000 / (high - low), [], []
    for name, colour, kind, xs, ys in curves:
        points = [*zip(xs, ys, strict=True)]
        points = points[:: -(-len(points) // MAX_POINTS) or 1] + points[-1:]
        steps = [f"{wide * (x - first):.1f} {tall * (high - y):.1f}" for x, y in points]
        path = " ".join(f"M{step}h0" for step in steps) if kind == "dots" else f"M{'L'.join(steps)}" * bool(steps)
        drawn.append({"d": path, "kind": kind, "colour": colour})
        if kind != "thin":
            values = [(round(wide * (x - first) / 10, 1), x, f"{y:,.5g}") for x, y in points]
            series.append({"name": name, "colour": colour, "values": values})
    return {
        "title": title,
        "hint": hint,
        "curves": drawn,
        "data": json.dumps(series),
        "bands": [(wide * (start - first), wide * (end - start), block) for start, end, block in bands],
        "y": [(tall * (high - value) / 10, f"{value:,.6g}") for value in _ticks(low, high)],
        "x": [(wide * (value - first) / 10, f"{value:,.6g}") for value in _ticks(first, last)],
    }


def _ticks(low: float, high: float) -> list[float]:
    """Return three to six round numbers between low and high."""
    power = 10 ** math.floor(math.log10((high - low) / 2))
    step = next(times * power for times in (0.5, 1, 2, 5) if (high - low) / (times * power) <= 6)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
