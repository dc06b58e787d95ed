"""The prefix cache as a user starts it: the training and the benchmark."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.forked_runs import ForkedRuns

TRAINING = shlex.split("""--num-layers 3 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2
    --global-batch-size 4 --train-iters 8 --lr 1e-3 --hidden-dropout 0 --attention-dropout 0 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 1 --eval-iters 1 --eval-interval 8 --log-interval 1
    --bcd-steps-per-block 4 --bcd-order descending --bcd-sample-ratio 0.25 --bcd-num-blocks 3""")
BENCHMARK = shlex.split("""tools/benchmark.py --prefix-cache
    --num-layers 6 --hidden-size 64 --num-attention-heads 2 --seq-length 16
    --vocab-size 127 --rounds 2 --steps 3""")


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


def test_benchmark(repo_root: Path, tmp_path: Path) -> None:
    """A bound of something else, a step that is not served, a cache that stays behind."""
    done = run(repo_root, *BENCHMARK, "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
    figures = json.loads((tmp_path / "figures.json").read_text())
    rows = figures["blocks"]
    assert [(row["block"], row["prefix_layers"]) for row in rows] == [(1, 2), (2, 4)]
    assert [row["bound"] for row in rows] == pytest.approx([5 / 6, 3 / 5])
    assert all(row["bytes_per_sample"] == 16 * 64 * 4 for row in rows)
    for turns in figures["turns"].values():
        assert [(turn["num_samples"], len(turn["computed_ms"]), len(turn["served_ms"])) for turn in turns] == [
            (4, 3, 3)
        ] * 2
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["block", "layers", "prefix"] and [line.split()[0] for line in lines[1:3]] == [
        "1",
        "2",
    ]


@pytest.mark.parametrize(
    "flags", [["--schedule"], ["--steps", "2"], ["--bcd-num-blocks", "1"], ["--bcd-sample-ratio", "0.5"]]
)
def test_benchmark_refuses(flags: list[str]) -> None:
    """Minutes of timing that mean nothing."""
    import benchmark

    base = [word for word in BENCHMARK[1:] if word not in ("--steps", "3")] + ["--micro-batch-size", "1"]
    with pytest.raises(ValueError):
        benchmark.parse([*base, *flags])
