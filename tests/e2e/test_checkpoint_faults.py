"""Damaged checkpoints, folders in use, runs that can't go on: one clear line, the right exit code, nothing overwritten.

Runs are forks of one process (`forked_runs`), on 1 and on 2 ranks. Faults while a checkpoint is written:
tests/distributed/test_save_faults.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.bad_input_cases import command_line, good_documents, write_dataset
from support.forked_runs import ForkedRuns, RankResult

from megatron.bcd.checkpoint import layout
from megatron.bcd.runtime import dir_claim

SAVED = 3  # iterations, each with a checkpoint
FLAGS = ("--save", "saved", "--save-interval", "1", "--eval-iters", "0", "--bcd-steps-per-block", "2")
FLAGS = (*FLAGS, "--train-iters", str(SAVED + 1))
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def three(runs: ForkedRuns, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By number of ranks a workplace with three checkpoints of the same run."""
    places = {}
    for num_ranks in (1, 2):
        places[num_ranks] = tmp_path_factory.mktemp("three")
        write_dataset(places[num_ranks] / "data" / "text_document", good_documents())
        words = command_line(*FLAGS, "--exit-interval", str(SAVED), num_ranks=num_ranks)
        results = runs.run(words, folder=places[num_ranks], num_ranks=num_ranks)
        assert [rank.code for rank in results] == [0] * num_ranks, results
    return places


@pytest.fixture
def workplace(three: dict[int, Path], tmp_path: Path) -> Callable[[int], Path]:
    """A copy of those of so many ranks."""

    def copy(num_ranks: int) -> Path:
        return Path(shutil.copytree(three[num_ranks], tmp_path / "workplace"))

    return copy


def resume(runs: ForkedRuns, place: Path, num_ranks: int, *flags: str) -> list[RankResult]:
    words = command_line("--load", "saved", *FLAGS, *flags, num_ranks=num_ranks)
    return runs.run(words, folder=place, num_ranks=num_ranks)


