"""The page of tools/board.py and of --html, with bars and charts as HTML and SVG that need no script."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _parser import check_writable, write_atomically

from megatron.bcd.planner.estimate import Estimate
from megatron.bcd.planner.memory import host_bytes, saving_bytes
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


def bars(estimate: Estimate) -> list[View]:
    """Return the memory of the fullest GPU by place, and that of a node's host if it stores anything."""
    peak, recipe, cluster = estimate.peak, estimate.recipe, estimate.recipe.cluster
    moving = {"activations": peak.activations, "waiting for backward": peak.chunks, "communication": peak.communication}
    if peak.optimizer_work > sum(moving.values()):
        moving = {"temporary memory of the optimizer": peak.optimizer_work}
    parts = {"weights": peak.weights, "gradients": peak.gradients, "optimizer": peak.optimizer, **moving}
    where = f", stage {peak.stage}{estimate.peak_phase}" * (len(estimate.ranks) > 1)
    shown = [_bar(f"{cluster.gpu}{where}", parts | {"framework": peak.framework}, GIB, cluster.memory_gib, "GiB")]
    own = recipe.gpus_per_node * host_bytes(recipe)
    parts = {"layers, optimizer state, saved inputs": own, "more while saving": saving_bytes(recipe)}
    return shown + ([_bar("Host memory of a node", parts, 1e9, recipe.host_memory_gb, "GB")] if own else [])


def _bar(name: str, parts: Mapping[str, float], size: float, limit: float | None, unit: str) -> View:
    total = sum(parts.values()) / size
    scale = 100 / max(total, limit or 0)
    sizes = [(label, number / size, scale * number / size) for label, number in parts.items()]
    text = f"{total:,.1f}{f' of {limit:,.4g}' if limit else ''} {unit}"
    return {"name": name, "text": text, "limit": scale * limit if limit else 100, "parts": sizes, "unit": unit}


def draw_chart(title: str, hint: str, curves: Sequence[Any], *, limits: Any, bands: Sequence[Any] = ()) -> View | None:
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
