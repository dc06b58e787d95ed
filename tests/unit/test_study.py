"""The studies: their pages are what their results give, their data runs no code, and the faults that a soak finds."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cifar
import gpu_hour
import gpu_hour_jobs
import gpu_hour_report
import pytest
import soak
import train_resnet
from results import Table, read_study
from study import Commands, Runner, step_arithmetic
from support.unsafe_pickles import TRICKS, text


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
        page = table.markdown(command=f"python studies/study.py studies/{path.name}", timing=runner.timing)
        assert path.stem == "gpt_10_minutes" or page == path.with_suffix(".md").read_text(encoding="utf-8")


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


@pytest.mark.parametrize("trick", TRICKS)
def test_a_file_that_could_run_code_is_refused(tmp_path: Path, trick: str) -> None:
    """A file that could run code is refused in one line, and its code does not run."""
    marker = tmp_path / "MARKER"
    body = TRICKS[trick].replace(text("touch MARKER"), text(f"touch {marker}"))
    (tmp_path / "test_batch").write_bytes(b"\x80\x04" * (body[:1] != b"\x80") + body + b".")
    with pytest.raises(ValueError, match="test_batch: ") as caught:
        cifar.read_split(str(tmp_path), "cifar10", "test")
    assert not marker.exists()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("name", "parameters", "layers"),
    [("resnet8", 78_042, 3), ("resnet14", 175_258, 6), ("resnet20", 272_474, 9), ("resnet50", 23_520_842, 16)],
)
def test_models_are_those_of_the_paper(name: str, parameters: int, layers: int) -> None:
    """The models have the paper's numbers of parameters and residual blocks: ResNet-14's 175,258 parameters explain the
    paper's table 10."""
    model = train_resnet.build_resnet(name, 10)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(train_resnet.residual_blocks(model)) == layers
