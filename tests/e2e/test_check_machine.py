"""tools/check_machine.py: a broken part of made-up runs fails under its own name. The tool as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import check_machine
import psutil
import pytest
from _processes import CannotRun
from _processes import run as start
from _self_test import FAIL, FLAGS, PASS, SKIP, Check, Runner, SelfTest, Steps

from megatron.bcd.planner.tables import Cluster, choose, read_table

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "examples" / "clusters.csv"
ABSENT = {"is_absent": True, "error": ""}
PROBED = {"torch": "2.13.0", "cuda": None, "has_cuda": False, "nccl": None, "gpus": [], "cores": 2}
PROBED |= {"transformer_engine": ABSENT, "apex": ABSENT, "missing_for_compilation": ""}
GPU = {"name": "NVIDIA GeForce RTX 4090", "memory_gib": 23.6}
RATES = {"device": "cpu", "links": {"by_pair": {"0-1": 1.5}, "all_reduce": 0.75}, "device_bytes": 2**33}
RATES |= {"fp32_tflops": 0.05, "bf16_tflops": 0.02, "memory_gb_per_s": 10.0}


def only_failure(checks: list[Check]) -> Check:
    [check] = [check for check in checks if check.verdict == FAIL]
    assert check.remedy, "what to do is not said"
    return check


class Recorded(Runner):
    """Runs with equal results; the killed one leaves a checkpoint."""

    def prepare(self) -> None: ...

    def train(self, name: str, flags: Mapping[str, Any], **_: Any) -> Steps:
        steps = []
        for index in range(flags["train_iters"]):
            phase = index // flags.get("bcd_steps_per_block", 100)
            about = {"iteration": index + 1, "cycle": phase // 2, "block": phase % 2, "prefix_cache_hits": 8}
            about |= {"loss": 6 - 0.1 * index, "grad_norm": 1 + index}
            steps.append(about)
        return tuple({"killed": [], "resumed": steps[4:]}.get(name, steps))


def self_test(tmp_path: Path, kind: type[Runner] = Recorded, *, num_ranks: int = 2) -> list[Check]:
    runner = kind(folder=tmp_path, num_ranks=num_ranks, on_gpu=False, flags=FLAGS)
    return list(SelfTest(runner=runner, fp32="fp32").checks())


@pytest.mark.parametrize(("num_ranks", "num_passed"), [(1, 3), (2, 10)])
def test_a_machine_that_holds(tmp_path: Path, num_ranks: int, num_passed: int) -> None:
    """A sound machine passes every part that its number of ranks allows, and skips the others."""
    verdicts = [check.verdict for check in self_test(tmp_path, num_ranks=num_ranks)]
    assert (verdicts.count(PASS), verdicts.count(SKIP)) == (num_passed, 11 - num_passed)


BROKEN: dict[str, tuple[str, str, Any]] = {
    "one block, bf16": ("bf16", "loss", 7.0),
    "tensor parallel": ("tensor_model_parallel_size", "grad_norm", 99.0),
    "layout interleaved": ("interleaved", "loss", 7.0),
    "kill and resume": ("resumed", "loss", 1e-6),
    "prefix cache": ("bcd_prefix_cache", "prefix_cache_hits", 0),
}
"""By part: the run that is wrong on two ranks (by name, flag or value), and what is wrong in its last line."""


@pytest.mark.parametrize("part", BROKEN)
def test_a_broken_part(tmp_path: Path, part: str) -> None:
    """A run that is wrong fails its own part, and no other."""
    which, field, value = BROKEN[part]

    class Wrong(Recorded):
        def train(self, name: str, flags: Mapping[str, Any], **options: Any) -> Steps:
            run = super().train(name, flags, **options)
            wrong = {which} & {name, *flags} or which in flags.values()
            if not wrong or options.get("num_ranks", 2) != 2:
                return run
            new = run[-1]["loss"] + value if part == "kill and resume" else value
            steps = run if field == "prefix_cache_hits" else run[-1:]
            return (*run[: len(run) - len(steps)], *({**step, field: new} for step in steps))

    assert only_failure(self_test(tmp_path, Wrong)).part == part


@pytest.mark.parametrize(("version", "package"), [(None, "numpy"), ("0.15.3", "megatron-core")])
def test_a_package(version: str | None, package: str) -> None:
    """A missing or wrong package fails under its name, with the version to install."""
    pins = check_machine.pins()
    result = list(check_machine.check_packages(version_of=lambda name: version if name == package else pins[name]))
    check = only_failure(result)
    assert check.part == f"package {package}" and f"{package}=={pins[package]}" in check.remedy
    assert "pytest" not in pins, "tests' packages are not for running"


def test_an_unwritable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unwritable folder skips the self-test and ends with code 1, and --json creates its own folder."""
    monkeypatch.setattr(check_machine, "probe", lambda: PROBED)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert check_machine.main(["--output", "file/out", "--json", "out/machine.json"]) == 1
    results = {check["part"]: check for check in json.loads(Path("out/machine.json").read_text())["checks"]}
    assert [part for part, check in results.items() if check["verdict"] == FAIL] == ["folder"]
    assert results["self-test"]["verdict"] == SKIP and "folder" in results["self-test"]["detail"]


