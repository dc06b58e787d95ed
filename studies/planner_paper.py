"""Recompute the paper's tables 3 to 8 and 12 to 16 (arXiv 2506.12037), cell by cell (studies/planner_paper.md).

    python studies/planner_paper.py

Memory follows from the number of parameters; costs from the paper's own times, prices and B-F multipliers; times from
the planner's simulation with shares of the GPU that are fitted on G-1.6B and L-1.5B (tables 3, 4, 15, 16).

The paper does not state its batch. Its times grow with the model size and not with the model size per GPU, so one
microbatch passes through the pipeline at a time. Its length is assumed: one sequence of 1,024 tokens. Only the product
of tokens and achieved share can be observed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tools"))

from _parser import Parser, command, run_main, table

from megatron.bcd.planner.estimate import Estimate
from megatron.bcd.planner.recipe import Recipe, make_recipe
from megatron.bcd.planner.tables import GIB, Cluster, Model, read_rows, read_table


@dataclass(frozen=True, kw_only=True)
class Published:
    """A number published in the paper."""

    table: str
    row: str
    column: str
    value: str


ROOT = Path(__file__).resolve().parents[1]
FITTED_MODELS = ("G-1.6B", "L-1.5B")
AVERAGE_MULTIPLIER = 1.25
"""The multiplier behind the published averages; the paper's text says 1.39."""
COST_TOLERANCE = 0.6
"""Percentage points."""
FULL_GPU = {5: "RTX 4090", 6: "A100", 7: "A800", 12: "RTX 4090", 13: "A100", 14: "A800"}
GUESSED_SETTINGS = ("L-8.0B",)
_INCONSISTENT = (
    "the paper's inconsistency: its settings give 23.325, and the BCD memory of table 4 agrees with them; an FFN of "
    "about 5526 would give 24.632"
)
INCONSISTENT_MEMORY = ((4, "L-1.5B", "distributed_mem_gib"), (8, "L-1.5B", "mem_gib"))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of a table."""

    table: int
    row: str
    column: str
    published: float
    recomputed: float | None  # None for a setting
    note: str

    @property
    def difference(self) -> float | None:
        """The published number less the recomputed one."""
        return None if self.recomputed is None else round(self.published - self.recomputed, 6)


TimedRun = tuple[Recipe, float]
"""A run of the paper, and the published milliseconds of its iteration."""


class Paper:
    """The published numbers, and the tables that recompute them.

    ``cluster`` is the RTX 4090's row; its shares are fitted. Raises ValueError if a number or a model is missing.
    """

    def __init__(self, published: Sequence[Published], models: Mapping[str, Model], cluster: Cluster) -> None:
        self._published, self._models = published, models
        self._values = {(each.table, each.row, each.column): float(each.value) for each in published}
        shares, host = self.fitting_runs(cluster)
        self.cluster = fit_host(host, fit_shares(shares, cluster))
        """The nodes of RTX 4090s, with the fitted shares."""

    def figure(self, table: int | str, row: str, column: str) -> float:
        """Return a published number. Raises ValueError if it is missing."""
        value = self._values.get((str(table), row, column))
        if value is None:
            raise ValueError(f"the published figures lack table {table}, row {row}, column {column}")
        return value

    @cached_property
    def cells(self) -> list[Cell]:
        """All cells, in the order of the tables."""
        tables = [each for each in self._published if "." not in each.table]  # a section's name has a dot
        return [self._cell(int(each.table), each.row, each.column, float(each.value)) for each in tables]

    def mean_error(self, table: int) -> float:
        """Return the mean absolute relative error of a table's times that were not fitted."""
        seen = [cell for cell in self.cells if cell.column.endswith("_ms") and cell.row not in FITTED_MODELS]
        errors = [abs((cell.recomputed or 0) / cell.published - 1) for cell in seen if cell.table == table]
        return sum(errors) / len(errors)

    def _cell(self, table: int, row: str, column: str, published: float) -> Cell:
        recomputed: float | None = None
        note = "a setting: taken as given"
        if column.endswith("mem_gib"):
            recomputed, note = self._memory(table, row, column)
        elif column.endswith("_reduction_percent"):
            recomputed, note = self._reduction(table, row, column, published)
        elif column.endswith("_ms"):
            recomputed, note = self._time(table, row, column, published)
        rounded = None if recomputed is None else round(recomputed, 3)
        return Cell(table=table, row=row, column=column, published=published, recomputed=rounded, note=note)

    def _memory(self, table: int, row: str, column: str) -> tuple[float, str]:
        """Return the model state of the whole model in GiB: 16 bytes per parameter, 8 with a third active."""
        parameters = make_recipe(model=self._model(row), cluster=self.cluster, num_gpus=1).num_parameters
        if column == "bcd_mem_gib":
            gib, note = (4 * parameters + 12 * parameters / 3) / GIB, "4 + 12 / 3 bytes per parameter"
        else:
            gib = 16 * parameters / GIB
            note = "16 bytes per parameter"
        if row in GUESSED_SETTINGS:
            note += "; the paper has no settings of this model: 36 layers and FFN 12200 were chosen to fit"
        return gib, _INCONSISTENT if (table, row, column) in INCONSISTENT_MEMORY else note

    def _reduction(self, table: int, row: str, column: str, published: float) -> tuple[float, str]:
        """Return 100 (1 - k n_BCD t_BCD price / (n_full t_full price)). The GPU hours leave out the prices."""
        figure, gpu, is_cost = self.figure, FULL_GPU[table], table < 10
        is_worst = "worst" in column
        multiplier = figure("4.2.3", "B-F multiplier", "worst") if is_worst else AVERAGE_MULTIPLIER
        prices = [figure("4.4.1", name, "usd_per_gpu_hour") if is_cost else 1.0 for name in ("RTX 4090", gpu)]
        cost, full = self._bcd_gpu_ms(row) * prices[0] / prices[1], self._full_gpu_ms(table, row)
        recomputed = 100 * (1 - multiplier * cost / full)
        if abs(published - recomputed) <= COST_TOLERANCE:
            if is_worst:
                return recomputed, f"at the stated B-F multiplier {multiplier:g}"
            stated = figure("4.2.3", "B-F multiplier", "average")
            return recomputed, f"at {multiplier:g}; at the stated {stated:g} {100 * (1 - stated * cost / full):.1f}"
        if gpu != "RTX 4090":
            ratio = prices[0] / prices[1] * (100 - published) / (100 - recomputed)
            return recomputed, f"implies a price ratio of {ratio:.3f}; section 4.4.1 gives {prices[0] / prices[1]:.3f}"
        implied = f"{multiplier * cost / (1 - published / 100):,.0f} GPU-ms per full iteration"
        return recomputed, f"does not follow from the paper's times: implies {implied}, table 4 has {full:,.0f}"

    def _bcd_gpu_ms(self, row: str) -> float:
        """Return the GPU-milliseconds of a BCD iteration: table 15's if it has the model, otherwise table 4's."""
        gpus = self.figure(5, row, "bcd_nodes") * self.figure(5, row, "bcd_gpus_per_node")
        in_15 = self._values.get(("15", row, "unfrozen_1_3_iter_ms"))
        return gpus * (self.figure(4, row, "bcd_iter_ms") if in_15 is None else in_15)

    def _full_gpu_ms(self, table: int, row: str) -> float:
        """Return the GPU-milliseconds of an iteration of full training."""
        costs = table - 7 if table > 10 else table  # tables 12 to 14 are the GPU hours of 5 to 7
        nodes, per_node = self.figure(costs, row, "full_nodes"), self.figure(costs, row, "full_gpus_per_node")
        if FULL_GPU[table] != "RTX 4090":
            return nodes * per_node * self.figure("4.4.2", row, f"{FULL_GPU[table].lower()}_iter_ms")
        twice = f"{row} {nodes:g}x{per_node:g}"
        is_twice = ("4", twice, "distributed_iter_ms") in self._values
        return nodes * per_node * self.figure(4, twice if is_twice else row, "distributed_iter_ms")

    def _time(self, table: int, row: str, column: str, published: float) -> tuple[float, str]:
        recomputed = _iteration_ms(self._timed_run(table, row, column, self.cluster)[0])
        error = f"simulated, {100 * (recomputed / published - 1):+.0f} %"
        if row in FITTED_MODELS:
            return recomputed, f"{error}: one of the cells of the fit"
        guess = "; settings are a guess" if row in GUESSED_SETTINGS else ""
        return recomputed, f"{error}: predicted from the fit on {' and '.join(FITTED_MODELS)}{guess}"

    def _model(self, row: str) -> Model:
        name = row.split()[0]
        if name not in self._models:
            raise ValueError(f"the model table lacks {name}, which the paper's tables have")
        return self._models[name]

    def _timed_run(self, table: int, row: str, column: str, cluster: Cluster) -> TimedRun:
        """Return the run of this cell's time: all GPUs are one pipeline, in fp32, with one sequence."""
        method = {"distributed": "full", "offload": "offload"}.get(column.partition("_")[0], "bcd")
        num_blocks = 3
        if table == 4:
            side = "bcd" if method == "bcd" else "distributed"
            per_node = int(self.figure(4, row, f"{side}_gpus_per_node"))
            gpus = int(self.figure(4, row, f"{side}_nodes")) * per_node
        else:
            gpus = int(self.figure(table, row, "gpus_total"))
            if column.startswith("unfrozen_1_"):
                num_blocks = int(column.split("_")[2])
            per_node = min(gpus, 8)
        recipe = make_recipe(
            model=self._model(row),
            cluster=replace(cluster, gpus_per_node=per_node),
            num_gpus=gpus,
            pipeline_model_parallel_size=gpus,
            method=method,
            precision="fp32",
            bcd_num_blocks=num_blocks if method == "bcd" else None,
            global_batch_size=1,
            attention_backend="unfused",
        )
        return recipe, self.figure(table, row, column)

    def fitting_runs(self, cluster: Cluster) -> tuple[list[TimedRun], list[TimedRun]]:
        """Return the runs of the two fits: the fitted models in tables 4, 15 and 16, and with offload in table 3."""
        shares = []
        for row, fractions in zip(FITTED_MODELS, (15, 16), strict=True):
            shares.append(self._timed_run(4, row, "distributed_iter_ms", cluster))
            for fraction in (3, 4, 5):
                shares.append(self._timed_run(fractions, row, f"unfrozen_1_{fraction}_iter_ms", cluster))
        return shares, [self._timed_run(3, row, "offload_adam_iter_ms", cluster) for row in FITTED_MODELS]


