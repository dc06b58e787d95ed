"""Damaged checkpoints, folders in use, runs that cannot continue: one clear line, the right exit code, nothing
overwritten.

Runs are forks of one process (`forked_runs`), on 1 and on 2 ranks. Faults while a checkpoint is written:
tests/distributed/test_save_faults.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.bad_input_cases import command_line, good_documents, write_dataset
from support.forked_runs import ForkedRuns, RankResult, assert_refused, digests, read_metrics, said

from megatron.bcd.checkpoint import layout
from megatron.bcd.runtime import dir_claim

SAVED = 3  # iterations, each with a checkpoint
FLAGS = ("--save", "saved", "--save-interval", "1", "--eval-iters", "0", "--bcd-steps-per-block", "2")
FLAGS = (*FLAGS, "--train-iters", str(SAVED + 1))
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def three(runs: ForkedRuns, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Workplaces with three checkpoints of the same run, by number of ranks."""
    places = {}
    for num_ranks in (1, 2):
        places[num_ranks] = tmp_path_factory.mktemp("three")
        write_dataset(places[num_ranks] / "data" / "text_document", good_documents())
        words = command_line(*FLAGS, "--exit-interval", str(SAVED), num_ranks=num_ranks)
        results = runs.run(words, folder=places[num_ranks], num_ranks=num_ranks)
        assert [rank.code for rank in results] == [0] * num_ranks, results
    return places


@pytest.fixture
def copied(three: dict[int, Path], tmp_path: Path) -> Callable[[int], Path]:
    """Copy the workplace for this number of ranks."""

    def copy(num_ranks: int) -> Path:
        return Path(shutil.copytree(three[num_ranks], tmp_path / "workplace"))

    return copy


def resume(runs: ForkedRuns, place: Path, num_ranks: int, *flags: str) -> list[RankResult]:
    words = command_line("--load", "saved", *FLAGS, *flags, num_ranks=num_ranks)
    return runs.run(words, folder=place, num_ranks=num_ranks)


def flip_a_bit(checkpoint: Path) -> None:
    shard = min(checkpoint.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


# what happens to the newest checkpoint, what the line must name, and the number of ranks; unit/test_checkpoint_files.py
# has more kinds of damage
DAMAGED: dict[str, tuple[Damage, str, int]] = {
    "flipped_bit": (flip_a_bit, ".distcp", 2),
    "missing_random_states": (
        lambda folder: (folder / "random_states_00001.safetensors").unlink(),
        "random_states_00001",
        2,
    ),
    "empty_folder": (lambda folder: [path.unlink() for path in folder.iterdir()], "checksums.json", 1),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_the_newest_is_damaged(
    runs: ForkedRuns, copied: Callable[[int], Path], three: dict[int, Path], name: str
) -> None:
    """A run names the damaged newest checkpoint, resumes from the one before, and makes the damaged one anew."""
    do, named, num_ranks = DAMAGED[name]
    place = copied(num_ranks)
    do(place / "saved" / f"iter_{SAVED:07d}")
    results = resume(runs, place, num_ranks)
    text = said(results)
    (warning,) = [line for line in text.splitlines() if "warning" in line and "saved/iter_0000003" in line]
    assert named in warning and "resuming from saved/iter_0000002" in text
    older, before = digests(place), digests(three[num_ranks])
    kept = [name for name in before if name.startswith(("saved/iter_0000001", "saved/iter_0000002", "data/"))]
    assert kept and [name for name in kept if older[name] != before[name]] == []
    # the damaged one was made anew by the same steps
    assert [layout.damage(str(path)) for path in sorted((place / "saved").glob("iter_*"))] == [None] * 4
    assert read_metrics(place)[:SAVED] == read_metrics(three[num_ranks])


def test_the_only_one_is_damaged(runs: ForkedRuns, copied: Callable[[int], Path]) -> None:
    """A run whose only checkpoint is damaged is refused, and changes no file."""
    place = copied(1)
    for iteration in range(1, SAVED):
        shutil.rmtree(place / "saved" / f"iter_{iteration:07d}")
    flip_a_bit(place / "saved" / f"iter_{SAVED:07d}")
    before = digests(place)
    assert_refused(resume(runs, place, 1), "--load saved", "saved/iter_0000003", ".distcp")
    assert digests(place) == before


def rewrite_state(checkpoint: Path, changes: dict[str, Any]) -> None:
    """Change run_state.json and its checksum."""
    path, checksums = checkpoint / "run_state.json", checkpoint / "checksums.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    records = json.loads(checksums.read_text())
    records["files"]["run_state.json"] = layout.file_digest(str(path))
    checksums.write_text(json.dumps(records))


@pytest.mark.parametrize(
    ("changes", "flags", "named"),
    [
        ({"format_version": 3}, (), ("run_state.json", "format version 3", "--finetune")),
        ({"phase": {"phase": -1}}, (), ("phase",)),
        ({}, ("--bf16",), ("--load saved", "--bf16")),
        ({}, ("--hidden-size", "64"), ("--load saved", "--hidden-size")),
    ],
)
def test_a_state_that_does_not_fit(
    runs: ForkedRuns,
    copied: Callable[[int], Path],
    changes: dict[str, Any],
    flags: tuple[str, ...],
    named: tuple[str, ...],
) -> None:
    """A checkpoint of another format, another model or an impossible phase is refused in one line, and no file
    changes."""
    place = copied(2)
    rewrite_state(place / "saved" / "iter_0000003", changes)
    before = digests(place)
    assert_refused(resume(runs, place, 2, *flags), *named)
    assert digests(place) == before


def test_two_jobs_in_one_folder(runs: ForkedRuns, copied: Callable[[int], Path]) -> None:
    """A second job in a --save folder is refused and changes no file until the first has ended. Here this process is
    the first job."""
    place = copied(2)
    unfinished = place / "saved" / "iter_0000007.incomplete"
    unfinished.mkdir()
    lock, _ = dir_claim.lock_folder(str(place / "saved"), flag="--save", contents="checkpoints")
    before = digests(place)
    assert_refused(resume(runs, place, 2), "--save saved", f"pid {os.getpid()} ")
    assert digests(place) == before
    lock.release()
    assert [rank.code for rank in resume(runs, place, 2)] == [0] * 2 and not unfinished.exists()
    assert all(path.name.startswith("iter_") or path.is_file() for path in (place / "saved").iterdir())


def test_a_run_that_blows_up(runs: ForkedRuns, copied: Callable[[int], Path]) -> None:
    """A run that blows up ends with exit code 1 and one line, which names the last checkpoint and the flags to
    change."""
    place = copied(2)
    flags = ("--lr", "1e30", "--lr-decay-style", "constant", "--train-iters", "50", "--max-skipped-steps", "4")
    results = resume(runs, place, 2, *flags)
    named = ("--max-skipped-steps", "saved/iter_00000", "--lr")
    assert_refused(results, *named, code=1)
    assert "Traceback" not in results[0].stdout
    newest = re.findall(r"(saved/iter_\d+)", results[0].stderr)[0]
    assert layout.damage(str(place / newest)) is None
