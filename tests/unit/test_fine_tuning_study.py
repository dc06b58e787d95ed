"""studies/fine_tuning.py: its figures from made-up curves, the runs that it would start, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import fine_tuning
import pytest
from fine_tuning import Prepared, Row, Trained, grid_lines, row_of, size_of, study_of


def run(*losses: float, seed: int = 1, step_ms: float = 10.0, state: int = 2**20) -> Trained:
    """Evaluated every 10 steps."""
    curve = tuple((10 * (i + 1), loss) for i, loss in enumerate(losses))
    return Trained(seed=seed, curve=curve, step_ms=step_ms, state_bytes=state, peak_bytes=5, test=losses[-1])


def row(*runs: Trained, full: Trained | None = None) -> Row:
    known = {} if full is None else {full.seed: full}
    return row_of(runs, known, tokens=100, method="m", label="M", lr=1e-3, rates=((1e-3, 2.0), (1e-2, None)))


def test_cost_is_time_to_the_best_of_full_training() -> None:
    """Iterations for time, the last loss for the best one, or a method that never gets there shown as cheap."""
    full = run(3.0, 2.0, 2.5)
    assert full.best == (20, 2.0)
    assert row(full, full=full).cost == 1
    found = row(run(2.5, 1.5, 1.5, step_ms=6.0), full=full)
    assert found.cost == pytest.approx(15 * 6 / (20 * 10)) and found.to_full == pytest.approx(-0.25)
    assert row(run(3.0, 2.1, 2.01), full=full).cost is None
    two = row(run(2.5, 1.5), run(2.5, 2.2, seed=2), full=full)
    assert two.num_reached == 1 and two.seeds == (1, 2), "the second seed has no full training beside it"


def test_equal_time() -> None:
    """A slower method's last loss, which it reached after more time."""
    full = run(3.0, 2.0, step_ms=10.0)
    assert row(run(3.0, 2.0, 1.0, step_ms=10.0), full=full).at_full_time == 2.0
    assert row(run(3.0, 2.0, step_ms=13.0), full=full).at_full_time == pytest.approx(3 - (200 / 13 - 10) / 10)
    assert row(run(3.0, 2.0, step_ms=5.0), full=full).at_full_time == 2.0, "it had ended"


def test_spread_and_grid() -> None:
    """A spread of one seed, or a rate that diverged and looks as if it had not run."""
    one = row(run(3.0, 2.0), run(3.0, 2.5, seed=2))
    assert one.best == 2.25 and one.best_spread == 0.5
    assert "2.0000 | diverged" in grid_lines([one])[-1]
    assert math.isnan(Row(method="x", label="X", failure="no finite loss").best)


@pytest.mark.parametrize(
    "flags",
    [
        "--peers full,bread",
        "--peers full,full",
        "--learning-rates 1e-3,x",
        "--seeds 1,1",
        "--num-epochs 0",
        "--records 5",
        "--global-batch-size 0",
        "--variant kept",
        "--variant a=--x --variant a=--y",
        "--split 90,10",
    ],
)
def test_bad_flags(flags: str) -> None:
    """Hours of runs that are another comparison than was asked for."""
    with pytest.raises(ValueError, match=flags.split()[0]):
        fine_tuning.parse_arguments(["--task", "sft", *flags.split()])


def prepared(folder: Path, **changes: Any) -> Prepared:
    values = {"folder": folder, "tokenizer": "t", "num_layers": 9, "about": "a model", "records": folder / "r"}
    return Prepared(**{**values, "num_records": 100, "steps": 90, "test_iters": 1, **changes})


def test_variants_are_the_preset_with_further_flags(tmp_path: Path) -> None:
    """A variant that is another method altogether, or stands away from what it is compared with."""
    argv = ["--task", "sft", "--peers", "full,badam", "--variant", "kept=--bcd-optimizer-state host"]
    arguments = fine_tuning.parse_arguments([*argv, "--split", "80, 10,10", "--global-batch-size", "2"])
    assert (size_of(arguments).global_batch, size_of(arguments).micro_batch) == (2, 2)
    study = study_of(arguments, prepared(tmp_path))
    assert [method.name for method in study.methods] == ["full", "bcd", "kept", "badam"]
    assert study.method("kept").flags == "--bcd-preset finetune --bcd-optimizer-state host"
    assert "--split 80,10,10" in study.flags and "--bcd-steps-per-block 5" in study.flags
    assert "--micro-batch-size 2 --global-batch-size 2" in study.flags and "--bf16" not in study.flags
    arguments.bf16 = True
    assert " --bf16 " in study_of(arguments, prepared(tmp_path)).flags


def test_absent_files(tmp_path: Path) -> None:
    """A traceback, or a model that is trained before."""
    arguments = fine_tuning.parse_arguments(["--task", "sft", "--data", str(tmp_path / "no.jsonl")])
    for content in (None, ' [\n{"prompt": "a"}]'):
        if content:
            (tmp_path / "no.jsonl").write_text(content)
        with pytest.raises(ValueError, match="--data .*no.jsonl"):
            fine_tuning.check(arguments)
    (tmp_path / "no.jsonl").write_text("")
    arguments.base = tmp_path
    for config in (None, '{"n_layer": 12}'):
        if config:
            (tmp_path / "config.json").write_text(config)
        with pytest.raises(ValueError, match="--base"):
            fine_tuning.check(arguments)


def test_paths_are_of_where_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A relative path that is looked for in the repository, where the tools that read it start."""
    given = []

    def prepare(arguments: Any, output: Path) -> None:
        given.extend([arguments.data, arguments.pretrain_text, output])
        raise ValueError("seen")

    monkeypatch.setattr(fine_tuning, "prepare", prepare)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.txt").write_text("text")
    (tmp_path / "records.jsonl").write_text("{}")
    words = ["--task", "sft", "--pretrain-text", "small.txt", "--data", "records.jsonl", "--peers", "full"]
    assert fine_tuning.main([*words, "--output", "here"]) == 2
    assert given == [tmp_path / "records.jsonl", tmp_path / "small.txt", tmp_path / "here"]
    capsys.readouterr()
    assert fine_tuning.main([*words, "--output", "small.txt"]) == 2
    assert "--output" in capsys.readouterr().err


def test_a_model_that_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer of another model, phases for another number of layers, or a model that is trained first."""
    source, data = tmp_path / "published", tmp_path / "records.jsonl"
    source.mkdir()
    (source / "config.json").write_text('{"num_hidden_layers": 30}')
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 30)
    counted: list[Any] = []
    monkeypatch.setattr(
        fine_tuning, "call", lambda words, _: counted.append(words) or '{"steps": 300, "validation": 8}'
    )
    arguments = fine_tuning.parse_arguments(["--task", "sft", "--base", str(source), "--data", str(data)])
    folders = set()
    for content in (b"one", b"two"):  # trained further: the same names and sizes, and other results
        (source / "model.safetensors").write_bytes(content)
        folders.add(fine_tuning.prepare(arguments, tmp_path / "out").folder)
    assert len(folders) == 2 == len(counted)
    found = fine_tuning.prepare(arguments, tmp_path / "out")
    assert len(counted) == 2, "what is there is not counted again"
    assert found.model.resolve() == source and (found.num_layers, found.num_records, found.steps) == (30, 30, 300)
    flags = study_of(arguments, found).flags
    assert "--load-hf {data}/model" in flags and "--tokenizer-model {data}/model" in flags
    assert "--bcd-steps-per-block 5" in flags
