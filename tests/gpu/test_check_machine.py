"""tools/check_machine.py, the first command on a machine with GPUs, on all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_check_machine(
    repo_root: Path, tmp_path: Path, pytestconfig: pytest.Config, num_gpus: int, num_ranks: int
) -> None:
    """No part of the check fails: losses as on the CPU, layouts, resuming, prefix cache and offload."""
    if num_ranks > num_gpus:
        pytest.skip(f"needs {num_ranks} CUDA GPUs, here are {num_gpus}")
    is_emulated = "BCD_EMULATED_GPU" in os.environ  # whose times mean nothing
    if is_emulated and not pytestconfig.getoption("--long"):
        pytest.skip("takes minutes on emulated GPUs; --long runs it")
    report = tmp_path / "report.json"
    words = ["--json", str(report), "--output", str(tmp_path / "out"), "--num-ranks", str(num_ranks)]
    command = [sys.executable, "tools/check_machine.py", *words, *([] if is_emulated else ["--calibrate"])]
    # no more emulated GPUs than cores, or check_machine reports too few cores
    environment = os.environ | ({"FAKEGPU_DEVICE_COUNT": str(num_ranks)} if is_emulated else {})
    done = subprocess.run(command, cwd=repo_root, env=environment, capture_output=True, text=True)
    failures = [check for check in json.loads(report.read_text())["checks"] if check["verdict"] == "FAIL"]
    assert done.returncode == 0 and failures == [], failures
