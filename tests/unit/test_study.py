"""tools/study.py: study files, order of runs, tuning, aggregation, resuming; with a program that takes no time."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _study_report
import _study_runs
import pytest
import study as tool
import yaml
from _study_arithmetic import of_flags
from _study_file import Study, read_study, render
from _study_plan import Lookup, Point, grid, missing_runs, points, tuned
from _study_report import Report
from _study_rows import Multiplier, Row, crossing, frontier, ratio, rows_of
from _study_runs import Commands, Result, Run, summarise

PROGRAM = """
import argparse, json, os, pathlib, time
parser = argparse.ArgumentParser()
for name in ("--lr", "--best", "--gain"):
    parser.add_argument(name, type=float)
for name in ("--seed", "--steps", "--bcd-steps-per-block", "--log-interval"):
    parser.add_argument(name, type=int)
parser.add_argument("--metrics-file", type=pathlib.Path)
parser.add_argument("--checkpoint", type=pathlib.Path)
parser.add_argument("--wait", type=pathlib.Path)
given = parser.parse_args()
first = 1
if given.checkpoint and given.checkpoint.exists():
    first = int(given.checkpoint.read_text()) + 1
if given.lr > 1:
    raise SystemExit("too fast")
print("parameters  10 (all)", flush=True)
with open(given.metrics_file, "a" if first > 1 else "w") as file:
    def write(**values):
        print(json.dumps(values), file=file, flush=True)
    for step in range(first, given.steps + 1):
        loss = given.gain / step + abs(given.lr - given.best) + 0.01 * given.seed
        write(iteration=step, loss=loss, step_time_ms=10.0, model_state_bytes=[100, 60], host_state_bytes=[0, 0])
        write(iteration=step, validation_loss=loss)
        if given.checkpoint:
            given.checkpoint.parent.mkdir(exist_ok=True, parents=True)
            given.checkpoint.write_text(str(step))
        while given.wait and step == 3 and not given.wait.exists():
            time.sleep(0.01)
    write(iteration=given.steps, validation_loss=loss, is_final=True)
    write(iteration=given.steps, test_loss=loss + 1, is_final=True)
