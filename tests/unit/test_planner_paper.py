"""planner.paper and planner.fit: the paper's tables, recomputed."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.bcd.planner.fit import FITTED_MODELS, fit_host, fit_shares, iteration_ms
from megatron.bcd.planner.paper import Cell, Figures, Paper, fitting_runs, mean_error, recompute_paper
from megatron.bcd.planner.tables import read_clusters, read_models, read_published

TABLES = (3, 4, 5, 6, 7, 8, 12, 13, 14, 15, 16)
# 100 (1 - k n_BCD t_BCD price / (n_full t_full price)) from the paper's own times at k = 2.77 and 1.25, by hand
REDUCTIONS = {
    (5, "G-1.6B"): (9.0, 58.9),
    (5, "G-5.4B"): (13.3, 60.9),
    (5, "G-10B"): (-2.8, 53.6),
    (5, "G-20B"): (21.7, 64.7),
    (6, "G-1.6B"): (76.2, 89.3),
    (6, "G-5.4B"): (45.1, 75.2),
    (6, "G-10B"): (44.0, 74.7),
    (6, "G-20B"): (57.0, 80.6),
    (7, "G-1.6B"): (60.7, 82.3),
    (7, "G-5.4B"): (9.8, 59.3),
    (7, "G-10B"): (7.0, 58.0),
    (7, "G-20B"): (28.4, 67.7),
    (12, "G-1.6B"): (9.0, 58.9),
    (12, "G-5.4B"): (13.3, 60.9),
    (12, "G-10B"): (-2.8, 53.6),
    (12, "G-20B"): (21.7, 64.7),
    (13, "G-1.6B"): (1.5, 55.5),
    (13, "G-5.4B"): (-127.2, -2.5),
    (13, "G-10B"): (-131.7, -4.6),
    (13, "G-20B"): (-78.0, 19.7),
    (14, "G-1.6B"): (6.6, 57.8),
    (14, "G-5.4B"): (-114.5, 3.2),
    (14, "G-10B"): (-121.4, 0.1),
    (14, "G-20B"): (-70.4, 23.1),
}
DO_NOT_FOLLOW = {(5, "G-1.6B"), (5, "G-5.4B"), (5, "G-20B"), (12, "G-1.6B"), (12, "G-20B")}


@pytest.fixture(scope="module")
def paper() -> Paper:
    root = Path(__file__).resolve().parents[2]
    return recompute_paper(
        read_published(root / "docs" / "paper_figures.csv"),
        read_models(root / "examples" / "models.csv"),
        read_clusters(root / "examples" / "clusters.csv")["rtx4090"],
    )


@pytest.fixture(scope="module")
def cells(paper: Paper) -> list[Cell]:
    return paper.cells()


def test_every_table_is_there(cells: list[Cell]) -> None:
    """A table or a row that is left out."""
    assert tuple(sorted({cell.table for cell in cells})) == TABLES
    assert len({cell.row for cell in cells if cell.table == 4}) == 10
    assert len({cell.row for cell in cells if cell.table == 8}) == 8


def test_published_figures_are_the_papers(paper: Paper, shared_data: Path) -> None:
    """A figure that was copied wrongly."""
    for table in TABLES:
        (path,) = (shared_data.parent / "paper").glob(f"table{table:02}_*.csv")
        rows = list(csv.DictReader(path.read_text().splitlines()))
        for row in rows:
            name = row.pop("model")
            if table == 4 and name == "G-10B":
                name += f" {row['distributed_nodes']}x{row['distributed_gpus_per_node']}"
            for column, value in row.items():
                if value and not column.endswith("gpu_type"):
                    assert paper.figures(table, name, column) == float(value)


def test_memory(cells: list[Cell]) -> None:
    """A parameter formula that misses a table, a bias or the head; the one cell of the paper that fits none."""
    memory = [cell for cell in cells if cell.column.endswith("mem_gib")]
    assert len(memory) == 2 * 10 + 8
    for cell in memory:
        assert cell.difference is not None
        if cell.row == "L-1.5B" and cell.column in ("mem_gib", "distributed_mem_gib"):
            assert cell.difference == pytest.approx(1.307, abs=0.001)
        else:
            assert abs(cell.difference) <= 0.02, cell


def test_reductions(cells: list[Cell]) -> None:
    """Another multiplier, price or number of GPUs than the paper's."""
    found = {(cell.table, cell.row, cell.column): cell for cell in cells if "reduction" in cell.column}
    assert len(found) == 48
    for (table, row, column), cell in found.items():
        worst, average = REDUCTIONS[table, row]
        assert cell.recomputed == pytest.approx(worst if "worst" in column else average, abs=0.06)
        assert abs(cell.difference or 0) <= 0.6 or (table, row) in {*DO_NOT_FOLLOW, (6, "G-1.6B")}


def test_times_are_predicted(cells: list[Cell]) -> None:
    """A simulation that is off by more than is claimed."""
    times = [cell for cell in cells if cell.is_simulated]
    assert len(times) == 2 * 6 + 2 * 10 + 3 * 3 + 3 * 3
    assert mean_error(cells) < 0.20


def test_only_two_models_are_fitted(paper: Paper) -> None:
    """A fit that other models change."""
    others = Figures(
        [each for each in paper.figures.all if each.row in FITTED_MODELS or "." in each.table],
    )
    shares, host = fitting_runs(others, paper.models, paper.cluster)
    assert {run.recipe.model.name for run in (*shares, *host)} == set(FITTED_MODELS)
    assert len(shares) == 8
    again = fit_host(host, fit_shares(shares, paper.cluster))
    assert again.compute_share == pytest.approx(paper.cluster.compute_share)
    assert again.memory_share == pytest.approx(paper.cluster.memory_share)


def test_fit_is_the_smallest_error(paper: Paper) -> None:
    """A fit that stops beside the minimum."""
    shares, _ = fitting_runs(paper.figures, paper.models, paper.cluster)

    def error(compute: float, memory: float) -> float:
        cluster = replace(paper.cluster, compute_share=compute, memory_share=memory)
        times = (iteration_ms(replace(run.recipe, cluster=cluster)) / run.ms for run in shares)
        return sum((time - 1) ** 2 for time in times)

    compute, memory = paper.cluster.compute_share, paper.cluster.memory_share
    best = error(compute, memory)
    for factor in (0.97, 1.03):
        assert error(compute * factor, memory) > best
        assert error(compute, memory * factor) > best


def test_the_cluster_table_has_the_fit(paper: Paper) -> None:
    """Shares in the table that no fit gives."""
    table = read_clusters(Path(__file__).resolve().parents[2] / "examples" / "clusters.csv")["rtx4090"]
    assert table.compute_share == pytest.approx(paper.cluster.compute_share, abs=0.005)
    assert table.memory_share == pytest.approx(paper.cluster.memory_share, abs=0.005)
    assert table.host_gb_per_s == pytest.approx(paper.cluster.host_gb_per_s, abs=0.5)
