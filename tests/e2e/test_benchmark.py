"""tools/benchmark.py: its figures, from made-up metrics, and as a user starts it on a tiny model, with any times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import benchmark
import pytest
from _processes import CannotRun
from benchmark import Turn, build_methods, read_turn, table_rows

SMALL = ["--num-layers", "6", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "16"]


def methods(*words: str) -> list[benchmark.Method]:
    arguments, training_flags = benchmark.parse_arguments([*SMALL, *words])
    return build_methods(arguments, training_flags)


def line(phase: int, block: int, ms: float, **others: Any) -> dict[str, Any]:
    return {"phase": phase, "block": block, "step_time_ms": ms, "loss": 2.0, "tokens_per_second": 1e3 * 100 / ms,
            "model_state_bytes": [10 + block, 5], "peak_memory_bytes": [7, 9], **others}  # fmt: skip


def turn(*blocks: float) -> Turn:
    return read_turn([line(block, block, ms) for block, ms in enumerate(blocks) for _ in range(3)])


def test_first_steps_do_not_count() -> None:
    """The first two steps of a phase do not count, and the model state is that of the largest phase."""
    lines = [line(0, 0, ms) for ms in (900, 800, 10, 12, 11)]
    lines += [line(1, 1, ms, switch_time_ms=5.0) for ms in (70, 60, 20)]
    result = read_turn([*lines, {"validation_loss": 3.0}])
    assert result.step_ms == {"0": (10, 12, 11), "1": (20,)} and result.switch_ms == {"1": 5.0}
    assert result.iteration_ms == (11 + 20) / 2
    assert (result.model_state_bytes, result.peak_memory_bytes, result.tokens_per_step) == ((11, 5), (7, 9), 1e5)
    with pytest.raises(CannotRun):
        read_turn(lines[:2])


def test_ratios_are_those_within_the_rounds() -> None:
    """Ratios are taken within a round, so a slow round does not move them."""
    full, bcd = methods("--bcd-num-blocks", "2")
    slow = (1.0, 5.0, 3.0)
    turns = {"full": [turn(100 * f) for f in slow], "bcd": [turn(80 * f, 40 * f) for f in slow]}
    rows = table_rows([full, bcd], turns)
    assert [row["ratio"] for row in rows] == pytest.approx([1, 0.6])
    assert [row["arithmetic"] for row in rows] == pytest.approx([1, 0.75])
    assert [block["ratio"] for block in rows[1]["blocks"]] == pytest.approx([0.8, 0.4]) and not rows[0]["blocks"]
    assert [block["layers"] for block in rows[1]["blocks"]] == ["0-2, embedding", "3-5, final norm"]
    assert rows[1]["model_state_bytes"] == 16 and rows[1]["peak_memory_bytes"] == 9
    assert table_rows([full, bcd], {"bcd": turns["bcd"]})[0]["ratio"] is None, "full training could not be run"


LAYERS, HIDDEN, SEQUENCE, VOCABULARY = 3, 64, 16, 128
SIZES = (f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 2 --seq-length {SEQUENCE} "
         f"--vocab-size {VOCABULARY - 1} --rounds 1 --steps 1").split()  # fmt: skip


def measured(root: Path, folder: Path, *flags: str) -> dict[str, dict[str, Any]]:
    """Return the rows by method."""
    file = folder / "figures.json"
    command = [sys.executable, "tools/benchmark.py", *SIZES, *flags, "--json", str(file)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout and [path.name for path in folder.iterdir()] == ["figures.json"]
    figures = json.loads(file.read_text())
    assert set(figures["turns"]) == {row["method"] for row in figures["rows"]}
    return {row["method"]: row for row in figures["rows"]}


@pytest.mark.long
def test_with_peer(repo_root: Path, tmp_path: Path) -> None:
    """The peer trains the same blocks of the same model on the same samples, so that its loss is ours."""
    rows = measured(repo_root, tmp_path, "--methods", "bcd,badam")
    assert list(rows) == ["bcd", "badam"]
    assert rows["bcd"]["loss"] == pytest.approx(rows["badam"]["loss"], rel=1e-5)
    assert rows["bcd"]["model_state_bytes"] < rows["badam"]["model_state_bytes"], "it copies the active weights"
    assert all(row["step_ms"] > 0 and row["peak_memory_bytes"] > 2**20 for row in rows.values())
    assert [len(row["blocks"]) for row in rows.values()] == [3, 3]
