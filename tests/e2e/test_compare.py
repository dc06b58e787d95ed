"""tools/compare.py as a user starts it, on a tiny model with its peer. What it times is not asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COLUMNS = "name,form,layers,hidden,heads,groups,ffn,vocabulary,sequence,source"


def compared(root: Path, folder: Path, row: str, *flags: str) -> dict[str, Any]:
    models = folder / "models.csv"
    models.write_text(f"{COLUMNS}\n{row}\n")
    command = [sys.executable, "tools/compare.py", "--models", str(models), "--model", row.split(",")[0]]
    command += ["--output", str(folder / "out"), "--rounds", "1", "--steps", "1", *flags]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["compare.json", "compare.png"]
    assert (folder / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "out" / "compare.json").read_text())


@pytest.mark.parametrize(
    "row, flags",
    [
        ("small-llama,llama,3,32,4,4,64,256,16,test", ("--methods", "offload,full,bcd")),
        # a GPT beside its peer is in test_study.py too
        pytest.param(
            "small-gpt,gpt,3,32,4,4,64,250,16,test",
            ("--methods", "bcd", "--global-batch-size", "8"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_with_peer(repo_root: Path, tmp_path: Path, row: str, flags: tuple[str, ...]) -> None:
    """A peer of another size, on other samples, or whose blocks are other layers: after nine steps its loss would be
    another one. Offload without a GPU must be said, and must not cost the others."""
    figures = compared(repo_root, tmp_path, row, "--peer", "badam", *flags)
    rows = {row["name"]: row for row in figures["rows"]}
    asked = [name for name in ("full", "bcd", "badam") if name in flags[1].split(",") or name == "badam"]
    assert list(rows) == asked
    assert figures["peer"]["trains_alike"] and figures["peer"]["loss_difference"] < 1e-5
    assert rows["bcd"]["loss"] == pytest.approx(rows["badam"]["loss"], rel=1e-5)
    planned = rows["bcd"]["planned"]["model_state_bytes"]
    assert rows["bcd"]["model_state_bytes"] == pytest.approx(planned, rel=0.01)
    assert rows["bcd"]["model_state_bytes"] < rows["badam"]["model_state_bytes"], "it copies the active weights"
    for row_figures in rows.values():
        assert row_figures["iteration_ms"] > 0 and row_figures["peak_memory_bytes"] > 2**20
    assert [len(turns) for turns in figures["turns"].values()] == [1] * len(asked)
    assert len(figures["turns"]["bcd"][0]["step_ms"]) == 3, "every block has had its turn"
    if "full" in rows:
        assert rows["bcd"]["model_state_bytes"] < rows["full"]["model_state_bytes"]
        assert rows["full"]["ratio_to_full"] == 1
        assert list(figures["not_run"]) == ["offload"]
