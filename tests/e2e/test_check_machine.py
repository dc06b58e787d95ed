"""tools/check_machine.py as a user starts it. unit/test_check_machine.py tests its verdicts with made-up runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def checked(root: Path, folder: Path, *words: str, failing: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Return the checks by part, on a machine where exactly these parts fail."""
    report = folder / "report.json"
    command = [sys.executable, "tools/check_machine.py", "--json", str(report), "--output", str(folder / "out"), *words]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == bool(failing), done.stdout + done.stderr
    results = {check["part"]: check for check in json.loads(report.read_text())["checks"]}
    assert tuple(part for part, check in results.items() if check["verdict"] == "FAIL") == failing
    assert all(f"FAIL {part}" in done.stderr and results[part]["remedy"] for part in failing)
    return results


def test_without_a_self_test(repo_root: Path, tmp_path: Path) -> None:
    """--no-self-test finds no fault of this machine, asks torch, and starts no run."""
    result = checked(repo_root, tmp_path, "--no-self-test", "--num-ranks", "1")
    assert result["torch"]["figures"]["torch"] and "start" not in result


def test_nothing_is_installed(repo_root: Path, tmp_path: Path) -> None:
    """The tool runs without any package, and reports those that are missing."""
    command = [sys.executable, "-S", "tools/check_machine.py", "--output", str(tmp_path)]  # without site-packages
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 1 and "FAIL package psutil" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_self_test(repo_root: Path, tmp_path: Path) -> None:
    """No part fails on a machine without a fault, and the measured rates are stored."""
    result = checked(repo_root, tmp_path, "--num-ranks", "2", "--calibrate")
    verdicts = {part: check["verdict"] for part, check in result.items()}
    after_start = [*verdicts][[*verdicts].index("start") :]
    left_out = [part for part in after_start if verdicts[part] == "SKIP"]
    assert len(left_out) == 1, left_out
    assert result["rates"]["figures"]["bf16_tflops"] > 0
    assert (tmp_path / "out" / "clusters.csv").read_text().splitlines()[-1].startswith("this-machine,")
