"""A resumed run keeps the schedule of the checkpoint: of its phases, and with --use-checkpoint-opt_param-scheduler."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from support.bad_input_cases import command_line, good_documents, write_dataset
from support.forked_runs import ForkedRuns


@pytest.mark.parametrize("keeps", [True, False])
def test_resumed_learning_rate(keeps: bool, runs: ForkedRuns, tmp_path: Path) -> None:
    """Would expose the flag being ignored, or the schedule of the checkpoint being taken without it."""
    write_dataset(tmp_path / "data" / "text_document", good_documents())
    constant = ("--lr-decay-style", "constant")
    (first,) = runs.run(command_line("--save", "saved", *constant), folder=tmp_path, num_ranks=1)
    assert first.code == 0, first.stderr
    again = ["--load", "saved", "--train-iters", "3", "--lr", "5e-4", "--lr-decay-style", "cosine", "--min-lr", "1e-5"]
    again += ["--use-checkpoint-opt_param-scheduler"] * keeps
    (second,) = runs.run(command_line(*again), folder=tmp_path, num_ranks=1)
    assert second.code == 0, second.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line][-2:]
    assert (rates == [1e-3, 1e-3]) == keeps
    assert ("--lr 0.0005 (was 0.001)" in second.stdout) != keeps
    assert keeps or max(rates) <= 5e-4


def test_resumed_phases(runs: ForkedRuns, tmp_path: Path) -> None:
    """Phases of another length after a resume with more steps, or a run shorter than a cycle that leaves blocks out."""
    write_dataset(tmp_path / "data" / "text_document", good_documents())
    run = ("--save", "saved", "--load", "saved", "--bcd-num-blocks", "2", "--train-iters")
    for num_steps in ("7", "14"):
        (done,) = runs.run(command_line(*run, num_steps), folder=tmp_path, num_ranks=1)
        assert done.code == 0, done.stderr
    assert "--bcd-steps-per-block" not in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    phases = Counter(line["phase"] for line in lines if "learning_rate" in line)
    assert [*phases.values()] == [2, 2, 2, 1] * 2
