"""studies/study.py: study files, tuning, and a whole study with a program that takes no time."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import results
import study as tool
import yaml
from results import Lookup, Result, Run, Study, Table, points, read_results, read_study
from study import Commands, Runner, step_arithmetic

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


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"learning_rates": [0.1, 0.1]}, "learning_rates"),
        ({"baseline": "ful"}, "baseline"),
        ({"flags": "--steps {step}"}, "{step}"),
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
    assert pictures == ["study_state.png"]
    assert tool.main([*command, "--only", "f*"]) == 0
    assert "start" not in capsys.readouterr().err


def test_studies_of_the_project(repo_root: Path, tmp_path: Path) -> None:
    """Every study file of the project is accepted, and its page is what its results give."""
    paths = sorted((repo_root / "studies").glob("*.yaml"))
    assert paths
    for path in paths:
        study = read_study(str(path))
        commands = Commands(study=study, texts={}, data_folder=tmp_path, folder=tmp_path)
        runner = Runner(commands, path.with_suffix(".csv"))
        arithmetic = cache(partial(step_arithmetic, commands))
        table = Table(study, runner.lookup, arithmetic=arithmetic, step_ms=runner.step_ms)
        assert table.rows and not any(row.failure for row in table.rows)
        text = table.markdown(command=f"python studies/study.py studies/{path.name}", timing=runner.timing)
        assert path.stem == "gpt_10_minutes" or text == path.with_suffix(".md").read_text(encoding="utf-8")


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
