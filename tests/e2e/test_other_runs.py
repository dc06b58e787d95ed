"""Folders and files that hold another run, or something else: refused in one line, and left as they are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.bad_input_cases import command_line, good_documents, write_dataset
from support.forked_runs import ForkedRuns, RankResult

SAVING = ("--save", "saved", "--save-interval", "2", "--train-iters", "4", "--eval-iters", "0")


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "data" / "text_document", good_documents())
    return tmp_path


@pytest.fixture
def trained(runs: ForkedRuns, workplace: Path) -> Path:
    """A workplace in which SAVING has run."""
    done(run(runs, workplace, *SAVING))
    return workplace


def run(runs: ForkedRuns, place: Path, *flags: str, num_ranks: int = 1) -> list[RankResult]:
    return runs.run(command_line(*flags, num_ranks=num_ranks), folder=place, num_ranks=num_ranks)


def done(results: list[RankResult]) -> str:
    """What rank 0 of a run that ended well has said."""
    assert [(rank.code, rank.stderr) for rank in results] == [(0, "")] * len(results), results
    return results[0].stdout


def refused(results: list[RankResult], *named: str) -> None:
    assert [(rank.code, rank.stdout) for rank in results] == [(2, "")] * len(results), results
    (line,) = results[0].stderr.splitlines()
    assert [name for name in named if name not in line] == [], line


def content(place: Path) -> dict[str, str]:
    return {
        str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in place.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def lines(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "flags, num_ranks", [((), 2), (("--load", "another"), 1), (("--load", "saved", "--finetune"), 1)]
)
def test_a_save_folder_of_another_run(runs: ForkedRuns, trained: Path, flags: tuple[str, ...], num_ranks: int) -> None:
    """A run from new weights takes over the folder: the next --load resumes from it, and the older run is lost."""
    before = content(trained)
    ways = () if "--finetune" in flags else ("--load saved", "--overwrite-checkpoints")
    results = run(runs, trained, *SAVING, *flags, num_ranks=num_ranks)
    refused(results, "--save saved", "iteration 4", *ways)
    assert content(trained) == before


def test_overwriting_checkpoints(runs: ForkedRuns, trained: Path) -> None:
    """Checkpoints of two runs in one folder: a damaged one would be replaced by one of the other run."""
    (trained / "metrics.jsonl").unlink()
    flags = ("--save-interval", "3", "--exit-interval", "3", "--overwrite-checkpoints")
    done(run(runs, trained, *SAVING, *flags))
    assert [path.name for path in sorted((trained / "saved").glob("iter_*"))] == ["iter_0000003"]
    assert "after iteration 3" in done(run(runs, trained, *SAVING, "--load", "saved"))


def test_the_metrics_file_of_another_run(runs: ForkedRuns, trained: Path) -> None:
    """A run replaces the curve of another one, or goes on in it. The same run may, repeated or resumed."""
    before = content(trained)
    refused(run(runs, trained, "--lr", "3e-3"), "--metrics-file", "--load")
    refused(run(runs, trained, "--skip-train", "--load", "saved"), "--metrics-file")
    assert content(trained) == before
    again = ("--save", "again", *SAVING[2:], "--load", "again")
    done(run(runs, trained, *again, "--exit-interval", "2"))
    assert [line["iteration"] for line in lines(trained)] == [1, 2]
    done(run(runs, trained, *again, "--lr", "2e-3"))
    assert [line["iteration"] for line in lines(trained)] == [1, 2, 3, 4]
    assert len({line["run"] for line in lines(trained)}) == 1
    done(run(runs, trained, "--save", "other", *SAVING[2:], "--lr", "3e-3", "--metrics-file", "other.jsonl"))
    refused(
        run(runs, trained, "--load", "again", *SAVING[2:4], "--save", "again", "--metrics-file", "other.jsonl"),
        "other.jsonl", "--load",
    )  # fmt: skip


HUGGING_FACE = {"config.json": '{"model_type": "gpt2"}', "model.safetensors": "x"}
FOLDERS = {
    "empty": ({}, ("--finetune",), ("--finetune",)),
    "empty, evaluation": ({}, ("--skip-train",), ("--skip-train",)),
    "absent": (None, ("--exit-on-missing-checkpoint",), ("--exit-on-missing-checkpoint",)),
    "other files": ({"notes.txt": "x"}, (), ()),
    "Hugging Face": (HUGGING_FACE, (), ("--load-hf",)),
    "Hugging Face, finetune": (HUGGING_FACE, ("--finetune",), ()),
    "a checkpoint": ({"checksums.json": "{}", "run_state.json": "{}"}, (), ()),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_load_folder_without_a_checkpoint(runs: ForkedRuns, workplace: Path, name: str) -> None:
    """Hours of training from random weights, or their evaluation, where weights were meant to be loaded."""
    files, flags, named = FOLDERS[name]
    if files is not None:
        (workplace / "given").mkdir()
        for file, text in files.items():
            (workplace / "given" / file).write_text(text)
    refused(run(runs, workplace, "--load", "given", *flags), "--load given", *named)
    assert not (workplace / "metrics.jsonl").exists()


@pytest.mark.parametrize("files", [None, (), ("log.txt", ".lock")])
def test_the_first_start_of_a_job(runs: ForkedRuns, workplace: Path, files: tuple[str, ...] | None) -> None:
    """A job that can't start, or can't start again after it was killed before its first checkpoint."""
    for name in files or ():
        (workplace / "saved").mkdir(exist_ok=True)
        (workplace / "saved" / name).write_text("")
    done(run(runs, workplace, *SAVING, "--load", "saved"))
    assert [line["iteration"] for line in lines(workplace) if "loss" in line] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "flags",
    [
        ("--train-iters", "5"),
        ("--eval-iters", "1"),
        ("--global-batch-size", "2", "--eval-interval", "4", "--train-iters", "8"),
    ],
)
def test_resuming_with_fewer_samples(runs: ForkedRuns, workplace: Path, flags: tuple[str, ...]) -> None:
    """A StopIteration at the first evaluation, and again at every restart: more samples are consumed than there are."""
    saving = (*SAVING, "--load", "saved", "--eval-iters", "3", "--eval-interval", "1", "--global-batch-size", "8")
    done(run(runs, workplace, *saving))
    said = done(run(runs, workplace, *saving, "--train-iters", "6", *flags))
    assert "after iteration 4" in said
    last = 8 if "8" in flags else 5 if "5" in flags else 6
    assert [line["iteration"] for line in lines(workplace) if line.get("is_final")] == [last] * 2
