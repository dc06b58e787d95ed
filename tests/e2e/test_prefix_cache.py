"""The prefix cache as a user starts it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

from support.forked_runs import ForkedRuns

TRAINING = shlex.split("""--num-layers 3 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2
    --global-batch-size 4 --train-iters 8 --lr 1e-3 --hidden-dropout 0 --attention-dropout 0 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 1 --eval-iters 1 --eval-interval 8 --log-interval 1
    --bcd-steps-per-block 4 --bcd-order descending --bcd-sample-ratio 0.25 --bcd-num-blocks 3""")


def run(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=root, capture_output=True, text=True, timeout=240)


def test_training(repo_root: Path, tmp_path: Path) -> None:
    """A cache that is not used, not told of, or not in the metrics; a reader thread that keeps the process alive."""
    metrics, cache = tmp_path / "metrics.jsonl", tmp_path / "cache"
    files = ["--metrics-file", str(metrics), "--bcd-prefix-cache", str(cache)]
    done = run(repo_root, "pretrain_gpt_bcd.py", *TRAINING, *files)
    assert done.returncode == 0, done.stderr
    steps = [line for line in map(json.loads, metrics.read_text().splitlines()) if "loss" in line]
    assert [line["prefix_cache_hits"] for line in steps] == [4] * 8
    (file,) = cache.glob("prefix_*")
    assert steps[-1]["prefix_cache_bytes"] == file.stat().st_size > 8 * 16 * 32 * 4


def test_training_without_a_prefix(runs: ForkedRuns, tmp_path: Path) -> None:
    """A cache that is filled where no block can have one."""
    files = ["--bcd-prefix-cache", str(tmp_path), "--bcd-always-active", "norms"]
    (done,) = runs.run([*TRAINING, *files, "--train-iters", "1"], folder=tmp_path, num_ranks=1)
    assert done.code == 0, done.stderr
    assert not list(tmp_path.glob("prefix_*"))
