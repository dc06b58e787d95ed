"""studies/gpu_hour.py: which jobs it repeats, what it records, and its report."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
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


def test_a_recorded_job_is_not_run_again(run_jobs: Callable[..., gpu_hour.Runner], tmp_path: Path) -> None:
    """A recorded job is not run again."""
    mark = tmp_path / "mark"
    counting = job("counts", f"open({str(mark)!r}, 'a').write('x')", kind="plain")
    run_jobs(counting)
    run_jobs(counting)
    assert mark.read_text() == "x"


def test_records_have_metrics_command_and_hardware(run_jobs: Callable[..., gpu_hour.Runner], tmp_path: Path) -> None:
    """A record has the metrics, the command, the commit and the versions of its job."""
    run_jobs(job("trains", WRITES_METRICS, about={"method": "paper", "lr": 0.1}))
    record = gpu_hour.read_results(tmp_path / "results", "speed")["trains"]
    assert record["metrics"] == [{"iteration": 1, "loss": 2.0}] and record["failure"] == ""
    assert (
        record["method"] == "paper"
        and record["torch"]
        and record["command"].startswith("python -c")
        and record["commit"]
    )


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


def record_of(name: str, loss: float, **values: Any) -> dict[str, Any]:
    steps = [
        {"iteration": step, "phase": 0, "block": 0, "loss": loss, "step_time_ms": 100.0, "tokens_per_second": 1e5,
         "model_state_bytes": [2**30], "peak_memory_bytes": [2**31]}
        for step in range(1, 11)
    ]  # fmt: skip
    lines = [*steps, {"iteration": 10, "validation_loss": loss}]
    about = {"gpu": "NVIDIA H100 80GB HBM3", "torch": "2", "cuda": "13", "python": "3", "megatron_core": "0"}
    about |= {"transformers": "5", "commit": "abc", "failure": "", "log": [], "command": "python x"}
    return {"job": name, "metrics": lines, **about, **values}


def test_full_adam_gets_a_third_rate_beyond_its_better_one(setting: Setting) -> None:
    """Full Adam gets a third rate beyond the better one of two."""
    setting.data.mkdir()
    for split in ("train", "valid"):
        (setting.data / f"{split}_text_document.idx").touch()
    results = {"rate": record_of("rate", 9.0)}
    results |= {f"full_adam-{lr:g}": record_of("x", loss) for lr, loss in ((6e-4, 3.0), (1.2e-3, 2.0))}
    for losses, third in (((3.0, 2.0), 2.4e-3), ((2.0, 3.0), 3e-4)):
        results |= {f"full_adam-{lr:g}": record_of("x", loss) for lr, loss in zip((6e-4, 1.2e-3), losses, strict=True)}
        jobs = gpu_hour_jobs.learning(replace(setting, is_tiny=False), results)
        assert jobs[-1].name == f"full_adam-{third:g}" and "--train-iters 900" in " ".join(jobs[-1].words)


def test_deciding_methods_get_more_seeds_at_their_best_rate(setting: Setting) -> None:
    """A deciding method gets two more seeds at its best rate, and none before its rates are measured."""
    table, full = {"full_adam": (1e-4, 2e-4), "six_blocks": (1e-4,)}, replace(setting, is_tiny=False)
    names = lambda results: [job.name for job in gpu_hour_jobs.task_jobs(full, results, "", table)]  # noqa: E731
    assert "full_adam-0.0002-seed2" not in names({})
    results = {f"full_adam-{lr:g}-seed1": record_of("x", loss) for lr, loss in ((1e-4, 3.0), (2e-4, 2.0))}
    assert {"full_adam-0.0002-seed2", "full_adam-0.0002-seed3"} <= set(names(results))


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report shows each method's numbers in their columns beside its name."""
    monkeypatch.setattr(gpu_hour_report, "RESULTS", tmp_path)
    learning = [
        record_of(f"{name}-1", loss, method=name, lr=1e-3) for name, loss in (("paper", 4.0), ("pretrain", 3.0))
    ]
    tuned = [
        record_of(f"full_adam-{seed}", loss, method="full_adam", lr=1e-4, scores={"chichewa": 1.0, "english": 2.5})
        for seed, loss in ((1, 2.0), (2, 2.2))
    ]
    for part, records in (("learning", learning), ("fine_tuning", tuned)):
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    results = {part: list(gpu_hour.read_results(tmp_path, part).values()) for part in gpu_hour_jobs.PARTS}
    text = "\n".join(gpu_hour_report.page_lines(results))
    assert "| `paper` | 0.001 | 10 | 0.1 | 4.000 | 100,000 | 1.00 | 2.0 |" in text
    assert "| full Adam | 0.0001 | 2 | 2.100 ± 0.141 | 1.000 | 2.500 | 1,024 |" in text
    assert [label for label, *_ in gpu_hour_report.best_curves(learning)] == ["paper, 0.001", "pretrain, 0.001"]


def test_report_compares_schedules() -> None:
    """The share of copies that is not hidden compares runs of breadth-first order, without those of frozen layers."""

    def record(job: str, milliseconds: float) -> dict[str, Any]:
        line = {"step_time_ms": milliseconds, "tokens_per_second": 1.0, "peak_memory_bytes": [2**30]}
        return {"job": job, "gpu": "GPU", "failure": "", "metrics": [line | {"host_state_bytes": [2**31]}] * 4}

    runs = [
        record("8b_depth_first_device", 700.0), record("8b_breadth_first_device", 900.0),
        record("8b_breadth_first_host", 1000.0), record("8b_host", 5.0),
    ]  # fmt: skip
    rows = {tuple(row[2:4]): tuple(row[4:]) for row in gpu_hour_report.every_layer({"speed": runs})}
    assert rows["breadth-first", "host"] == ("1,000", "1", "10 %", "1.0 GiB", "0.0 GiB", "2.0 GiB")
    assert rows["depth-first", "device"][2] == ""


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