"""

# four 64 x 64 and two 64 x 256 matrices; 5 steps of 4 m^2 n + 2 m^3 operations, over 3 passes of 2 x 64 tokens
NEWTON_SCHULZ = 5 * (4 * 6 + 2 * (4 * 4 + 2)) * 64**3 / (3 * 2 * 64 * 12 * 64**2)


def study_of(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return {
        "name": "small",
        "program": str(program),
        "flags": "--steps {steps} --best 0.2",
        "steps": 10,
        "learning_rates": [0.1, 0.2, 0.4],
        "seeds": [1, 2],
        "data": {"none": ""},
        "methods": {"full": {"flags": "--gain 1"}, "fast": {"flags": "--gain 0.5"}},
    } | changes


def written(tmp_path: Path, content: dict[str, Any]) -> Path:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def read(tmp_path: Path, **changes: Any) -> Study:
    return read_study(str(written(tmp_path, study_of(tmp_path, **changes))))


def results_by(value: Callable[[Run], float | None]) -> Lookup:
    """Every run has a result, whose test and validation metric is `value`."""

    def lookup(run: Run) -> Result:
        steps = round(10 * run.budget)
        return Result(model="model", data="none", method=run.method.name, lr=run.lr, seed=run.seed, budget=run.budget,
                      steps=steps, test=value(run), validation=value(run), curve=((steps, value(run)),),
                      step_ms=10.0, state_bytes_per_parameter=16.0)  # fmt: skip

    return lookup


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seed": [1]}, "unknown key seed; did you mean seeds?"),
        ({"steps": "many"}, "steps: 'many': must be a whole number"),
        ({"steps": 0}, "steps: at least one is needed"),
        ({"learning_rates": [0.1, "fast"]}, "learning_rates: 'fast': must be a number more than 0"),
        ({"learning_rates": [0.1, 0.1]}, "something stands twice"),
        ({"seeds": 3}, "seeds: 3: must be a list"),
        ({"seeds": []}, "seeds: at least one is needed"),
        ({"baseline": "ful"}, "baseline: ful: must be one of full, fast"),
        ({"tune_on": "some"}, "tune_on: some: must be one of none"),
        ({"gpu": "h100"}, "gpu: h100: must be one of rtx4090, a100, a800"),
        ({"metric": "bleu"}, "metric: bleu: must be one of loss, accuracy"),
        ({"flags": "--steps {step}"}, "small: flags: {step}: placeholders are lr, steps"),
        ({"flags": "--name 'a"}, "small: flags: No closing quotation"),
        ({"data": {"a": {"text": "../secret.txt"}}}, "data: a: text: ../secret.txt: give a path below"),
        ({"methods": {"a b": {}}}, "methods: a b: a name has letters"),
        ({"methods": {"a": {"learning_rate_of": "b"}}}, "learning_rate_of: b: must be one of a"),
        ({"methods": {"a": {"budgets": [0.5, -1]}}}, "methods: a: budgets: -1: must be a number more than 0"),
        ({"methods": {"a": {}, "b": {"models": ["c"]}}}, "methods: b: models: c: must be one of model"),
        (
            {
                "models": {"x": {}, "y": {}},
                "methods": {"a": {}, "b": {"models": ["x"]}, "c": {"learning_rate_of": "b"}},
            },
            "methods: c: learning_rate_of: b does not train all of its models",
        ),
        ({"methods": {"a": {"models": ["model"]}}}, "methods: a: models: the baseline trains all"),
        ({"methods": {"a": {"steps": 0.5}}}, "methods: a: steps: the baseline's is 1"),
        ({"methods": ["a"]}, "methods: must be a mapping"),
    ],
)
def test_bad_study_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    """A traceback, or a study of hours that is not the one that was meant."""
    path = written(tmp_path, study_of(tmp_path, **changes))
    assert tool.main([str(path), "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith(f"tools/study.py: error: {path}: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--only", "fulll"], "--only fulll: fulll matches no method; there are full, fast"),
        (["--only", "f*,slow"], "--only f*,slow: slow matches no method; there are full, fast"),
        (["--only", "full,"], "--only full,: an empty name matches no method"),
        (["--output", "file"], "--output file: Not a directory: "),
        (["--jobs", "0"], "--jobs 0: must be at least 1"),
    ],
)
def test_bad_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    """A traceback, or a study of no runs that ends well."""
    path = written(tmp_path, study_of(tmp_path))
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    assert tool.main([str(path), "--list", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tools/study.py: error: {message}") and error.count("\n") == 1


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    """YAML's own loader takes the last of two methods of one name, and the first is never run."""
    path = tmp_path / "study.yaml"
    path.write_text("steps: 1\nmethods:\n  a: {}\n  a: {}\n")
    with pytest.raises(ValueError, match="a stands twice"):
        read_study(str(path))


def test_placeholders() -> None:
    """A share of the steps that is a fraction, or a rate in another notation than it is tuned in."""
    words = render("--x {steps/15} --y {lr*0.1} 'a b' {seed}", {"steps": 100, "lr": 3e-3, "seed": 2}, where="")
    assert words == ["--x", "7", "--y", "0.0003", "a b", "2"]
    assert render("{steps/15}", {"steps": 3}, where="") == ["1"], "an interval of 0 ends the run"


def test_grid_grows_at_an_edge_and_says_where_it_ends(tmp_path: Path) -> None:
    """A rate outside the grid is never tried, or the grid grows for ever, or a worse edge is taken for the best."""
    point = next(points(read(tmp_path, extend=2)))
    cases = {0.2: (0.2, False, 3), 0.8: (0.8, False, 5), 5.0: (1.6, True, 5), 0.01: (0.025, True, 5)}
    for best, expected in cases.items():
        found = grid(read(tmp_path, extend=2), point, results_by(lambda run, best=best: abs(run.lr - best) + 1))
        assert (found.best, found.at_edge, len(found.values)) == expected
    fixed = grid(read(tmp_path, extend=0), point, results_by(lambda run: 1 / run.lr))
    assert (fixed.best, fixed.at_edge, len(fixed.values)) == (0.4, True, 3)