def _iteration_ms(recipe: Recipe, **changes: Any) -> float:
    """Return the mean time over the blocks, with a changed cluster."""
    changed = replace(recipe, cluster=replace(recipe.cluster, **changes))
    return 1e3 * Estimate(recipe=changed).iteration_seconds


def fit_shares(runs: Sequence[TimedRun], cluster: Cluster) -> Cluster:
    """Return the cluster with the compute and memory shares that minimise the squared relative errors of these runs.

    With one microbatch the time is linear in the inverse of each share, so this is linear least squares.
    """
    idle = {"compute_share": 1.0, "memory_share": 1.0, "fp32_tflops": 1e12, "memory_gb_per_s": 1e15}
    compute, left = _slopes(runs, idle, {"fp32_tflops": cluster.fp32_tflops})
    memory, _ = _slopes(runs, idle, {"memory_gb_per_s": cluster.memory_gb_per_s})
    inverse, *_ = np.linalg.lstsq(np.column_stack([compute, memory]), left, rcond=None)
    return replace(cluster, compute_share=float(1 / inverse[0]), memory_share=float(1 / inverse[1]))


def fit_host(runs: Sequence[TimedRun], cluster: Cluster) -> Cluster:
    """Return the cluster with the host bandwidth that minimises the same errors for runs with method offload."""
    fitted = [(replace(recipe, cluster=cluster), ms) for recipe, ms in runs]
    host, left = _slopes(fitted, {"host_gb_per_s": 1e12}, {"host_gb_per_s": 1.0})
    return replace(cluster, host_gb_per_s=float(np.dot(host, host) / np.dot(host, left)))


