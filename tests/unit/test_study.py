"""studies/study.py: study files, order of runs, tuning and aggregation, with a program that takes no time."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import results
import study as tool
import yaml
from results import Lookup, Multiplier, Result, Row, Run, Study, Table, points, read_results, read_study, summarise
from study import Commands, Runner, flags_arithmetic

PROGRAM = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
for name in ("--lr", "--best", "--gain"):
    parser.add_argument(name, type=float)
for name in ("--seed", "--steps", "--bcd-steps-per-block", "--log-interval"):
    parser.add_argument(name, type=int)
parser.add_argument("--metrics-file", type=pathlib.Path)
given = parser.parse_args()
if given.lr > 1:
    raise SystemExit("too fast")
print("parameters  10 (all)", flush=True)
with open(given.metrics_file, "w") as file:
    def write(**values):
        print(json.dumps(values), file=file, flush=True)
    for step in range(1, given.steps + 1):
        loss = given.gain / step + abs(given.lr - given.best) + 0.01 * given.seed
        write(iteration=step, loss=loss, step_time_ms=10.0, model_state_bytes=[100, 60], host_state_bytes=[0, 0])
        write(iteration=step, validation_loss=loss)
    write(iteration=given.steps, validation_loss=loss, is_final=True)
    write(iteration=given.steps, test_loss=loss + 1, is_final=True)
"""

# four 64 x 64 and two 64 x 256 matrices; 5 steps of 4 m^2 n + 2 m^3 operations, over 3 passes of 2 x 64 tokens
NEWTON_SCHULZ = 5 * (4 * 6 + 2 * (4 * 4 + 2)) * 64**3 / (3 * 2 * 64 * 12 * 64**2)


