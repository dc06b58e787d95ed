"""The studies: study files, a whole study with a program that takes no time, pages, and the faults of a soak."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_hour
import gpu_hour_jobs
import gpu_hour_report
import pytest
import soak
import study as tool
import yaml
from results import Study, Table, read_results, read_study
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


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"baseline": "ful"}, "baseline"),
        ({"flags": "--steps {step}"}, "{step}"),
    ],
)
def test_bad_study_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], key: str) -> None:
    """A bad study file is refused in one line that names the file and the key."""
    path = written(tmp_path, study_of(tmp_path, **changes))
    assert tool.main([str(path), "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert str(path) in said and key in said and said.count("\n") == 1


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


def test_the_page_of_the_gpu_hours(repo_root: Path) -> None:
    """The report of the GPU hours' results is their page."""
    records = {
        part: list(gpu_hour.read_results(gpu_hour_report.RESULTS, part).values()) for part in gpu_hour_jobs.PARTS
    }
    page = (repo_root / "studies" / "gpu_hour.md").read_text(encoding="utf-8")
    assert page.splitlines() == list(gpu_hour_report.page_lines(records))


def faults(*changes: dict[str, Any], consumed: int = 12) -> str:
    """Return the faults of replica groups that train a step after an exchange, with batches of 2."""
    exchange = {"iteration": 4, "consumed_samples": 8, "groups": 2, "lineage": 1, "values": 7}
    step = {"iteration": 5, "consumed_samples": consumed, "loss": 1.0}
    lines = [[exchange | {"group": number} | change, step] for number, change in enumerate(changes)]
    return " ".join(soak.disagreements([SimpleNamespace(name="a", lines=line) for line in lines], 2)[0])  # type: ignore[misc]


def test_faults_of_replica_groups() -> None:
    """studies/soak.py reports groups with different bits or sample counts, and groups that train the same samples."""
    assert faults({}, {}) == ""
    assert "differ" in faults({}, {"values": 8}) and "differ" in faults({}, {"consumed_samples": 6}, consumed=12)
    assert "one number" in faults({}, {"group": 0}) and "trained twice" in faults({}, {"group": 0})
    assert "10 samples" in faults({}, {}, consumed=10)
