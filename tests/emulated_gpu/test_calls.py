"""How much a training step launches, copies and waits for, on an emulated GPU."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from count_calls import table


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in table()}


def test_a_step_waits_twice(rows: dict[str, dict[str, Any]]) -> None:
    """A read of a value per tensor, or a blocking copy: a GPU that idles while the CPU launches the next kernels."""
    assert {method: row["waits"] for method, row in rows.items()} == dict.fromkeys(rows, 2)


def test_launches_are_near_those_of_full_training(rows: dict[str, dict[str, Any]]) -> None:
    """Resting matrices that are updated one by one; a frozen layer whose weight gradients are computed."""
    assert rows["pretrain"]["calls"] <= 1.15 * rows["full"]["calls"]
    assert rows["finetune"]["calls"] < rows["paper"]["calls"] <= 0.85 * rows["full"]["calls"]


def test_the_committed_table_holds(rows: dict[str, dict[str, Any]], repo_root: Path) -> None:
    """A table that nobody has written since the step changed."""
    with open(repo_root / "docs" / "measurements" / "calls_of_a_step.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            assert rows[row["method"]]["calls"] == pytest.approx(int(row["calls"]), rel=0.02)
            assert [rows[row["method"]][name] for name in ("copies", "waits")] == [
                int(row["copies"]),
                int(row["waits"]),
            ]