def study_of(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return {
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
    """Give every run a result whose test and validation metric is `value`."""

    def lookup(run: Run) -> Result:
        model, data, method, lr, seed, budget = run.key
        steps = round(10 * budget)
        return Result(model=model, data=data, method=method, lr=lr, seed=seed, budget=budget, steps=steps,
                      test=value(run), validation=value(run), curve=((steps, value(run)),),
                      state_bytes_per_parameter=16.0)  # fmt: skip

    return lookup


def rows_of(
    study: Study, lookup: Lookup, arithmetic: Any = lambda point: 1.0, step_ms: Any = lambda point: None
) -> list[Row]:
    return Table(study, lookup, arithmetic=arithmetic, step_ms=step_ms).rows


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"learning_rates": [0.1, 0.1]}, "learning_rates"),
        ({"baseline": "ful"}, "baseline"),
        ({"flags": "--steps {step}"}, "{step}"),
        ({"methods": {"a": {"learning_rate_of": "b"}}}, "learning_rate_of"),
        ({"methods": {"a": {"budgets": [0.5, -1]}}}, "budgets"),
    ],
)
def test_bad_study_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], key: str) -> None:
    """A bad study file is refused in one line that names the file and the key."""
    path = written(tmp_path, study_of(tmp_path, **changes))
    assert tool.main([str(path), "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert str(path) in said and key in said and said.count("\n") == 1


def test_grid_grows_at_an_edge_and_says_where_it_ends(tmp_path: Path) -> None:
    """A grid grows at an edge as often as it may, and says whether its best rate lies at an edge."""
    point = next(points(read(tmp_path, extend=2)))
    cases = {0.2: (0.2, False, 3), 0.8: (0.8, False, 5), 5.0: (1.6, True, 5), 0.01: (0.025, True, 5)}
    for best, expected in cases.items():
        actual = results.grid(
            read(tmp_path, extend=2), point, results_by(lambda run, best=best: abs(run.lr - best) + 1)
        )
        assert (actual.best, actual.at_edge, len(actual.values)) == expected
    fixed = results.grid(read(tmp_path, extend=0), point, results_by(lambda run: 1 / run.lr))
    assert (fixed.best, fixed.at_edge, len(fixed.values)) == (0.4, True, 3)


def test_diverged_rates(tmp_path: Path) -> None:
    """A diverged rate is never the best, and a method without a finite loss has a row that says so."""
    study = read(tmp_path)
    point = next(points(study))
    assert results.grid(study, point, results_by(lambda run: None if run.lr > 0.15 else 1 - run.lr)).best == 0.1
    assert results.grid(study, point, results_by(lambda run: None)).best is None
    row = rows_of(study, results_by(lambda run: None))[0]
    assert row.failure == "no finite loss" and row.test is None


def test_budgets_decide_over_curves(tmp_path: Path) -> None:
    """A multiplier is read from runs of other budgets if there are any, and not from a curve."""
    study = read(tmp_path, methods={"full": {}, "fast": {"budgets": [0.5, 0.8, 1.25]}}, gpu="rtx4090")
    metric = {("full", 1.0): 2.0, ("fast", 0.5): 4.0, ("fast", 0.8): 2.1, ("fast", 1.0): 1.9, ("fast", 1.25): 1.8}
    lookup = results_by(lambda run: metric[run.point.method.name, run.budget] + abs(run.lr - 0.2))
    full, fast = rows_of(
        study,
        lookup,
        arithmetic=lambda point: 0.5 if point.method.name == "fast" else 1.0,
        step_ms=lambda point: {"full": 10.0, "fast": 20.0}[point.method.name],
    )
    assert full.multiplier == Multiplier(value=1.0) and full.relative_test == 1
    assert fast.multiplier is not None and fast.multiplier.relation == "=" and 0.8 < fast.multiplier.value < 1
    assert fast.relative_test == pytest.approx(1.9 / 2)
    assert (fast.spread, fast.arithmetic, fast.relative_time) == (0, 0.5, 2)
    assert full.dollars == pytest.approx(10 * 0.01 / 3600 * 0.29)


def test_summary_of_metrics() -> None:
    """A summary has all ranks' bytes of the largest phase, errors for accuracies, the mean of the blocks' fast steps,
    and no number for NaN."""
    steps = [{"iteration": i, "block": i % 2, "step_time_ms": ms, "model_state_bytes": state,
              "host_state_bytes": [8, 0]}
             for i, ms, state in ((1, 99.0, [10, 10]), (2, 10.0, [10, 30]), (3, 12.0, [20, 5]))]  # fmt: skip
    ends = [{"iteration": 1, "validation_accuracy": 0.5}, {"iteration": 3, "validation_accuracy": 0.75},
            {"iteration": 3, "validation_accuracy": 0.25, "is_final": True},
            {"iteration": 3, "test_accuracy": 0.9, "is_final": True}]  # fmt: skip
    result = summarise([*steps, *ends], metric="accuracy", num_parameters=10)
    assert result["test"] == pytest.approx(0.1) and result["validation"] == 0.5
    assert result["curve"] == ((1, 0.5), (3, 0.25))
    assert (result["state_bytes_per_parameter"], result["host_bytes_per_parameter"], result["step_ms"]) == (
        4.0,
        0.8,
        11.0,
    )
    assert summarise([*steps, {"iteration": 3, "test_loss": None}], metric="loss", num_parameters=None)["test"] is None
    with pytest.raises(ValueError, match="test_loss"):
        summarise(steps, metric="loss", num_parameters=1)


def test_whole_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tuning, seeds, table and pictures from end to end; a second start runs nothing; a failure names its reason."""
    methods = {"full": {"flags": "--gain 1"}, "fast": {"flags": "--gain 0.5", "label": "fast one"},
               "broken": {"flags": "--gain x"}}  # fmt: skip
    path = written(tmp_path, study_of(tmp_path, methods=methods))
    command = [str(path), "--output", str(tmp_path / "out"), "--jobs", "4"]
    assert tool.main(command) == 1, "a method failed"
    said = capsys.readouterr()
    assert said.err.count("start model none fast") == 4 and "| broken | failed: " in said.out
    output = {result.key[2:5]: result for result in read_results(tmp_path / "study.csv")}
    assert {key[0] for key in output} == {"full", "fast"} and len(output) == 8, "a failure is tried again"
    full = output["full", 0.2, 2]
    assert (full.test, full.state_bytes_per_parameter, full.num_parameters) == (pytest.approx(1.12), 16, 10)
    assert full.curve[0] == (1, pytest.approx(1.02))
    assert (tmp_path / "study.md").read_text(encoding="utf-8")
    pictures = sorted(path.name for path in (tmp_path / "out" / "study").glob("*.png"))
    assert pictures == ["study_cost.png", "study_state.png"]
    assert tool.main([*command, "--only", "f*"]) == 0
    assert "start" not in capsys.readouterr().err


def test_studies_of_the_project(repo_root: Path, tmp_path: Path) -> None:
    """Every study file of the project is accepted, and its results have every run that the table uses."""
    paths = sorted((repo_root / "studies").glob("*.yaml"))
    assert paths
    for path in paths:
        study, results = read_study(str(path)), read_results(path.with_suffix(".csv"))
        commands = Commands(study=study, texts={}, data_folder=tmp_path, folder=tmp_path)
        table = Table(study, Runner(commands, path.with_suffix(".csv")).lookup,
                      arithmetic=lambda point: None, step_ms=lambda point: None)  # fmt: skip
        assert table.rows and set(table.used) <= {result.key for result in results}


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--bcd-num-blocks 3", 2 / 3),
        ("--bcd-num-blocks 3 --bcd-layout strided", (6 + 5 + 2) / 18),  # prefixes of 0, 1 and 2 layers
        ("--bcd-num-blocks 3 --bcd-always-active norms", 7 / 9),
        ("--bcd-num-blocks 3 --bcd-inactive-update factored", 1.0),
        ("--bcd-num-blocks 3 --bcd-inactive-update orthogonal", 1 + 2 / 3 * NEWTON_SCHULZ),
        ("--bcd-num-blocks 1 --optimizer muon", 1 + NEWTON_SCHULZ),
        ("--bcd-num-blocks 7", None),
    ],
)
def test_arithmetic(flags: str, expected: float | None) -> None:
    """Weight gradients of inactive layers and orthogonalisation count, and a refused method has no figure."""
    shape = "--num-layers 6 --hidden-size 64 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16"
    batch = "--micro-batch-size 2 --global-batch-size 4 --train-iters 1 --lr 1e-3 --tokenizer-type ByteLevelTokenizer"
    actual = flags_arithmetic("gpt", f"{shape} {batch} {flags}".split())
    assert actual == pytest.approx(expected) if expected is not None else actual is None


def test_results_count_if_their_command_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A result counts only if its command is the same, in any output folder."""
    path = written(tmp_path, study_of(tmp_path))
    assert tool.main([str(path), "--output", str(tmp_path / "first")]) == 0
    again = [str(path), "--output", str(tmp_path / "second"), "--list"]

    def num_runs() -> int:
        capsys.readouterr()
        assert tool.main(again) == 0
        return len(capsys.readouterr().out.splitlines()) - 1

    assert num_runs() == 0
    content = path.read_text(encoding="utf-8")
    path.write_text(content.replace("--gain 0.5", "--gain 0.6"), encoding="utf-8")
    assert content.count("--gain 0.5") and num_runs() > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_minute_study_gives_its_committed_table(repo_root: Path, tmp_path: Path) -> None:
    """The ten-minute study gives its committed table."""
    path, results = repo_root / "studies" / "gpt_10_minutes.yaml", tmp_path / "results.csv"
    text = tmp_path / "tinyshakespeare" / "input.txt"
    text.parent.mkdir()
    text.write_bytes(lzma.decompress((repo_root / "tests" / "data" / "tinyshakespeare.txt.xz").read_bytes()))
    words = [str(path), "--output", str(tmp_path), "--data", str(tmp_path), "--results", str(results)]
    assert tool.main(words) == 0
    output, committed = (
        {result.key: result for result in read_results(file)} for file in (results, path.with_suffix(".csv"))
    )
    assert output.keys() == {key for key, item in committed.items() if not item.rounds}
    for key, entry in output.items():
        assert entry.test == pytest.approx(committed[key].test, abs=0.05), key
        assert entry.state_bytes_per_parameter == pytest.approx(committed[key].state_bytes_per_parameter, rel=0.01)