def test_diverged_rates(tmp_path: Path) -> None:
    """A rate that diverged is taken for the best, or ends the study."""
    study = read(tmp_path)
    point = next(points(study))
    assert tuned(study, point, results_by(lambda run: None if run.lr > 0.15 else 1 - run.lr)) == 0.1
    assert tuned(study, point, results_by(lambda run: None)) is None
    row = rows_of(study, results_by(lambda run: None), lambda point: 1.0, {})[0]
    assert row.failure == "no finite loss" and row.test is None


def test_order_of_runs(tmp_path: Path) -> None:
    """A second seed before every method has one, or a method that waits for a rate that nobody tunes."""
    methods = {"full": {}, "fast": {"learning_rate_of": "full", "budgets": [0.5, 1]}}
    study = read(tmp_path, methods=methods)
    done: dict[Run, Result] = {}
    order = []
    while todo := missing_runs(study, done.get):
        order.append((todo[0].method.name, todo[0].lr, todo[0].seed, todo[0].budget))
        done[todo[0]] = results_by(lambda run: abs(run.lr - 0.2) + 1)(todo[0])  # type: ignore[assignment]
    assert order == [
        *(("full", lr, 1, 1.0) for lr in (0.1, 0.2, 0.4)),
        ("fast", 0.2, 1, 1.0), ("full", 0.2, 2, 1.0), ("fast", 0.2, 2, 1.0),
        *(("fast", 0.2, seed, 0.5) for seed in (1, 2)),
    ]  # fmt: skip
    assert {run.method.name for run in missing_runs(study, lambda run: None, only="f*st")} == {"full"}
    both = read(tmp_path, methods=methods, data={"none": "", "other": ""}, tune_on="other")
    assert {run.data.name for run in missing_runs(both, lambda run: None)} == {"other"}


def test_a_methods_own_rates(tmp_path: Path) -> None:
    """A grid that is tried for a method whose rates are known, or one rate that is extended for ever."""
    study = read(tmp_path, methods={"full": {}, "fast": {"learning_rates": [0.8]}})
    assert [(run.method.name, run.lr) for run in missing_runs(study, lambda run: None)] == [
        *(("full", lr) for lr in study.learning_rates),
        ("fast", 0.8),
    ]
    assert tuned(study, list(points(study))[1], results_by(lambda run: run.lr)) == 0.8


def test_methods_of_some_models(tmp_path: Path) -> None:
    """A setting that is meant for one model is run, and reported, for all."""
    models = {"small": "", "large": ""}
    study = read(tmp_path, models=models, methods={"full": {}, "fast": {"models": ["large"]}})
    found = [(point.model.name, point.method.name) for point in points(study)]
    assert found == [("small", "full"), ("large", "full"), ("large", "fast")]


def test_crossing() -> None:
    """The multiplier of a curve that starts below, never arrives, or arrives between two points."""
    assert crossing([(0.5, 4.0), (1.0, 0.25)], relation="=") == Multiplier(value=0.75)
    assert crossing([(0.5, 0.9), (1.0, 0.8)], relation="=") == Multiplier(value=0.5, relation="<")
    assert crossing([(0.5, 1.2), (1.0, 1.1)], relation="<=") == Multiplier(value=1.0, relation=">")
    assert str(crossing([(0.5, 4.0), (1.0, 0.25)], relation="<=")) == "≤ 0.75"
    assert ratio({1: 2.0, 2: 8.0, 3: 1.0}, {1: 1.0, 2: 1.0, 4: 1.0}) == pytest.approx(4.0), "seeds are paired"