def digests(place: Path) -> dict[str, str]:
    """Of every file below `place` but the lock."""
    return {
        str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in place.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def assert_refused(results: list[RankResult], *named: str, code: int = 2) -> None:
    """Every rank ended with `code`, and rank 0 alone said one line, with all of `named` in it."""
    told = "\n".join(f"rank {i}: {rank.code}\n{rank.stdout}{rank.stderr}" for i, rank in enumerate(results))
    assert [rank.code for rank in results] == [code] * len(results), told
    assert [rank.stderr for rank in results[1:]] == [""] * (len(results) - 1), told
    (line,) = results[0].stderr.splitlines()
    assert [name for name in named if name not in line] == [], line


def shard(checkpoint: Path) -> Path:
    return min(checkpoint.glob("*.distcp"))


def truncate_shard(checkpoint: Path) -> None:
    os.truncate(shard(checkpoint), shard(checkpoint).stat().st_size - 100)


def flip_a_bit(checkpoint: Path) -> None:
    content = bytearray(shard(checkpoint).read_bytes())
    content[len(content) // 2] ^= 1
    shard(checkpoint).write_bytes(content)


def damage_run_state(checkpoint: Path) -> None:
    path = checkpoint / "run_state.json"
    path.write_text(path.read_text().replace('"iteration": ', '"iteration": 1'))


@dataclass(frozen=True, kw_only=True)
class Case:
    """What happens to a checkpoint, and what the line must name."""

    do: Damage
    named: tuple[str, ...]
    num_ranks: int


CASES = {
    "truncated shard": Case(do=truncate_shard, named=(".distcp",), num_ranks=1),
    "flipped bit": Case(do=flip_a_bit, named=(".distcp",), num_ranks=2),
    "missing shard": Case(do=lambda one: shard(one).unlink(), named=(".distcp",), num_ranks=1),
    "missing index": Case(do=lambda one: (one / ".metadata").unlink(), named=(".metadata",), num_ranks=2),
    "damaged state": Case(do=damage_run_state, named=("run_state.json",), num_ranks=1),
    "missing random states": Case(
        do=lambda one: (one / "random_states_00001.safetensors").unlink(),
        named=("random_states_00001.safetensors",),
        num_ranks=2,
    ),
    "missing checksums": Case(
        do=lambda one: (one / "checksums.json").unlink(), named=("checksums.json",), num_ranks=1
    ),
    "damaged checksums": Case(
        do=lambda one: (one / "checksums.json").write_text("{"), named=("checksums.json",), num_ranks=2
    ),
    "empty folder": Case(
        do=lambda one: [path.unlink() for path in one.iterdir()], named=("checksums.json",), num_ranks=1
    ),
}  # fmt: skip


def by_case(*default: str) -> pytest.MarkDecorator:
    """These cases, and with --long the others."""
    cases = [
        pytest.param(case, id=name.replace(" ", "_"), marks=[] if name in default else [pytest.mark.long])
        for name, case in CASES.items()
    ]
    return pytest.mark.parametrize("case", cases)


@by_case("flipped bit", "missing shard", "damaged checksums", "empty folder")
def test_the_newest_is_damaged(
    runs: ForkedRuns, workplace: Callable[[int], Path], three: dict[int, Path], case: Case
) -> None:
    """A run that takes what is left of the newest, that gives up with two good ones there, or that does not say."""
    place = workplace(case.num_ranks)
    newest = place / "saved" / f"iter_{SAVED:07d}"
    case.do(newest)
    results = resume(runs, place, case.num_ranks)
    assert [(rank.code, rank.stderr) for rank in results] == [(0, "")] * case.num_ranks
    said = results[0].stdout
    (warning,) = [line for line in said.splitlines() if "warning" in line and "saved/iter_0000003" in line]
    assert [name for name in case.named if name not in warning] == [], warning
    assert "resuming from saved/iter_0000002" in said
    older, before = digests(place), digests(three[case.num_ranks])
    kept = [name for name in before if name.startswith(("saved/iter_0000001", "saved/iter_0000002", "data/"))]
    assert kept and [name for name in kept if older[name] != before[name]] == []
    # the damaged one was made anew by the same steps
    assert [layout.damage(str(path)) for path in sorted((place / "saved").glob("iter_*"))] == [None] * 4
    assert metrics(place)[:SAVED] == metrics(three[case.num_ranks])


@by_case("truncated shard", "missing index", "damaged state")
def test_the_only_one_is_damaged(runs: ForkedRuns, workplace: Callable[[int], Path], case: Case) -> None:
    """A run that starts afresh where a checkpoint is, and overwrites what could perhaps be repaired."""
    place = workplace(case.num_ranks)
    for iteration in range(1, SAVED):
        shutil.rmtree(place / "saved" / f"iter_{iteration:07d}")
    case.do(place / "saved" / f"iter_{SAVED:07d}")
    before = digests(place)
    assert_refused(resume(runs, place, case.num_ranks), "--load saved", "saved/iter_0000003", *case.named)
    assert digests(place) == before


def rewrite_state(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change run_state.json, and its checksum with it."""
    path, checksums = checkpoint / "run_state.json", checkpoint / "checksums.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))
    records = json.loads(checksums.read_text())
    records["files"]["run_state.json"] = layout.file_digest(str(path))
    checksums.write_text(json.dumps(records))


@pytest.mark.parametrize("version", [1, 3])
def test_another_format(runs: ForkedRuns, workplace: Callable[[int], Path], version: int) -> None:
    """A state that is read as if it were known, or an older checkpoint taken without a word."""
    place = workplace(2)
    rewrite_state(place / "saved" / "iter_0000003", lambda state: state.update(format_version=version))
    before = digests(place)
    assert_refused(
        resume(runs, place, 2), "saved/iter_0000003/run_state.json", f"format version {version}", "--finetune"
    )
    assert digests(place) == before


@pytest.mark.parametrize("change", [lambda state: state.pop("phase"), lambda state: state.update(phase={"phase": -1})])
def test_a_state_that_is_whole_and_wrong(runs: ForkedRuns, workplace: Callable[[int], Path], change: Any) -> None:
    """A traceback out of the middle of the start."""
    place = workplace(1)
    rewrite_state(place / "saved" / "iter_0000003", change)
    before = digests(place)
    assert_refused(resume(runs, place, 1), "phase")
    assert digests(place) == before


OTHER_MODELS = {
    ("--hidden-size", "64"): ("--hidden-size",),
    ("--num-layers", "8"): ("--num-layers",),
    ("--bf16",): ("--bf16",),
    ("--swiglu",): ("--swiglu",),
}


@pytest.mark.parametrize("flags", OTHER_MODELS, ids=lambda flags: flags[0][2:])
def test_another_models_checkpoint(runs: ForkedRuns, workplace: Callable[[int], Path], flags: tuple[str, ...]) -> None:
    """A size that does not fit would be told as a tensor's name and two lists, other things not at all."""
    place = workplace(1)
    before = digests(place)
    assert_refused(resume(runs, place, 1, *flags), "--load saved", *OTHER_MODELS[flags])
    assert digests(place) == before


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_two_jobs_in_one_folder(runs: ForkedRuns, workplace: Callable[[int], Path], num_ranks: int) -> None:
    """Two jobs that delete each other's unfinished checkpoints; here this process is the first job."""
    place = workplace(num_ranks)
    lock, _ = dir_claim.lock_folder(str(place / "saved"), flag="--save", contents="checkpoints")
    before = digests(place)
    assert_refused(resume(runs, place, num_ranks), "--save saved", f"pid {os.getpid()} ")
    assert digests(place) == before
    lock.release()
    assert [rank.code for rank in resume(runs, place, num_ranks)] == [0] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_that_blows_up(runs: ForkedRuns, workplace: Callable[[int], Path], num_ranks: int) -> None:
    """A traceback in place of advice, another exit code, or a run that turns on the spot till its time is over."""
    place = workplace(num_ranks)
    flags = ("--lr", "1e30", "--lr-decay-style", "constant", "--train-iters", "50", "--max-skipped-steps", "4")
    results = resume(runs, place, num_ranks, *flags)
    named = ("--max-skipped-steps", "saved/iter_00000", "--lr")
    assert_refused(results, *named, code=1)
    assert "Traceback" not in results[0].stdout
    newest = re.findall(r"(saved/iter_\d+)", results[0].stderr)[0]
    assert layout.damage(str(place / newest)) is None


def metrics(place: Path) -> list[dict[str, Any]]:
    """Lines of the metrics file, without what differs from machine to machine."""
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    names = ("iteration", "consumed_samples", "loss", "grad_norm", "learning_rate", "block", "phase", "validation_loss")
    return [{name: line[name] for name in names if name in line} for line in lines]


GROUPED = ("--group-query-attention", "--num-query-groups", "2", "--ffn-hidden-size", "88", "--bcd-num-blocks", "3")


@pytest.mark.parametrize(("form", "network"), [("gpt", ()), ("llama", GROUPED)], ids=["gpt", "llama"])
def test_the_metrics_file_goes_on(runs: ForkedRuns, tmp_path: Path, form: str, network: tuple[str, ...]) -> None:
    """Lines that are there twice, or are missing, after a run that was lost behind its last checkpoint."""
    script = f"pretrain_{form}_bcd"
    write_dataset(tmp_path / "data" / "text_document", good_documents())
    flags = ("--save", "saved", "--load", "saved", "--save-interval", "2", "--bcd-steps-per-block", "3")
    flags = (*flags, "--train-iters", "8", "--eval-interval", "3", "--eval-iters", "1", *network)
    words = command_line(*flags, num_ranks=2)
    results = runs.run(words, folder=tmp_path, num_ranks=2, script=script)
    assert [rank.code for rank in results] == [0, 0]
    whole = metrics(tmp_path)
    assert [line["iteration"] for line in whole if "loss" in line] == [*range(1, 9)]
    assert [line["iteration"] for line in whole if "validation_loss" in line] == [3, 6, 8]
    (tmp_path / "saved" / layout.TRACKER).write_text("4")  # the run was killed after iteration 8, before it saved 6
    results = runs.run(words, folder=tmp_path, num_ranks=2, script=script)
    assert [(rank.code, rank.stderr) for rank in results] == [(0, "")] * 2
    assert "resuming from saved/iter_0000004" in results[0].stdout
    assert metrics(tmp_path) == whole


def test_the_llama_script_refuses_in_one_line(runs: ForkedRuns, workplace: Callable[[int], Path]) -> None:
    """The other script's name, a default that no one is told of, or a GPT's weights in a LLaMA."""
    place = workplace(2)
    before = digests(place)
    refused = {("--openai-gelu",): ("--openai-gelu", "--swiglu"), ("--load", "saved"): ("--load saved", "--swiglu")}
    for flags, named in refused.items():
        words = command_line(*FLAGS, *flags, num_ranks=2)
        results = runs.run(words, folder=place, num_ranks=2, script="pretrain_llama_bcd")
        assert_refused(results, *named)
    assert digests(place) == before
