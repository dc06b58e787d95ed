"""Text output of tools/plan.py."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.bcd.blocks.schedule import describe_steps, even_phases
from megatron.bcd.planner.command import torchrun_command
from megatron.bcd.planner.estimate import Estimate
from megatron.bcd.planner.fit import FITTED_MODELS
from megatron.bcd.planner.memory import RankMemory, recomputation
from megatron.bcd.planner.paper import Paper, mean_error
from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.search import SearchResult
from megatron.bcd.planner.tables import GIB, Cluster

_MOST_ROWS = 12
"""Rows of the memory table; with more ranks, only the stages with the largest and smallest peak are shown."""


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


def is_priced(cluster: Cluster) -> bool:
    """Whether the cluster table has a price: a calibrated row of an unknown GPU has 0."""
    return cluster.usd_per_gpu_hour > 0


def unit_of_price(cluster: Cluster) -> str:
    """What plans are ranked by."""
    return "dollars" if is_priced(cluster) else "GPU hours"


def without_price(cluster: Cluster) -> str:
    """Of a cluster that has no price."""
    return f"no price is known: usd_per_gpu_hour of {cluster.name} is 0 in the cluster table; ranked by GPU hours"


def show_estimate(estimate: Estimate, remedies: Sequence[Remedied] = ()) -> str:
    """Recipe, memory, time, cost; then the command, or if it does not fit, what does."""
    if not estimate.fits:
        return f"{show_figures(estimate)}\n\n{show_remedies(remedies)}"
    return f"{show_figures(estimate)}\n\ncommand ({_advice(estimate)})\n{_command(estimate)}"


@dataclass(frozen=True, kw_only=True)
class Remedied:
    """A change with which the plan fits."""

    names: tuple[str, ...]
    """Of the changed flags, as argparse has them."""
    flags: str
    """The changed ones."""
    command: str
    """Of the planner, for the changed plan."""
    estimate: Estimate

    @property
    def loss(self) -> list[str]:
        """What each changed flag costs in loss, as far as measured."""
        return [f"--{name.replace('_', '-')}: {LOSS_OF[name]}" for name in self.names if name in LOSS_OF]


_SAME = "the same loss, a longer step"
LOSS_OF = {
    "micro_batch_size": _SAME,
    "recompute": _SAME,
    "adam_moments_dtype": "0.1 and 2 % higher in two small models, full Adam; fine-tuning with four blocks the same",
    "precision": "not measured apart from other changes",
    "bcd_always_active": "the head is trained in the top block's phase only: not measured",
    "bcd_frozen": "a frozen head 5 and 6 % higher than an active one (two small models fine-tuned)",
    "bcd_num_blocks": "fine-tuning of 350 steps 1.1 % over full training with 2, 2.4 % with 6, 4.5 % with 30",
    "method": "side by side with --compare",
}
"""Of flags that let a plan fit: docs/fine_tuning.md, docs/learning.md."""


def show_remedies(remedies: Sequence[Remedied]) -> str:
    """What fits, a line each, and the planner's command of the first."""
    if not remedies:
        return "nothing fits on any number of these GPUs: take a smaller model or a GPU with more memory"
    rows = [("with", "GPUs", "PP x DP", "GiB", "tokens/s")]
    for each in remedies:
        recipe = each.estimate.recipe
        figures = (f"{each.estimate.peak.total / GIB:.1f}", f"{each.estimate.tokens_per_second:,.0f}")
        rows.append((each.flags, str(recipe.num_gpus), f"{recipe.pipeline_size} x {recipe.data_size}", *figures))
    loss = "\n".join(dict.fromkeys(line for each in remedies for line in each.loss))
    return f"what fits\n{table(rows)}\nloss\n{loss}\nplan the first with\n{remedies[0].command}"


def show_figures(estimate: Estimate) -> str:
    """Recipe, memory, time, cost."""
    parts = [
        _headline(estimate),
        f"memory per rank, GiB (of {estimate.recipe.cluster.memory_gib:g})\n{_memory(estimate)}\n{_fit(estimate)}",
        f"time of an iteration, ms\n{_time(estimate)}",
        _cost(estimate),
    ]
    return "\n\n".join(parts)


def _advice(estimate: Estimate) -> str:
    """Requirements of the printed command."""
    if estimate.recipe.task == "sft":
        return "put your own in place of MODEL_DIR, DATA.jsonl and OUT_DIR"
    needs = "needs a GPU; " if estimate.recipe.method == "offload" else ""
    return f"{needs}mock data: replace the last line by your own, and leave out -mock in --save and --load"