def test_budgets_decide_over_curves(tmp_path: Path) -> None:
    """A multiplier read from a curve at a high learning rate, though runs of that length were made."""
    study = read(tmp_path, methods={"full": {}, "fast": {"budgets": [0.5, 0.8, 1.25]}}, gpu="rtx4090")
    metric = {("full", 1.0): 2.0, ("fast", 0.5): 4.0, ("fast", 0.8): 2.1, ("fast", 1.0): 1.9, ("fast", 1.25): 1.8}
    lookup = results_by(lambda run: metric[run.method.name, run.budget] + abs(run.lr - 0.2))
    times = {"ms": {"model": {"full": 10.0, "fast": 20.0}}}
    full, fast = rows_of(study, lookup, lambda point: 0.5 if point.method.name == "fast" else 1.0, times)
    assert full.multiplier == Multiplier(value=1.0) and full.relative_test == 1
    assert fast.multiplier is not None and fast.multiplier.relation == "=" and 0.8 < fast.multiplier.value < 1
    assert fast.relative_test == pytest.approx(1.9 / 2)
    assert (fast.spread, fast.arithmetic, fast.relative_time) == (0, 0.5, 2)
    assert str(fast.multiplier.times(fast.arithmetic)) == "0.45"
    assert full.dollars == pytest.approx(10 * 0.01 / 3600 * 0.29)


def test_step_times_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step times of runs that shared the machine, or of two versions of the code, compared in one table."""
    command = [str(written(tmp_path, study_of(tmp_path))), "--output", str(tmp_path / "out"), "--data", str(tmp_path)]
    assert tool.main([*command, "--step-times", "2"]) == 0
    folder = tmp_path / "out" / "small"
    times = json.loads((folder / "step_times.json").read_text())
    assert times["rounds"] == 2 and times["ms"]["model"] == {"full": 10.0, "fast": 10.0}
    assert not list(folder.glob("*/done.json")), "a run of 60 steps is no result"
    rounds = [line for line in capsys.readouterr().err.splitlines() if "step time, round" in line]
    assert [line.split("model ")[1].split(":")[0] for line in rounds] == ["full", "fast", "full", "fast"]

    (folder / "step_times.json").write_text(json.dumps({**times, "commit": "before"}))
    assert tool.main([*command, "--step-times", "1", "--only", "fast"]) == 0
    assert set(json.loads((folder / "step_times.json").read_text())["ms"]["model"]) == {"fast"}


def test_frontier() -> None:
    """A method on the frontier that another beats in both, or two of one state."""

    def row(method: str, state: float, test: float) -> Row:
        names = {"model": "m", "data": "d", "method": method, "label": method, "group": ""}
        return Row(**names, tests=(test,), state_bytes_per_parameter=state)

    rows = [row("full", 16, 1.6), row("worse", 16, 1.7), row("small", 8, 1.8), row("bad", 9, 1.9), row("tiny", 6, 2.0)]
    assert [one.method for one in frontier(rows)] == ["tiny", "small", "full"]


def test_summary_of_metrics() -> None:
    """Bytes of one rank or one phase for all, an accuracy that is better when lower, NaN as a number, step times of
    the fastest block or of a busy moment."""
    steps = [{"iteration": i, "block": i % 2, "step_time_ms": ms, "model_state_bytes": state,
              "host_state_bytes": [8, 0]}
             for i, ms, state in ((1, 99.0, [10, 10]), (2, 10.0, [10, 30]), (3, 12.0, [20, 5]))]  # fmt: skip
    ends = [{"iteration": 1, "validation_accuracy": 0.5}, {"iteration": 3, "validation_accuracy": 0.75},
            {"iteration": 3, "validation_accuracy": 0.25, "is_final": True},
            {"iteration": 3, "test_accuracy": 0.9, "is_final": True}]  # fmt: skip
    found = summarise([*steps, *ends], metric="accuracy", num_parameters=10)
    assert found["test"] == pytest.approx(0.1) and found["validation"] == 0.5
    assert found["curve"] == ((1, 0.5), (3, 0.25))
    assert (found["state_bytes_per_parameter"], found["host_bytes_per_parameter"], found["step_ms"]) == (4.0, 0.8, 11.0)
    assert summarise([*steps, {"iteration": 3, "test_loss": None}], metric="loss", num_parameters=None)["test"] is None
    with pytest.raises(ValueError, match="3 steps and 0 lines of test_loss"):
        summarise(steps, metric="loss", num_parameters=1)


def test_identity_of_a_run(tmp_path: Path) -> None:
    """A run that is repeated for another checkpoint folder, or not repeated for another flag or text."""
    base = read(tmp_path)

    def folder(study: Study, run: Run, **folders: Path) -> str:
        places = {"data_folder": tmp_path, "folder": tmp_path} | folders
        return Commands(study, {}, **places).folder(run).name

    run = next(points(base)).run(0.1, 1)
    name = folder(base, run)
    assert name == folder(base, run, data_folder=tmp_path / "elsewhere")
    assert name == folder(read(tmp_path, checkpoint_flags="--checkpoint {folder}"), run)
    others = [read(tmp_path, steps=11), read(tmp_path, flags="--steps {steps} --best 0.3")]
    runs = [next(points(base)).run(0.1, 2), next(points(base)).run(0.1, 1, 0.5)]
    assert len({name, *(folder(one, run) for one in others), *(folder(base, one) for one in runs)}) == 5


def test_whole_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tuning, seeds, table and pictures from end to end; a second start runs nothing; a failure names its reason."""
    methods = {"full": {"flags": "--gain 1"}, "fast": {"flags": "--gain 0.5", "label": "fast one"},
               "broken": {"flags": "--gain x"}}  # fmt: skip
    path = written(tmp_path, study_of(tmp_path, methods=methods))
    command = [str(path), "--output", str(tmp_path / "out"), "--jobs", "4"]
    assert tool.main(command) == 1, "a method failed"
    said = capsys.readouterr()
    assert said.err.count("start model none fast") == 4 and "| broken | failed: " in said.out
    results = json.loads((tmp_path / "out" / "small" / "results.json").read_text())
    full, fast, broken = results["rows"]
    assert (full["lr"], full["tests"], full["state_bytes_per_parameter"]) == (0.2, pytest.approx([1.11, 1.12]), 16)
    assert fast["multiplier"]["relation"] == "<=" and fast["multiplier"]["value"] == pytest.approx(0.5, abs=0.01)
    assert "gain: invalid float value" in broken["failure"]
    pictures = sorted(path.name for path in (tmp_path / "out" / "small").glob("*.png"))
    assert pictures == ["small_cost.png", "small_state.png"]
    assert tool.main([*command, "--only", "f*"]) == 0
    assert "start" not in capsys.readouterr().err


