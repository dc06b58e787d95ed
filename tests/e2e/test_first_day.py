"""A newcomer's first day: each command works alone, and after the ones before it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from e2e import first_day
from support.forked_runs import ForkedRuns


def test_short_form(runs: ForkedRuns, tmp_path: Path) -> None:
    """A step of the first day that ends in a traceback or another exit code; or evaluates what the run did not."""
    first_day.write_book(tmp_path / "book.txt")
    train, metrics = shlex.split(first_day.TRAIN), shlex.split(first_day.METRICS)
    two = [*shlex.split(first_day.RESUME), "--train-iters", "8"]
    steps = [
        ("preprocess_data", 1, shlex.split(first_day.TOKENIZE)),
        ("pretrain_gpt_bcd", 1, [*train, *metrics, "--train-iters", "20", "--exit-interval", "4"]),
        ("pretrain_gpt_bcd", 2, [*train, *two]),
        ("pretrain_gpt_bcd", 1, [*train, *shlex.split(first_day.EVALUATE)]),
        ("report", 1, shlex.split(first_day.REPORT)),
        ("plan", 1, shlex.split(first_day.PLAN)),
    ]
    for script, num_ranks, argv in steps:
        for rank in runs.run(argv, folder=tmp_path, num_ranks=num_ranks, script=script):
            said = rank.stdout + rank.stderr
            assert rank.code == 0 and "Traceback" not in said, f"{script} {shlex.join(argv)}\n{said}"
    assert "at iteration 8" in first_day.check_evaluation(tmp_path)
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_day(repo_root: Path, tmp_path: Path) -> None:
    """What only real processes show: Ctrl-C, torchrun, imports, and what libraries print at the end."""
    command = [sys.executable, str(repo_root / "tests" / "e2e" / "first_day.py"), str(tmp_path / "day")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "signal SIGINT" in done.stdout and "The first day went well" in done.stdout
