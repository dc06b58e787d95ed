"""Memory of converting a model: that of its largest safetensors file, whatever the size of the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("layers", "hidden", "shard_bytes"),
    [(6, 512, 36_000_000), pytest.param(22, 2048, 1_000_000_000, marks=pytest.mark.long)],
)
def test_peak(repo_root: Path, tmp_path: Path, layers: int, hidden: int, shard_bytes: int) -> None:
    """The whole model in memory, a file kept mapped after its tensors are read, copies of a whole file."""
    command = [sys.executable, "tests/support/conversion_cost.py", str(tmp_path / "model"), "--layers", str(layers)]
    command += ["--hidden", str(hidden), "--shard-bytes", str(shard_bytes)]
    done = subprocess.run(
        command, cwd=repo_root, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert 2 * found["parameters"] > 2 * shard_bytes
    for direction in ("to_core", "back"):
        assert found[direction]["bytes"] <= 1.4 * found[direction]["file"], direction  # allocators keep some MB