def _slopes(
    runs: Sequence[TimedRun], idle: dict[str, float], used: dict[str, float]
) -> tuple[list[float], list[float]]:
    """Return the time that ``used`` adds to each run's time with ``idle``, and the rest, over the published time."""
    pairs = [(_iteration_ms(recipe, **idle), _iteration_ms(recipe, **idle | used), ms) for recipe, ms in runs]
    return [(more - base) / ms for base, more, ms in pairs], [1 - base / ms for base, _, ms in pairs]


def show_paper(paper: Paper) -> str:
    """Show every recomputed cell, and the fits."""
    rows, notes = [], ["note"]
    for cell in paper.cells:
        if cell.recomputed is not None and cell.difference is not None:
            figures = (f"{cell.published:.3f}", f"{cell.recomputed:.3f}", f"{cell.difference:+.3f}")
            rows.append((str(cell.table), cell.row, cell.column, *figures))
            notes.append(cell.note)
    columns = ("table", "row", "column", "published", "recomputed", "difference")
    body, cluster = table(columns, rows, num_left=3).splitlines(), paper.cluster
    errors = (f"table {number} {100 * paper.mean_error(number):.1f} %" for number in (4, 15, 16, 3))
    return "\n".join(
        [
            *(f"{line}  {note}" for line, note in zip(body, notes, strict=True)),
            "",
            f"difference: published less recomputed. {len(paper.cells) - len(rows)} other cells (layers, sizes, "
            "numbers of GPUs) are settings and were not recomputed.",
            f"times: fitted on {' and '.join(FITTED_MODELS)} alone (tables 4, 15, 16; 8 cells): share of the peak "
            f"{cluster.compute_share:.3f}, share of the memory bandwidth {cluster.memory_share:.3f}",
            f"offload: fitted on the same two models in table 3, {cluster.host_gb_per_s:.1f} GB/s through the host",
            f"mean absolute error of the times that were not fitted: {', '.join(errors)}",
        ]
    )


@command("studies/planner_paper.py")
def main(argv: list[str]) -> int:
    """Print the recomputed tables."""
    parser = Parser(prog="studies/planner_paper.py", description=__doc__)
    parser.parse_args(argv)
    published = read_rows(ROOT / "docs" / "paper_figures.csv", Published)
    clusters = read_table(ROOT / "examples" / "clusters.csv", Cluster)
    paper = Paper(published, read_table(ROOT / "examples" / "models.csv", Model), clusters["rtx4090"])
    print(show_paper(paper))
    return 0


if __name__ == "__main__":
    run_main(main)
