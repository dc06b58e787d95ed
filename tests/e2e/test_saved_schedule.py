"""--use-checkpoint-opt_param-scheduler: a resumed run keeps the schedule of the checkpoint."""

from __future__ import annotations

import json
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
