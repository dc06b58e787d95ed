"""What tools/plan.py prints for people."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.bcd.planner.command import torchrun_command
from megatron.bcd.planner.estimate import Plan
from megatron.bcd.planner.fit import FITTED_MODELS
from megatron.bcd.planner.memory import RankMemory
from megatron.bcd.planner.paper import Paper, mean_error
from megatron.bcd.planner.search import Found
from megatron.bcd.planner.tables import GIB

_MOST_ROWS = 12
"""Of the memory table: more ranks than that, and only those with the largest and the smallest peak are shown."""


def table(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Aligned columns; the first `left` ones to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def show_plan(plan: Plan) -> str:
    """Recipe, memory, time, bill, command."""
    return f"{show_figures(plan)}\n\ncommand ({_advice(plan)})\n{_command(plan)}"


def show_figures(plan: Plan) -> str:
    """Recipe, memory, time, bill."""
    parts = [
        _headline(plan),
        f"memory per rank, GiB (of {plan.recipe.cluster.memory_gib:g})\n{_memory(plan)}\n{_fit(plan)}",
        f"time of an iteration, ms\n{_time(plan)}",
        _bill(plan),
    ]
    return "\n\n".join(parts)


def _advice(plan: Plan) -> str:
    """What to know before the command is used."""
    needs = "needs a GPU; " if plan.recipe.method == "offload" else ""
    return f"{needs}made-up data: put yours in place of the last line"


def show_search(found: Found) -> str:
    """The cheapest layouts, and the cheapest one's plan."""
    rows = [("layout", "GiB", "iteration s", "tokens/s", "B-F multiplier", "days", "dollars")]
    for plan in found.best:
        rows.append(
            (
                _layout(plan),
                f"{plan.peak.total / GIB:.1f}",
                f"{plan.iteration_seconds:.2f}",
                f"{plan.tokens_per_second:,.0f}",
                f"{plan.bill.multiplier:.2f}",
                f"{plan.bill.days:,.1f}",
                f"{plan.bill.dollars:,.0f}",
            )
        )
    head = f"{found.num_tried} layouts tried, {found.num_fitting} fit; the cheapest"
    return f"{head}\n{table(rows)}\n\n{show_plan(found.best[0])}"


