"""Bad input: one line that names the flag or file, exit code 2 of every rank, nothing written.

Most cases run in forks of one process (``tests/support/forked_runs.py``), on 1 and on 2 ranks; a few as a user would.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import bad_input_cases as cases
from support.bad_input_cases import Case, command_line, good_documents, write_dataset
from support.forked_runs import CANNOT_MOUNT, ForkedRuns, assert_refused, digests, said

PROG = "pretrain_gpt_bcd.py"


def with_ranks(tried: tuple[Case, ...], *, long: int | None = None) -> pytest.MarkDecorator:
    """Parametrize with cases and numbers of ranks, of which `long` runs only with --long."""
    return pytest.mark.parametrize(
        ("case", "num_ranks"),
        [
            pytest.param(case, n, id=f"{case.name}, {n}".replace(" ", "_"), marks=[pytest.mark.long] * (n == long))
            for case in tried
            for n in case.ranks
        ],
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_good_run(num_ranks: int, runs: ForkedRuns, workplace: Path) -> None:
    """If BASE itself were refused, or forks did not work, every test below would pass for nothing."""
    said(runs.run(command_line(num_ranks=num_ranks), folder=workplace, num_ranks=num_ranks))
    lines = [json.loads(line) for line in (workplace / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if "loss" in line] == [1]


def test_two_datasets_without_weights(runs: ForkedRuns, workplace: Path) -> None:
    """A blend that is refused for the end of a split that the run never reads."""
    write_dataset(workplace / "data" / "other", good_documents())
    words = command_line("--data-path", "data/text_document", "data/other", "--split", "100,0,0", "--eval-iters", "0")
    (rank,) = runs.run(words, folder=workplace, num_ranks=1)
    assert rank.code == 0, rank.stderr


@pytest.mark.parametrize("seen_by", [0, 1])
def test_a_fault_that_one_rank_sees(seen_by: int, runs: ForkedRuns, tmp_path: Path) -> None:
    """The other rank waits in a barrier: it must neither hang nor be killed by torchrun, and rank 0 speaks."""
    results = runs.run([str(seen_by)], script="one_rank_refuses", folder=tmp_path, num_ranks=2)
    told = f"one_rank_refuses.py: error: seen by rank {seen_by}\n"
    assert [(rank.code, rank.stderr) for rank in results] == [(2, told), (2, "")]


@with_ranks(cases.FLAG_CASES + cases.DATA_CASES + cases.SFT_CASES + cases.TOKENIZER_CASES + cases.OUTPUT_CASES)
def test_refused(case: Case, num_ranks: int, runs: ForkedRuns, workplace: Path) -> None:
    """Only one rank checks a rule and leaves the others in a collective; a late check comes after writing, or after an
    hour of training; a library raises another error, or accepts damaged data."""
    case.prepare(workplace)
    before = digests(workplace)
    read_only = workplace / case.read_only if case.read_only else None
    words = command_line(*case.flags, num_ranks=num_ranks)
    results = runs.run(words, folder=workplace, num_ranks=num_ranks, read_only=read_only)
    if all(rank.code == CANNOT_MOUNT for rank in results):
        pytest.skip("a read-only mount is not allowed here")
    assert_refused(results, *case.named)
    assert digests(workplace) == before and not any(rank.stdout for rank in results)


@with_ranks(cases.REAL_CASES, long=2)
def test_as_a_user_runs_it(case: Case, num_ranks: int, repo_root: Path, workplace: Path) -> None:
    """Forks share one import: only a real start shows a library that writes a line, and torchrun's own report."""
    case.prepare(workplace)
    before = digests(workplace)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if num_ranks == 2 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(repo_root / PROG), *command_line(*case.flags, num_ranks=num_ranks)],
        cwd=workplace,
        env=os.environ | {"PYTHONPATH": str(repo_root), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    ours = [line for line in done.stderr.splitlines() if line.startswith(f"{PROG}: error: ")]
    assert len(ours) == 1 and all(name in ours[0] for name in case.named), done.stderr
    assert done.stdout == ""
    if num_ranks == 1:
        assert done.returncode == 2
        assert done.stderr.splitlines() == ours
    else:
        assert done.stderr.splitlines()[0] == ours[0], "torchrun's report follows ours, and nothing comes before"
        assert re.findall(r"exitcode +: (-?\d+)", done.stderr) == ["2"] * num_ranks, done.stderr
        assert done.stderr.count("Traceback (most recent call last)") == 1, "torchrun's own"
        assert done.stderr.splitlines()[-2].endswith(ours[0]), "a user sees the end of the report"
    assert digests(workplace) == before


def test_the_launcher_ends_with_the_error(repo_root: Path, workplace: Path) -> None:
    """An error above a page of torchrun's traceback, or an exit code that says nothing."""
    write_dataset(workplace / "data" / "text_document", good_documents(largest=300))
    launcher = [sys.executable, str(repo_root / "tools" / "launch.py"), "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(repo_root / PROG), *command_line(num_ranks=2)],
        cwd=workplace,
        env=os.environ | {"PYTHONPATH": str(repo_root), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = done.stderr.splitlines()
    assert (done.returncode, lines[-1]) == (2, lines[0]) and "token 300" in lines[0], done.stderr
    assert "Traceback" not in done.stderr
