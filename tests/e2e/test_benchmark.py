"""tools/benchmark.py as a user starts it, on a tiny model. Times are not checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.long  # its figures: unit/test_benchmark.py
def test_with_peer(repo_root: Path, tmp_path: Path) -> None:
    """The peer trains the same blocks of the same model on the same samples, so that its loss is ours."""
    rows = measured(repo_root, tmp_path, "--methods", "bcd,badam")
    assert list(rows) == ["bcd", "badam"]
    assert rows["bcd"]["loss"] == pytest.approx(rows["badam"]["loss"], rel=1e-5)
    assert rows["bcd"]["model_state_bytes"] < rows["badam"]["model_state_bytes"], "it copies the active weights"
    assert all(row["step_ms"] > 0 and row["peak_memory_bytes"] > 2**20 for row in rows.values())
    assert [len(row["blocks"]) for row in rows.values()] == [3, 3]