def show_search(found: SearchResult) -> str:
    """The cheapest layouts, and the cheapest one's estimate."""
    cluster = found.best[0].recipe.cluster
    unit = unit_of_price(cluster)
    rows = [("layout", "GiB", "iteration s", "tokens/s", "B-F multiplier", "days", unit)]
    for estimate in found.best:
        rows.append(
            (
                _layout(estimate),
                f"{estimate.peak.total / GIB:.1f}",
                f"{estimate.iteration_seconds:.2f}",
                f"{estimate.tokens_per_second:,.0f}",
                f"{estimate.cost.multiplier:.2f}",
                f"{estimate.cost.days:,.1f}",
                f"{estimate.cost.dollars if is_priced(cluster) else estimate.cost.gpu_hours:,.0f}",
            )
        )
    head = f"{found.num_tried} layouts tried, {found.num_fitting} fit; the cheapest"
    lines = [f"{head}\n{table(rows)}"]
    if not is_priced(cluster):
        lines.append(without_price(cluster))
    if found.best[0].recipe.method == "bcd":
        lines.append(LEARNING_NOTE)
    return "\n".join(lines) + f"\n\n{show_estimate(found.best[0])}"


LEARNING_NOTE = (
    "number of blocks, layout and chunks per block decide which layers learn together: they change what is learned,\n"
    "as the pipeline's size does except with interleaved. Recomputation and micro-batch change memory and speed only,\n"
    "and so does the cut with interleaved; with the others it moves layers between blocks"
)


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


def _headline(estimate: Estimate) -> str:
    recipe = estimate.recipe
    nodes = f"{recipe.num_nodes} node{'s' if recipe.num_nodes > 1 else ''} of {recipe.gpus_per_node}"
    settings = (
        f"{_layout(estimate)}, {recipe.precision}, sequence {recipe.tokens:,}, global batch {recipe.global_batch_size} "
        f"({recipe.num_microbatches} microbatches)"
    )
    return (
        f"{recipe.model.name}: {estimate.parameters:,} parameters, {recipe.method}, on {recipe.num_gpus} x "
        f"{recipe.cluster.gpu} ({nodes})\n{textwrap.fill(settings, 120)}"
    )


def _layout(estimate: Estimate) -> str:
    recipe = estimate.recipe
    blocks = recipe.partition.num_blocks
    context = f" x context {recipe.context_size}" if recipe.context_size > 1 else ""
    parts = [f"pipeline {recipe.pipeline_size}{context} x data {recipe.data_size}"]
    if recipe.has_blocks:
        parts.append(f"{blocks} block{'s' if blocks > 1 else ''} ({recipe.partition.layout})")
    if recipe.partition.num_chunks > 1:
        parts.append(f"{recipe.partition.num_chunks} chunks a stage")
    if recipe.cut == "auto":
        parts.append("cut by work")
    parts.append(f"micro-batch {recipe.micro_batch_size}")
    if recipe.recompute == "auto":
        parts.append(_recomputed(recipe))
    elif recipe.recompute != "none":
        parts.append("recomputation")
    return ", ".join(parts)


def _recomputed(recipe: Recipe) -> str:
    """What --recompute auto recomputes."""
    choices = recomputation(recipe)
    layers = [sum(sum(stage[block].layers) for stage in choices) for block in range(recipe.partition.num_blocks)]
    least, most = min(layers), max(layers)
    if most:
        number = str(most) if least == most else f"{least} to {most}"
        return f"recomputation of {number} layer{'s' * (most > 1)}"
    is_selective = any(choice.granularity == "selective" for stage in choices for choice in stage)
    return "recomputation of attention" if is_selective else "nothing recomputed"


def _memory(estimate: Estimate) -> str:
    names = ("weights", "gradients", "optimizer", "activations", "optimizer_work", "communication", "framework")
    rows = [("stage", "block", *(name.replace("_", " ") for name in names), "peak")]
    for rank in _shown(estimate.ranks):
        figures = [getattr(rank, name) for name in names]
        cells = (f"{figure / GIB:.2f}" for figure in (*figures, rank.total))
        rows.append((str(rank.stage), str(rank.block), *cells))
    return table(rows, left=0)


