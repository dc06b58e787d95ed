"""BlockCoordinate under `accelerate launch` with clients that nobody here wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("trl")
accelerate_runs = pytest.importorskip("support.accelerate_runs")  # needs transformers


def test_trainer_and_trl_on_two_ranks(repo_root: Path, tmp_path: Path) -> None:
    """Ranks that drift apart, a loss or clipping of one rank's rows alone, a checkpoint that only rank 0 can resume."""
    words = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--main_process_port",
        "0",
    ]
    words += [str(repo_root / "tests" / "support" / "accelerate_runs.py"), str(tmp_path), "Trainer", "SFTTrainer"]
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(repo_root),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
    }
    done = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reference = accelerate_runs.run("Trainer", tmp_path / "alone")
    assert reference["world_size"] == 1
    for rank in range(2):
        for found in torch.load(tmp_path / f"rank_{rank}.pt").values():
            assert found["world_size"] == 2
            torch.testing.assert_close(found["weights"], reference["weights"], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(found["resumed"], found["weights"], rtol=0, atol=0)
            assert found["losses"] == pytest.approx(reference["losses"], rel=1e-4)
