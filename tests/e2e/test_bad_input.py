"""Bad input: one line that names the flag or file, exit code 2 of every rank, nothing written.

Most cases run in forks of one process (``tests/support/forked_runs.py``), on 1 and on 2 ranks; a few as a user would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import bad_input_cases as cases
from support.bad_input_cases import Case, command_line, good_documents, write_dataset
from support.forked_runs import CANNOT_MOUNT, ForkedRuns, assert_refused, digests, said


def with_ranks(tried: tuple[Case, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("case", "num_ranks"),
        [pytest.param(case, n, id=f"{case.name}, {n}".replace(" ", "_")) for case in tried for n in case.ranks],
    )


def test_the_good_run(runs: ForkedRuns, workplace: Path) -> None:
    """BASE itself runs in forks. Otherwise every test below would pass for nothing."""
    said(runs.run(command_line(num_ranks=2), folder=workplace, num_ranks=2))
    lines = [json.loads(line) for line in (workplace / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if "loss" in line] == [1]


def test_two_datasets_without_weights(runs: ForkedRuns, workplace: Path) -> None:
    """A blend without weights runs, though its validation and test splits, which the run never reads, are empty."""
    write_dataset(workplace / "data" / "other", good_documents())
    words = command_line("--data-path", "data/text_document", "data/other", "--split", "100,0,0", "--eval-iters", "0")
    (rank,) = runs.run(words, folder=workplace, num_ranks=1)
    assert rank.code == 0, rank.stderr


@pytest.mark.parametrize("seen_by", [0, 1])
def test_a_fault_that_one_rank_sees(seen_by: int, runs: ForkedRuns, tmp_path: Path) -> None:
    """A fault that one rank sees ends both ranks with exit code 2, and rank 0 prints it."""
    results = runs.run([str(seen_by)], script="support.one_rank_refuses", folder=tmp_path, num_ranks=2)
    told = f"one_rank_refuses.py: error: seen by rank {seen_by}\n"
    assert [(rank.code, rank.stderr) for rank in results] == [(2, told), (2, "")]


@with_ranks(cases.FLAG_CASES + cases.DATA_CASES + cases.SFT_CASES + cases.TOKENIZER_CASES + cases.OUTPUT_CASES)
def test_refused(case: Case, num_ranks: int, runs: ForkedRuns, workplace: Path) -> None:
    """Every rank refuses bad input with exit code 2, one line names it, and no file is written."""
    case.prepare(workplace)
    before = digests(workplace)
    read_only = workplace / case.read_only if case.read_only else None
    words = command_line(*case.flags, num_ranks=num_ranks)
    results = runs.run(words, folder=workplace, num_ranks=num_ranks, read_only=read_only)
    if all(rank.code == CANNOT_MOUNT for rank in results):
        pytest.skip("a read-only mount is not allowed here")
    assert_refused(results, *case.named)
    assert digests(workplace) == before and not any(rank.stdout for rank in results)


def test_the_launcher_ends_with_the_error(repo_root: Path, workplace: Path) -> None:
    """A mistake is one line, printed once: without torchrun's report, and with an exit code that says something."""
    write_dataset(workplace / "data" / "text_document", good_documents(largest=300))
    before = digests(workplace)
    launcher = [sys.executable, str(repo_root / "tools" / "launch.py"), "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(repo_root), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("OMP_NUM_THREADS", None)  # torchrun warns without it
    done = subprocess.run(
        [*launcher, str(repo_root / "pretrain_gpt_bcd.py"), *command_line(num_ranks=2)],
        cwd=workplace,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "token 300" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert (done.stdout, digests(workplace)) == ("", before)