@pytest.mark.parametrize(
    ("probed", "part"),
    [
        ({"gpus": [GPU, GPU | {"name": "NVIDIA T4"}]}, "gpus"),
        ({"gpus": [GPU] * 4, "cores": 2}, "cores"),
        ({"missing_for_compilation": "a C compiler"}, "compiler"),
        ({"transformer_engine": {"is_absent": False, "error": "undefined symbol"}}, "transformer engine"),
        ({"apex": {"is_absent": False, "error": "No module named 'amp_C'"}}, "apex"),
    ],
)
def test_a_gpu_machine(monkeypatch: pytest.MonkeyPatch, probed: dict[str, Any], part: str) -> None:
    """A sound GPU machine has no failures, and each broken part fails under its own name."""
    on_gpu = PROBED | {"has_cuda": True, "nccl": "2.28.3", "cuda": "13.0", "gpus": [GPU], "cores": 64}
    monkeypatch.setattr(check_machine, "_output", lambda *_: "580.1")
    assert all(check.verdict != FAIL for check in check_machine.check_torch(on_gpu))
    assert only_failure(list(check_machine.check_torch(on_gpu | probed))).part == part


def test_a_slow_link() -> None:
    """A link below its table's rate, or below 1 GB/s without one, fails and names its ranks; one rank skips it."""
    known = check_machine.known_gpu(GPU["name"], read_table(TABLE, Cluster))
    assert check_machine.check_links(RATES, None).verdict == PASS
    slow = RATES | {"device": "cuda"} | {"links": {"by_pair": {"0-1": 30.0, "1-2": 0.9}, "all_reduce": 0.5}}
    for cluster in (known, None):
        check = check_machine.check_links(slow, cluster)
        assert (check.part, check.verdict) == ("link", FAIL) and "ranks 1-2" in check.detail
    one_rank = {name: value for name, value in RATES.items() if name != "links"}
    assert check_machine.check_links(one_rank, known).verdict == SKIP


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA B200", None),
    ],
)
def test_cuda_names_of_the_tables_gpus(name: str, row: str | None) -> None:
    """CUDA's name of a GPU chooses its row of the table, and no row for a card that the table lacks."""
    result = check_machine.known_gpu(name, read_table(TABLE, Cluster))
    assert (result and result.name) == row
    if result is not None:
        assert (result.link_gb_per_s <= 20) == ("PCIe" in name or row == "rtx4090")


def test_a_row_of_the_cluster_table(tmp_path: Path) -> None:
    """The planner reads a calibrated row, and the next calibration replaces it."""
    like = read_table(TABLE, Cluster)["a100"]
    row = check_machine.cluster_row(RATES, gpu="a CPU", known=None, like=like, num_ranks=2)
    for table in (TABLE, tmp_path / "clusters.csv"):
        check_machine.write_table(table, row, tmp_path / "clusters.csv")
    clusters = read_table(tmp_path / "clusters.csv", Cluster)
    assert choose(clusters, "this-machine", flag="--gpu") == row
    assert [*clusters] == [*read_table(TABLE, Cluster), "this-machine"]
    assert (row.fp32_tflops, row.memory_gib, row.network_gb_per_s, row.usd_per_gpu_hour) == (0.05, 8.0, 1.5, 0)
    assert row.compute_share == like.compute_share


def test_a_run_that_hangs(tmp_path: Path) -> None:
    """A hanging run is killed at its time limit, or once it has done what it was started for. A failed run is reported
    with its exit code and output."""
    log = tmp_path / "log"
    sleeping = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
    with pytest.raises(CannotRun, match="did not end within 3 s"):
        start(sleeping, log, seconds=3)
    assert not psutil.pid_exists(int(log.read_text()))
    start(sleeping, log, seconds=600, until=lambda: log.read_text().endswith("\n"))
    assert not psutil.pid_exists(int(log.read_text()))
    with pytest.raises(CannotRun, match="3.*why"):
        start([sys.executable, "-c", "print('why'); raise SystemExit(3)"], log)


def checked(root: Path, folder: Path, *words: str, failing: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Return the checks by part, on a machine where exactly these parts fail."""
    report = folder / "report.json"
    command = [sys.executable, "tools/check_machine.py", "--json", str(report), "--output", str(folder / "out"), *words]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == bool(failing), done.stdout + done.stderr
    results = {check["part"]: check for check in json.loads(report.read_text())["checks"]}
    assert tuple(part for part, check in results.items() if check["verdict"] == "FAIL") == failing
    assert all(f"FAIL {part}" in done.stderr and results[part]["remedy"] for part in failing)
    return results


def test_without_a_self_test(repo_root: Path, tmp_path: Path) -> None:
    """--no-self-test finds no fault of this machine, asks torch, and starts no run."""
    result = checked(repo_root, tmp_path, "--no-self-test", "--num-ranks", "1")
    assert result["torch"]["figures"]["torch"] and "start" not in result


def test_nothing_is_installed(repo_root: Path, tmp_path: Path) -> None:
    """The tool runs without any package, and reports those that are missing."""
    command = [sys.executable, "-S", "tools/check_machine.py", "--output", str(tmp_path)]  # without site-packages
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 1 and "FAIL package psutil" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_self_test(repo_root: Path, tmp_path: Path) -> None:
    """No part fails on a machine without a fault, and the measured rates are stored."""
    result = checked(repo_root, tmp_path, "--num-ranks", "2", "--calibrate")
    verdicts = {part: check["verdict"] for part, check in result.items()}
    after_start = [*verdicts][[*verdicts].index("start") :]
    left_out = [part for part in after_start if verdicts[part] == "SKIP"]
    assert len(left_out) == 1, left_out
    assert result["rates"]["figures"]["bf16_tflops"] > 0
    assert (tmp_path / "out" / "clusters.csv").read_text().splitlines()[-1].startswith("this-machine,")
