"""The number of launches, copies and waits of a training step, on an emulated GPU."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from count_calls import table

pytestmark = pytest.mark.timeout(900)  # a slow CPU takes minutes to start the table's processes


METHODS = ("full", "paper", "pretrain", "pretrain, breadth-first, layers on the host", "finetune")
"""Those whose calls are compared, and one with each kind of copy."""


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in table(METHODS)}


def test_a_step_waits_twice(rows: dict[str, dict[str, Any]]) -> None:
    """A step waits for the GPU twice, with each of these methods."""
    assert {method: row["waits"] for method, row in rows.items()} == dict.fromkeys(rows, 2)


def test_launches_are_near_those_of_full_training(rows: dict[str, dict[str, Any]]) -> None:
    """A step of `pretrain` has at most 15 % more calls than full training, one of `paper` at least 10 % fewer, and one
    of `finetune` fewer still."""
    assert rows["pretrain"]["calls"] <= 1.15 * rows["full"]["calls"]
    assert rows["finetune"]["calls"] < rows["paper"]["calls"] <= 0.9 * rows["full"]["calls"]


def test_the_committed_table_holds(rows: dict[str, dict[str, Any]], repo_root: Path) -> None:
    """The committed table has the calls of a step of these methods within 2 %, and its copies and waits."""
    with open(repo_root / "docs" / "measurements" / "calls_of_a_step.csv", encoding="utf-8", newline="") as file:
        for row in filter(lambda row: row["method"] in METHODS, csv.DictReader(file)):
            assert rows[row["method"]]["calls"] == pytest.approx(int(row["calls"]), rel=0.02)
            assert [rows[row["method"]][name] for name in ("copies", "waits")] == [
                int(row["copies"]),
                int(row["waits"]),
            ]