def test_killed_study_resumes(tmp_path: Path) -> None:
    """A finished run is repeated, a run that was killed starts from its first step, or a process is left behind."""
    go = tmp_path / "go"
    content = study_of(
        tmp_path,
        flags=f"--steps {{steps}} --best 0.2 --wait {go}",
        checkpoint_flags="--checkpoint {folder}/step",
        learning_rates=[0.2],
        seeds=[1],
        jobs=1,
    )
    command = [sys.executable, "tools/study.py", str(written(tmp_path, content)), "--output", str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=Path(tool.__file__).parents[1], stderr=subprocess.DEVNULL)
    while not (steps := list((tmp_path / "out").glob("small/*/checkpoint/step"))) or steps[0].read_text() != "3":
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait() != 0
    folder = steps[0].parents[1]
    lines = (folder / "metrics.jsonl").read_text()
    assert len(lines.splitlines()) == 6 and not (folder / "done.json").exists()
    go.touch()
    subprocess.run(command, cwd=Path(tool.__file__).parents[1], check=True, capture_output=True)
    after = (folder / "metrics.jsonl").read_text()
    assert after.startswith(lines) and len(after.splitlines()) == 22
    assert json.loads((folder / "done.json").read_text())["test"] == pytest.approx(1.11)
    assert not (folder / "checkpoint").exists()
    before = os.stat(folder / "done.json").st_mtime_ns
    subprocess.run(command, cwd=Path(tool.__file__).parents[1], check=True, capture_output=True)
    assert os.stat(folder / "done.json").st_mtime_ns == before


def test_study_files_of_the_project(repo_root: Path) -> None:
    """A study file that is refused after an hour of waiting for a free machine."""
    paths = sorted((repo_root / "studies").glob("*.yaml"))
    assert paths
    for path in paths:
        study = read_study(str(path))
        assert study.name == path.stem and study.seeds and isinstance(next(points(study)), Point)


