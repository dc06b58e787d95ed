"""The number of launches, copies and waits of a training step, on an emulated GPU."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from count_calls import table

from megatron.bcd.optim.matrix import MatrixRule
from megatron.bcd.optim.matrix_optimizer import MatrixOptimizer
from megatron.bcd.optim.update_rules import MatrixLayout
from megatron.bcd.planner import state

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
    """A step of `pretrain` has at most 15 % more calls than full training, one of `paper` at least 15 % fewer, and one
    of `finetune` fewer still."""
    assert rows["pretrain"]["calls"] <= 1.15 * rows["full"]["calls"]
    assert rows["finetune"]["calls"] < rows["paper"]["calls"] <= 0.85 * rows["full"]["calls"]


def test_the_committed_table_holds(rows: dict[str, dict[str, Any]], repo_root: Path) -> None:
    """The committed table has the calls of a step of these methods within 2 %, and its copies and waits."""
    with open(repo_root / "docs" / "measurements" / "calls_of_a_step.csv", encoding="utf-8", newline="") as file:
        for row in filter(lambda row: row["method"] in METHODS, csv.DictReader(file)):
            assert rows[row["method"]]["calls"] == pytest.approx(int(row["calls"]), rel=0.02)
            assert [rows[row["method"]][name] for name in ("copies", "waits")] == [
                int(row["copies"]),
                int(row["waits"]),
            ]


class _OneRank:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@pytest.mark.parametrize(("name", "momentum"), [("orthogonal", None), ("orthogonal", 0.95), ("factored", None)])
@pytest.mark.parametrize(
    ("number", "shape", "parts"), [(1, (1024, 256), ()), (4, (512, 512), ()), (1, (768, 256), (64, 64, 64))]
)
def test_planned_work_memory(
    number: int, shape: tuple[int, int], parts: tuple[int, ...], name: str, momentum: float
) -> None:
    """An update in bf16 takes the planned temporary memory, within 6 %."""
    stack = {
        f"matrix {index}": (
            torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=torch.bfloat16)),
            MatrixLayout(parts=parts),
        )
        for index in range(number)
    }
    optimizer = MatrixOptimizer(stack, group=_OneRank(), momentum_dtype=torch.bfloat16, max_norm=1.0)
    rule = MatrixRule(name=name, scale=0.2, grad_dtype=torch.bfloat16, num_steps=5, momentum=momentum)
    optimizer.begin([(rule, list(stack), False)])
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step(norm=2.0)
    taken = (torch.cuda.max_memory_allocated() - before) / (number * shape[0] * shape[1])
    by_form = state._WORKING_BYTES[name]
    expected = by_form[2 if parts else number > 1]
    # a single matrix is not copied, even if it has parts
    assert taken == pytest.approx(by_form[0] if (name, number) == ("factored", 1) else expected, rel=0.06)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_planned_work_memory_of_adam(dtype: str) -> None:
    """Adam's update of a bf16 matrix takes at most the temporary memory that is planned."""
    shape = (1024, 256)
    weight = torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=torch.bfloat16))
    optimizer = MatrixOptimizer({"matrix": (weight, MatrixLayout())}, group=_OneRank(), max_norm=1.0)
    adam = {"betas": (0.9, 0.99), "eps": 1e-8, "dtype": dtype, "decoupled_weight_decay": True}
    rule = MatrixRule(name="adam", grad_dtype=torch.float32, is_by_piece=False, adam=adam)
    optimizer.begin([(rule, ["matrix"], True)])
    optimizer.step(norm=2.0)  # fills the tables of low_bit_adam
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step(norm=2.0)
    assert torch.cuda.max_memory_allocated() - before <= state.MATRIX_WORK * shape[0] * shape[1] + 2**12
