"""studies/gpu_hour.py: which jobs it repeats, what it records, and its report."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_hour
import gpu_hour_jobs
import gpu_hour_report
import kernel_kinds
import pytest
from gpu_hour_jobs import Job, Setting

WRITES_METRICS = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'iteration': 1, 'loss': 2.0}) + '\\n')"


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(is_tiny=True, has_gpu=False, memory_gib=0, inputs=tmp_path / "inputs", output=tmp_path)


@pytest.fixture
def run_jobs(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> Callable[..., gpu_hour.Runner]:
    """Run jobs as the part `speed` and return the runner."""

    def run(*jobs: Job, seconds: float = 60) -> gpu_hour.Runner:
        monkeypatch.setitem(gpu_hour_jobs.JOBS, "speed", lambda setting, results: list(jobs))
        runner = gpu_hour.Runner(setting, time.monotonic() + seconds)
        runner.run_part("speed")
        return runner

    return run


def job(name: str, program: str, **values: Any) -> Job:
    return Job(**{"name": name, "words": (sys.executable, "-c", program, "{metrics}"), "seconds": 30} | values)


def test_a_job_is_recorded_and_not_run_again(run_jobs: Callable[..., gpu_hour.Runner], tmp_path: Path) -> None:
    """A record has the metrics and the command of its job, which does not run again."""
    run_jobs(job("trains", WRITES_METRICS, about={"method": "paper", "lr": 0.1}))
    record = gpu_hour.read_results(tmp_path / "results", "speed")["trains"]
    assert record["metrics"] == [{"iteration": 1, "loss": 2.0}] and record["failure"] == ""
    assert record["method"] == "paper" and record["command"].startswith("python -c") and record["commit"]
    run_jobs(job("trains", "raise ValueError('started again')"))
    assert gpu_hour.read_results(tmp_path / "results", "speed") == {"trains": record}


def test_a_failure_and_a_time_limit_are_recorded(run_jobs: Callable[..., gpu_hour.Runner], tmp_path: Path) -> None:
    """A failure and a time limit are recorded, and the next job runs."""
    runner = run_jobs(
        job("fails", "raise ValueError('bad luck')", kind="plain"),
        job("hangs", "import time; time.sleep(60)", seconds=1, kind="plain"),
        job("works", WRITES_METRICS),
    )
    records = gpu_hour.read_results(tmp_path / "results", "speed")
    assert "bad luck" in records["fails"]["failure"] and records["hangs"]["failure"] == "ran out of time"
    assert not records["works"]["failure"] and runner.num_failed == 2


def test_nothing_starts_that_could_end_too_late(run_jobs: Callable[..., gpu_hour.Runner], tmp_path: Path) -> None:
    """A job that could end after the time limit does not start, and counts as left."""
    runner = run_jobs(job("long", WRITES_METRICS, seconds=100), job("short", WRITES_METRICS, seconds=5), seconds=20)
    assert list(gpu_hour.read_results(tmp_path / "results", "speed")) == ["short"] and runner.num_left == 1


def test_an_unfinished_line_of_results_is_ignored(tmp_path: Path) -> None:
    """An unfinished line of results is ignored."""
    (tmp_path / "speed.jsonl").write_text('{"job": "a", "failure": ""}\n{"job": "b", "fai')
    assert list(gpu_hour.read_results(tmp_path, "speed")) == ["a"]


def test_the_report_is_the_page_of_the_project(repo_root: Path) -> None:
    """The report of the project's results is its page."""
    results = {
        part: list(gpu_hour.read_results(gpu_hour_report.RESULTS, part).values()) for part in gpu_hour_jobs.PARTS
    }
    page = (repo_root / "studies" / "gpu_hour.md").read_text(encoding="utf-8")
    assert page.splitlines() == list(gpu_hour_report.page_lines(results))


def test_the_allocator_is_limited(setting: Setting, tmp_path: Path) -> None:
    """A run for a card of 24 GB runs its script under a limit of the allocator, and passes on its flags."""
    jobs = {job.name: job for job in gpu_hour_jobs.speed(setting, {})}
    words = jobs["8b_breadth_first_host"].words
    assert words[1:4] == ("-c", gpu_hour_jobs.LIMITED, "22.6") and "--bcd-layers-on" in words
    script = tmp_path / "script.py"
    script.write_text("import sys; print(__name__, sys.argv[1:])")
    done = subprocess.run([*words[:4], script, "--flag"], capture_output=True, text=True, check=True)
    assert done.stdout == "__main__ ['--flag']\n"


def test_kernels_of_a_step_by_kind() -> None:
    """Overlapping kernels are busy once, copies between host and device are not busy, and a gap is idle."""
    names = ("nvjet_sm90_tst", "triton_poi_fused_add", "Memcpy HtoD (Pinned -> Device)", "nvjet_sm90_tst")
    times = ((0, 1000), (500, 1000), (0, 9000), (4500, 1500))
    events = [
        {"cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, (ts, dur) in zip(names, times, strict=True)
    ]
    table = kernel_kinds.kernel_table(
        {"traceEvents": [*events, {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9}]}
    )
    assert (table["ms"], table["busy"], table["idle"]) == (6.0, 3.0, 3.0)
    assert table["kinds"]["matrix products"] == [2.5, 2] and table["kinds"]["compiled"] == [1.0, 1]
    assert table["gaps"] == {"3.00 ms behind triton_poi_fused_add": "nvjet_sm90_tst"}