def test_table_of_partial_results(tmp_path: Path) -> None:
    """A table that needs every run, so that a study of hours shows nothing before its end."""
    study = read(tmp_path)
    commands = Commands(study, {}, data_folder=tmp_path, folder=tmp_path)
    all_of = results_by(lambda run: abs(run.lr - 0.2) + 1)
    report = Report(commands, lambda run: all_of(run) if run.seed == 1 else None, {}, folder=tmp_path, texts={})
    assert "| fast | 0.2 | 1.0000 *1 of 2 seeds* | +0.0 % | ≤ 1.00 |" in report.write()
    assert Report(commands, lambda run: None, {}, folder=tmp_path, texts={}).rows() == []


def test_a_run_that_is_still_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes that write one run's metrics, after a study was killed without a chance to stop its runs."""
    study = read(tmp_path)
    first = missing_runs(study, lambda run: None)[0]
    folder = Commands(study, {}, data_folder=tmp_path, folder=tmp_path / "out" / "small").folder(first)
    folder.mkdir(parents=True)
    command = [str(tmp_path / "study.yaml"), "--output", str(tmp_path / "out"), "--data", str(tmp_path)]
    with open(folder / "log", "ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert tool.main(command) == 2
        assert "still in use by a run of a killed study" in capsys.readouterr().err
    assert tool.main(command) == 0


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--bcd-num-blocks 1", 1.0),
        ("--bcd-num-blocks 3", 2 / 3),
        ("--bcd-num-blocks 3 --bcd-layout strided", (6 + 5 + 2) / 18),  # prefixes of 0, 1 and 2 layers
        ("--bcd-num-blocks 3 --bcd-always-active norms", 7 / 9),
        ("--bcd-num-blocks 3 --bcd-resting-update sign", 1.0),
        ("--bcd-num-blocks 3 --bcd-resting-update sign --bcd-resting-layers suffix", (18 + 14 + 10) / 54),
        ("--bcd-num-blocks 3 --bcd-resting-update orthogonal", 1 + 2 / 3 * NEWTON_SCHULZ),
        ("--bcd-num-blocks 0 --bcd-resting-update orthogonal", 1 + NEWTON_SCHULZ),
        ("--bcd-num-blocks 1 --optimizer muon", 1 + NEWTON_SCHULZ),
        ("--bcd-num-blocks 7", None),
    ],
)
def test_arithmetic(flags: str, expected: float | None) -> None:
    """Weight gradients of resting layers, or orthogonalisation, that count nothing; a refused method that has some."""
    shape = "--num-layers 6 --hidden-size 64 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16"
    batch = "--micro-batch-size 2 --global-batch-size 4 --train-iters 1 --lr 1e-3 --tokenizer-type ByteLevelTokenizer"
    found = of_flags("gpt", f"{shape} {batch} {flags}".split())
    assert found == pytest.approx(expected) if expected is not None else found is None


def test_published_runs_are_kept_if_their_command_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A result of other flags that stands for a run which was never done; runs that are done again elsewhere."""
    path = written(tmp_path, study_of(tmp_path))
    tool.main([str(path), "--output", str(tmp_path / "first")])
    monkeypatch.setattr(_study_report, "PUBLISHED", tmp_path / "first" / "small")
    (tmp_path / "first" / "small" / "results.json").rename(tmp_path / "first" / "small" / "small.json")
    again = [str(path), "--output", str(tmp_path / "second"), "--keep-published", "--list"]

    def num_runs() -> int:
        capsys.readouterr()
        assert tool.main(again) == 0
        return len(capsys.readouterr().out.splitlines()) - 1

    assert num_runs() == 0
    for module in (_study_report, _study_runs):
        monkeypatch.setattr(module, "cpu_model", lambda: "of another machine")
    assert tool.main([str(path), "--output", str(tmp_path / "second"), "--redraw"]) == 0
    assert "of another machine" not in (tmp_path / "second" / "small" / "table.md").read_text(encoding="utf-8")
    content = path.read_text(encoding="utf-8")
    path.write_text(content.replace("--gain 0.5", "--gain 0.6"), encoding="utf-8")
    assert content.count("--gain 0.5") and num_runs() > 0
