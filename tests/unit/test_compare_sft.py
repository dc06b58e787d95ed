"""tools/compare.py --task sft: its figures from made-up curves, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import _compare_sft
import compare
import pytest
from _compare_sft import study_of
from _compare_sft_base import Base, Records, _given_base, size_of
from _compare_sft_rows import Row, Trained, grid_lines, row_of


def run(*losses: float, seed: int = 1, step_ms: float = 10.0, state: int = 2**20) -> Trained:
    """Evaluated every 10 steps."""
    curve = tuple((10 * (i + 1), loss) for i, loss in enumerate(losses))
    return Trained(
        seed=seed, curve=curve, step_ms=step_ms, tokens_per_step=100, state_bytes=state, peak_bytes=5, test=losses[-1]
    )


def row(*runs: Trained, full: Trained | None = None) -> Row:
    known = {} if full is None else {full.seed: full}
    return row_of(runs, known, method="m", label="M", lr=1e-3, lr_at_edge=False, rates=((1e-3, 2.0), (1e-2, None)))


def test_cost_is_time_to_the_best_of_full_training() -> None:
    """Iterations for time, the last loss for the best one, or a method that never gets there shown as cheap."""
    full = run(3.0, 2.0, 2.5)
    assert full.best == (20, 2.0) and full.last == 2.5
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
    ("flags", "said"),
    [
        (["--peers", "full,bread"], "bread"),
        (["--learning-rates", "1e-3,x"], "must be numbers"),
        (["--seeds", "1,1"], "different numbers"),
        (["--num-epochs", "0"], "more than 0"),
        (["--records", "5"], "at least 20"),
        (["--global-batch-size", "0"], "at least 1"),
        (["--variant", "kept"], "must be a new NAME"),
        (["--variant", "a=--x", "--variant", "a=--y"], "must be a new NAME"),
        (["--split", "90,10"], "three shares"),
    ],
)
def test_refusals(flags: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _compare_sft.parse_arguments(["--task", "sft", *flags])


def test_variants_are_the_preset_with_further_flags(tmp_path: Path) -> None:
    """A variant that is another method altogether, or stands away from what it is compared with."""
    argv = ["--task", "sft", "--peers", "full,badam", "--variant", "kept=--bcd-optimizer-state host"]
    argv += ["--split", "80, 10,10"]
    arguments = _compare_sft.parse_arguments([*argv, "--global-batch-size", "2"])
    size = size_of(arguments)
    assert (size.global_batch, size.micro_batch) == (2, 2)
    base = Base(
        folder=tmp_path, model=tmp_path / "model", tokenizer=tmp_path / "t", num_layers=9, about={}, words="a model"
    )
    study = study_of(
        arguments, base, Records(path=tmp_path / "r", count=100, steps=90, test_iters=1, split=arguments.split)
    )
    assert [method.name for method in study.methods] == ["full", "bcd", "kept", "badam"]
    assert study.method("kept").flags == "--bcd-preset finetune --bcd-optimizer-state host"
    assert "--split 80,10,10" in study.flags and "--bcd-steps-per-block 5" in study.flags
    assert "--micro-batch-size 2 --global-batch-size 2" in study.flags and "--bf16" not in study.flags


def test_absent_files(tmp_path: Any) -> None:
    arguments = _compare_sft.parse_arguments(["--task", "sft", "--data", str(tmp_path / "no.jsonl")])
    with pytest.raises(ValueError, match="--data .*no.jsonl"):
        _compare_sft.check(arguments)
    (tmp_path / "no.jsonl").write_text(' [\n{"prompt": "a"}]')
    with pytest.raises(ValueError, match="--data .*no.jsonl"):
        _compare_sft.check(arguments)
    (tmp_path / "no.jsonl").write_text("")
    arguments.base = tmp_path
    with pytest.raises(ValueError, match="--base"):
        _compare_sft.check(arguments)
    (tmp_path / "config.json").write_text('{"n_layer": 12}')
    with pytest.raises(ValueError, match="num_hidden_layers"):
        _compare_sft.check(arguments)


def test_paths_are_of_where_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path that is looked for in the repository, where the tools that read it start."""
    given = []

    def prepare(arguments: Any, output: Path) -> None:
        given.extend([arguments.data, arguments.pretrain_text, output])
        raise ValueError("seen")

    monkeypatch.setattr(_compare_sft, "prepare", prepare)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.txt").write_text("text")
    (tmp_path / "records.jsonl").write_text("{}")
    words = ["--task", "sft", "--pretrain-text", "small.txt", "--data", "records.jsonl", "--peers", "full"]
    with pytest.raises(ValueError, match="seen"):
        _compare_sft.compare([*words, "--output", "here"])
    assert given == [tmp_path / "records.jsonl", tmp_path / "small.txt", tmp_path / "here"]


def test_output_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback, or a model that is trained before."""
    for name in ("records.jsonl", "text", "file"):
        (tmp_path / name).write_text("{}")
    words = ["--task", "sft", "--peers", "full", "--data", str(tmp_path / "records.jsonl")]
    words += ["--pretrain-text", str(tmp_path / "text"), "--output", str(tmp_path / "file")]
    assert compare.main(words) == 2
    error = capsys.readouterr().err
    assert "--output" in error and str(tmp_path / "file") in error and error.count("\n") == 1


def test_a_model_that_is_given(tmp_path: Path) -> None:
    """A tokenizer of another model, phases for another number of layers, or a model that is trained first."""
    source, output = tmp_path / "published", tmp_path / "out"
    source.mkdir()
    (source / "config.json").write_text('{"num_hidden_layers": 30}')
    base = _given_base(source, output)
    assert base.model.resolve() == source and base.num_layers == 30
    folders = {base.folder}
    for content in (b"one", b"two"):  # trained further: the same names and sizes, and other results
        (source / "model.safetensors").write_bytes(content)
        folders.add(_given_base(source, output).folder)
    assert len(folders) == 3
    base = _given_base(source, output)
    base.model.unlink()
    base.model.symlink_to(tmp_path / "gone")
    assert _given_base(source, output).model.resolve() == source
    assert base.tokenizer_flags("x") == ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "x"]
    arguments = _compare_sft.parse_arguments(["--task", "sft", "--base", str(source)])
    records = Records(path=tmp_path / "r", count=100, steps=300, test_iters=1, split="80,10,10")
    flags = study_of(arguments, base, records).flags
    assert "--load-hf {data}/model" in flags and "--tokenizer-model {data}/model" in flags
    arguments.bf16 = True
    assert " --bf16 " in study_of(arguments, base, records).flags
    assert "--bcd-steps-per-block 5" in flags