def show_paper(paper: Paper) -> str:
    """Every cell that was recomputed, and what was fitted."""
    cells = paper.cells()
    rows = [("table", "row", "column", "published", "recomputed", "difference", "note")]
    for cell in cells:
        if cell.recomputed is not None and cell.difference is not None:
            figures = (f"{cell.published:.3f}", f"{cell.recomputed:.3f}", f"{cell.difference:+.3f}")
            rows.append((str(cell.table), cell.row, cell.column, *figures, cell.note))
    body = table([row[:6] for row in rows], left=3).splitlines()
    lines = [f"{line.ljust(max(map(len, body)))}  {row[6]}" for line, row in zip(body, rows, strict=True)]
    settings = sum(cell.recomputed is None for cell in cells)
    cluster = paper.cluster
    lines += [
        "",
        "difference: published less recomputed. "
        f"{settings} further cells (layers, sizes, numbers of GPUs) are settings and were taken as given.",
        f"Times: fitted on {' and '.join(FITTED_MODELS)} alone (tables 4, 15, 16; 8 cells): share of the peak "
        f"{cluster.compute_share:.3f}, share of the memory bandwidth {cluster.memory_share:.3f};",
        f"offload: on the same two models in table 3, {cluster.host_gb_per_s:.1f} GB/s through the host.",
        "Mean absolute error of the times that no fit has seen: "
        + ", ".join(f"table {number} {100 * mean_error(cells, table=number):.1f} %" for number in (4, 15, 16, 3)),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _headline(plan: Plan) -> str:
    recipe = plan.recipe
    nodes = f"{recipe.num_nodes} node{'s' if recipe.num_nodes > 1 else ''} of {recipe.gpus_per_node}"
    return (
        f"{recipe.model.name}: {plan.parameters:,} parameters, {recipe.method}, on {recipe.num_gpus} x "
        f"{recipe.cluster.gpu} ({nodes})\n"
        f"{_layout(plan)}, {recipe.precision}, sequence {recipe.tokens:,}, global batch {recipe.global_batch_size} "
        f"({recipe.num_microbatches} microbatches)"
    )


def _layout(plan: Plan) -> str:
    recipe = plan.recipe
    blocks = recipe.partition.num_blocks
    parts = [f"pipeline {recipe.pipeline_size} x data {recipe.data_size}"]
    if recipe.method == "bcd":
        parts.append(f"{blocks} blocks ({recipe.layout})")
    parts.append(f"micro-batch {recipe.micro_batch_size}")
    if recipe.recompute != "none":
        parts.append("recomputation")
    return ", ".join(parts)


def _memory(plan: Plan) -> str:
    names = ("weights", "gradients", "optimizer", "activations", "optimizer_work", "communication", "framework")
    rows = [("stage", "block", *(name.replace("_", " ") for name in names), "peak")]
    for rank in _shown(plan.ranks):
        figures = [getattr(rank, name) for name in names]
        cells = (f"{figure / GIB:.2f}" for figure in (*figures, rank.total))
        rows.append((str(rank.stage), str(rank.block), *cells))
    return table(rows, left=0)


def _shown(ranks: Sequence[RankMemory]) -> Sequence[RankMemory]:
    if len(ranks) <= _MOST_ROWS:
        return ranks
    extremes = {id(rank) for rank in (max(ranks, key=_total), min(ranks, key=_total))}
    stages = {rank.stage for rank in ranks if id(rank) in extremes}
    return [rank for rank in ranks if rank.stage in stages]


def _total(rank: RankMemory) -> int:
    return rank.total


def _fit(plan: Plan) -> str:
    peak = plan.peak
    shown = _shown(plan.ranks)
    lines = []
    if len(shown) < len(plan.ranks):
        lines.append(f"the stages with the largest and the smallest peak, of {plan.recipe.pipeline_size}")
    lines.append("peak: the largest of activations with communication, and of the optimizer's work, beside the others")
    if plan.host_bytes:
        lines.append(f"on the host, per rank: {plan.host_bytes / GIB:.1f} GiB of weights, gradients and moments")
    largest = plan.largest_micro_batch
    where = f"stage {peak.stage} in the phase of block {peak.block}"
    if plan.fits:
        lines.append(f"fits: {peak.total / GIB:.1f} GiB on {where}; the largest micro-batch that fits is {largest}")
    else:
        lines.append(
            f"does NOT fit: {peak.total / GIB:.1f} GiB on {where}; "
            + (f"micro-batch {largest} would fit" if largest else "no micro-batch does: try --search, or more GPUs")
        )
    return "\n".join(lines)


def _time(plan: Plan) -> str:
    rows = [("block", "pipeline", "optimizer", "reductions", "total", "bubble")]
    for phase in plan.phases:
        seconds = (phase.pipeline, phase.optimizer, phase.reductions, phase.total)
        rows.append((str(phase.block), *(f"{1e3 * second:,.0f}" for second in seconds), f"{100 * phase.bubble:.0f} %"))
    rows.append(("mean", "", "", "", f"{1e3 * plan.iteration_seconds:,.0f}", f"{100 * plan.bubble:.0f} %"))
    speed = f"{plan.tokens_per_second:,.0f} tokens/s, MFU {100 * plan.mfu:.1f} % (arithmetic of full training)"
    return f"{table(rows)}\n{speed}"


def _bill(plan: Plan) -> str:
    bill, cluster = plan.bill, plan.recipe.cluster
    more = "" if bill.multiplier == 1 else f" x B-F multiplier {bill.multiplier:.2f}"
    return (
        f"{bill.tokens / 1e9:,.1f} G tokens{more}: {bill.iterations:,} iterations, {bill.days:,.1f} days, "
        f"{bill.gpu_hours:,.0f} GPU hours, ${bill.dollars:,.0f} (${cluster.usd_per_gpu_hour:g} per GPU hour)"
    )


def _command(plan: Plan) -> str:
    return torchrun_command(plan.recipe, iterations=plan.bill.iterations)
