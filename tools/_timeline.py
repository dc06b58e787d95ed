"""Draw the computation and copies of one microbatch (tools/plan.py --timeline) as a Chrome trace or a picture."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path

from _parser import write_atomically

from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.timeline import Span, microbatch

FILLS = {"forward": "#0072b2", "backward": "#d55e00", "head": "#5b5b5b", "copy": "#f2b84b"}
FLAG = "--timeline"


def write_timeline(path: str, recipe: Recipe) -> None:
    """Write the timeline of the middle block's phase. Raises ValueError for an unsupported file type or recipe."""
    kind = os.path.splitext(path)[1][1:].lower()
    if kind not in ("json", "png", "svg"):
        raise ValueError(f"{FLAG} {path}: must end in .json (a Chrome trace), .png or .svg")
    if not recipe.is_streamed or recipe.pipeline_size > 1:
        raise ValueError(f"{FLAG} shows copies: give --bcd-layers-on host, and one pipeline stage")
    if recipe.config.is_breadth_first:
        raise ValueError(
            f"{FLAG} shows one microbatch after another: give --bcd-inactive-update none, without breadth-first"
        )
    spans = microbatch(recipe, recipe.partition.num_blocks // 2)
    write_atomically(path, functools.partial(_trace if kind == "json" else _draw, spans, kind), flag=FLAG)


def _trace(spans: Sequence[Span], _: str, path: str) -> None:
    events = [
        {
            "ph": "X", "pid": 0, "tid": "copies" if span.kind == "copy" else "computation", "ts": 1e6 * span.start,
            "dur": 1e6 * (span.end - span.start), "cat": span.kind,
            "name": span.kind if span.layer is None else f"{span.kind} of layer {span.layer}",
        }
        for span in spans
    ]  # fmt: skip
    Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def _draw(spans: Sequence[Span], kind: str, path: str) -> None:
    from matplotlib.figure import Figure  # takes a second to import
    from matplotlib.patches import Patch

    figure = Figure(figsize=(13, 2.2), dpi=160, layout="constrained")
    axes = figure.subplots()
    for span in spans:
        axes.broken_barh([(1e3 * span.start, 1e3 * (span.end - span.start))], (0.6 + (span.kind == "copy"), 0.8),
                         facecolor=FILLS[span.kind], edgecolor="white", linewidth=0.4)  # fmt: skip
    axes.set(ylim=(2.5, 0.5), xlim=(0, None), xlabel="milliseconds")
    axes.set_yticks((1, 2), ("computation", "copies"))
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [Patch(facecolor=fill, label=name) for name, fill in FILLS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, format=kind)