def _shown(ranks: Sequence[RankMemory]) -> Sequence[RankMemory]:
    if len(ranks) <= _MOST_ROWS:
        return ranks
    extremes = {id(rank) for rank in (max(ranks, key=_total), min(ranks, key=_total))}
    stages = {rank.stage for rank in ranks if id(rank) in extremes}
    shown = [rank for rank in ranks if rank.stage in stages]
    return shown if len(shown) <= _MOST_ROWS else [rank for rank in shown if id(rank) in extremes]


def _total(rank: RankMemory) -> int:
    return rank.total


def _fit(estimate: Estimate) -> str:
    peak = estimate.peak
    shown = _shown(estimate.ranks)
    lines = []
    if len(shown) < len(estimate.ranks):
        blocks = estimate.recipe.partition.num_blocks
        what = "phases" if len(shown) <= 2 and blocks > 2 else "stages"
        number = estimate.recipe.pipeline_size if what == "stages" else blocks
        lines.append(f"the {what} with the largest and the smallest peak, of {number}")
    lines.append("peak: model state and framework, and the larger of activations with communication and optimizer work")
    if estimate.host_bytes:
        if estimate.recipe.method == "offload":
            what = "weights, gradients and moments"
        elif estimate.recipe.is_muon:
            what = "momenta of resting blocks"
        else:
            what = "main parameters' low bits (none with --bcd-main-params drop)"
        lines.append(f"on the host, per rank: {estimate.host_bytes / GIB:.1f} GiB of {what}")
    largest = estimate.largest_micro_batch
    where = f"stage {peak.stage} in the phase of block {peak.block}"
    if estimate.fits:
        lines.append(f"fits: {peak.total / GIB:.1f} GiB on {where}; the largest micro-batch that fits is {largest}")
    else:
        lines.append(
            f"does NOT fit: {peak.total / GIB:.1f} GiB on {where}; "
            + (f"micro-batch {largest} would fit" if largest else "no micro-batch fits")
        )
    return "\n".join(lines)


def _time(estimate: Estimate) -> str:
    rows = [("block", "pipeline", "optimizer", "reductions", "total", "bubble")]
    phases = estimate.phases
    if len(phases) > _MOST_ROWS:
        phases = (phases[0], phases[len(phases) // 2], phases[-1])
    for phase in phases:
        seconds = (phase.pipeline, phase.optimizer, phase.reductions, phase.total)
        rows.append((str(phase.block), *(f"{1e3 * second:,.0f}" for second in seconds), f"{_percent(phase.bubble)} %"))
    rows.append(("mean", "", "", "", f"{1e3 * estimate.iteration_seconds:,.0f}", f"{_percent(estimate.bubble)} %"))
    speed = f"{estimate.tokens_per_second:,.0f} tokens/s, MFU {100 * estimate.mfu:.1f} % (arithmetic of full training)"
    if (share := estimate.orthogonalization_share) > 0:
        speed += f"; orthogonalisation is {100 * share:.1f} % of the time"
    return f"{table(rows)}\n{speed}"


def _percent(share: float) -> str:
    return f"{abs(round(100 * share)):d}"  # rounding errors may make it less than nothing


def _cost(estimate: Estimate) -> str:
    cost, cluster = estimate.cost, estimate.recipe.cluster
    more = phases = ""
    num_blocks, longest = estimate.recipe.partition.num_blocks, estimate.recipe.bcd.mean_steps
    if num_blocks > 1:
        phases = f", {describe_steps(even_phases(cost.iterations, num_blocks=num_blocks, longest=longest))}"
        more = f" x B-F multiplier {cost.multiplier:.2f} ({cost.multiplier_source})"
    tokens = f"{cost.tokens / 1e9:,.1f} G" if cost.tokens >= 1e9 else f"{cost.tokens / 1e6:,.1f} M"
    is_small = cost.gpu_hours < 100
    hours, dollars = f"{cost.gpu_hours:,.{is_small:d}f}", f"{cost.dollars:,.{2 * is_small:d}f}"
    days = f"{cost.days:,.1f} days" if cost.days >= 1 else f"{24 * cost.days:,.1f} hours"
    price = f"${dollars} (${cluster.usd_per_gpu_hour:g} per GPU hour)"
    if not is_priced(cluster):
        price = f"no price known (usd_per_gpu_hour of {cluster.name} is 0)"
    return f"{tokens} tokens{more}:\n{cost.iterations:,} iterations{phases}, {days}, {hours} GPU hours, {price}"


def _command(estimate: Estimate) -> str:
    return torchrun_command(estimate.recipe, iterations=estimate.cost.iterations)
