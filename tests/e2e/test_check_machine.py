"""tools/check_machine.py as a user starts it. What it judges: unit/test_check_machine.py, with made-up runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import _check_walks
import pytest
from _check_runs import flags_of, read_run
from support.forked_runs import ForkedRuns

FIGURES = "tools/check_machine_figures.json"


def checked(root: Path, folder: Path, *words: str, failing: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """By part, of a machine on which these parts fail and no others."""
    report = folder / "report.json"
    command = [sys.executable, "tools/check_machine.py", "--json", str(report), "--output", str(folder / "out"), *words]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == bool(failing), done.stdout + done.stderr
    found = {check["part"]: check for check in json.loads(report.read_text())["checks"]}
    assert tuple(part for part, check in found.items() if check["verdict"] == "FAIL") == failing
    assert all(f"FAIL {part}" in done.stderr and found[part]["remedy"] for part in failing)
    return found


def test_what_is_found(repo_root: Path, tmp_path: Path) -> None:
    """A part of this machine that fails, or torch that the tool cannot ask."""
    found = checked(repo_root, tmp_path, "--no-self-test")
    assert found["torch"]["figures"]["torch"] and found["self-test"]["verdict"] == "SKIP"


def test_a_wrong_version(repo_root: Path, tmp_path: Path) -> None:
    """An installed package of another version that is not seen, or a self-test that is tried all the same."""
    (tmp_path / "megatron_core-0.15.3.dist-info").mkdir()
    (tmp_path / "megatron_core-0.15.3.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.15.3\n"
    )
    found = checked(repo_root, tmp_path, failing=("package megatron-core",))
    assert found["self-test"]["verdict"] == "SKIP" and "0.15.3" in found["package megatron-core"]["detail"]


@pytest.mark.parametrize("name", ["spread", "prefix_cache"])
def test_figures_are_of_today(repo_root: Path, tmp_path: Path, runs: ForkedRuns, name: str) -> None:
    """Committed figures that this commit does not meet, or flags that it does not know."""
    figures = json.loads((repo_root / FIGURES).read_text())
    place = figures["bcd"][name] if name in figures["bcd"] else figures[name]
    data = {"data_path": _check_walks.write(tmp_path), "micro_batch_size": 2}
    draw = {"train_iters": 1, "eval_iters": 0, "lr": 1e-30, "min_lr": 0, "lr_warmup_iters": 0, "bcd_num_blocks": 1}
    start = figures["flags"] | data | draw | {"save": tmp_path / "weights"}
    [drawn] = runs.run(flags_of(start), folder=tmp_path, num_ranks=1)
    assert drawn.code == 0, drawn.stderr
    files = {"load": tmp_path / "weights", "finetune": True, "metrics_file": tmp_path / "metrics.jsonl"}
    [done] = runs.run(flags_of(figures["flags"] | data | place["flags"] | files), folder=tmp_path, num_ranks=1)
    assert done.code == 0, done.stderr
    assert read_run(tmp_path / "metrics.jsonl").losses == pytest.approx(place["1"]["loss"], rel=1e-5)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_self_test(repo_root: Path, tmp_path: Path, num_ranks: int) -> None:
    """A part that fails on a machine without a fault."""
    found = checked(repo_root, tmp_path, "--num-ranks", str(num_ranks), "--calibrate")
    verdicts = {part: check["verdict"] for part, check in found.items()}
    left_out = {"offload"} | ({"tensor parallel", "link"} if num_ranks == 1 else set())
    assert {part for part in [*verdicts][[*verdicts].index("start") :] if verdicts[part] == "SKIP"} == left_out
    assert (tmp_path / "out" / "clusters.csv").read_text().splitlines()[-1].startswith("this-machine,")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_broken_parts(repo_root: Path, tmp_path: Path) -> None:
    """A corrupted figure or a slow link that does not fail the command, or fails another part."""
    figures = json.loads((repo_root / FIGURES).read_text())
    figures["bcd"]["submodel"]["2"]["loss"][-1] *= 1.01
    (tmp_path / "figures.json").write_text(json.dumps(figures))
    words = ["--num-ranks", "2", "--figures", str(tmp_path / "figures.json"), "--least-link-gb-per-s", "1e6"]
    only = ["--only", "layout strided", "layout submodel", "link"]
    found = checked(repo_root, tmp_path, *words, *only, failing=("layout submodel", "link"))
    assert found["layout strided"]["verdict"] == "PASS"
