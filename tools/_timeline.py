"""Draw the computation and copies of one step (tools/plan.py --timeline) as a Chrome trace or a picture."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path

from _parser import write_atomically

from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.timeline import Span, step

FILLS = {"forward": "#0072b2", "head": "#5b5b5b", "backward": "#d55e00", "update": "#009e73"}
FILLS |= {"load": "#f2b84b", "write back": "#cc79a7"}
ROWS = {"load": "to the device", "write back": "to host memory"}
"""The streams of the copies."""
FLAG = "--timeline"


def write_timeline(path: str, recipe: Recipe) -> None:
    """Write the timeline of the middle block's phase. Raises ValueError for an unsupported file type or recipe."""
    kind = os.path.splitext(path)[1][1:].lower()
    if kind not in ("json", "png", "svg"):
        raise ValueError(f"{FLAG} {path}: must end in .json (a Chrome trace), .png or .svg")
    if not recipe.is_streamed or recipe.pipeline_size > 1:
        raise ValueError(f"{FLAG} shows copies: give --bcd-layers-on host, and one pipeline stage")
    spans = step(recipe, recipe.partition.num_blocks // 2)
    write_atomically(path, functools.partial(_trace if kind == "json" else _draw, spans, kind), flag=FLAG)


def _trace(spans: Sequence[Span], _: str, path: str) -> None:
    events = [
        {
            "ph": "X", "pid": 0, "tid": ROWS.get(span.kind, "computation"), "ts": 1e6 * span.start,
            "dur": 1e6 * (span.end - span.start), "cat": span.kind,
            "name": f"{span.kind}, piece {span.piece}",
        }
        for span in spans
    ]  # fmt: skip
    Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def _draw(spans: Sequence[Span], kind: str, path: str) -> None:
    from matplotlib.figure import Figure  # takes a second to import
    from matplotlib.patches import Patch

    figure = Figure(figsize=(13, 2.6), dpi=160, layout="constrained")
    axes = figure.subplots()
    rows = ["computation", *dict.fromkeys(ROWS[span.kind] for span in spans if span.kind in ROWS)]
    for span in spans:
        row = rows.index(ROWS.get(span.kind, rows[0]))
        axes.broken_barh([(span.start, span.end - span.start)], (row + 0.6, 0.8), facecolor=FILLS[span.kind],
                         edgecolor="white", linewidth=0.4)  # fmt: skip
    axes.set(ylim=(len(rows) + 0.5, 0.5), xlim=(0, None), xlabel="seconds")
    axes.set_yticks(range(1, len(rows) + 1), rows)
    axes.spines[["top", "right", "left"]].set_visible(False)
    kinds = {span.kind for span in spans}
    handles = [Patch(facecolor=fill, label=name) for name, fill in FILLS.items() if name in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, format=kind)
