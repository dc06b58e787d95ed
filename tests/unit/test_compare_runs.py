"""tools/compare_runs.py: which differences count, and which runs it starts."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import compare_runs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from compare_runs import IGNORED_FIELDS, Task, read_metrics, run_difference

STEP = {"iteration": 1, "loss": 5.5, "learning_rate": 1e-3, "grad_norm": None, "gradient_bytes": [0, 4]}
TIMES = dict.fromkeys(IGNORED_FIELDS, 1.5)
EVALUATION = {"iteration": 1, "validation_loss": 5.25, "is_final": True}


def write_metrics(folder: Path, *lines: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def difference(tmp_path: Path, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str | None:
    sides = (read_metrics(write_metrics(tmp_path / name, *lines)) for name, lines in (("a", before), ("b", after)))
    return compare_runs.metrics_difference(*sides)


def test_what_is_a_difference(tmp_path: Path) -> None:
    """One differing bit, a new field or a missing line is a difference, and times are none."""
    assert difference(tmp_path, [STEP | TIMES, EVALUATION], [dict.fromkeys(TIMES, 7) | STEP, EVALUATION]) is None
    changes = {"loss": 5.500000000000001, "gradient_bytes": [0, 5], "grad_norm": 0.0, "more": 1}
    for field, value in changes.items():
        told = difference(tmp_path, [STEP, EVALUATION], [STEP | {field: value}, EVALUATION | {"iteration": 2}])
        assert told is not None and f"iteration 1, {field}" in told
    assert difference(tmp_path, [{"loss": 0.0}], [{"loss": -0.0}]), "equal in Python"
    assert difference(tmp_path, [{"loss": 1.0}], [{"loss": 1}]), "equal in Python"
    assert difference(tmp_path, [STEP, EVALUATION], [STEP])


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder / "iter_0000003"), no_dist=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("3")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_last_checkpoints_are_compared(tmp_path: Path) -> None:
    """The weights of the last checkpoints are compared, with their dtypes."""
    weight = torch.ones(2, 3, dtype=torch.bfloat16)
    other = weight.clone()
    other[1, 2] = 1.0078125  # the next number
    for name, tensor in (("a", weight), ("b", weight.clone()), ("c", other), ("d", weight.float())):
        write_metrics(tmp_path / name, STEP)
        save(tmp_path / name / "checkpoints", {"layer.weight": tensor})
    assert run_difference(tmp_path / "a", tmp_path / "b") is None
    for name in ("c", "d"):
        result = run_difference(tmp_path / "a", tmp_path / name)
        assert result is not None and result.startswith("last checkpoint, layer.weight")
    assert compare_runs.read_checkpoint(tmp_path / "a" / "checkpoints")["iteration"] == "3"


# A checkout whose runs take no time: what it writes depends on its number and on what is asked for.
FAKE = """
import json, sys
from pathlib import Path
NUMBER = {number}
folder = Path(sys.argv[sys.argv.index("--metrics-file") + 1]).parent
if "--bf16" in sys.argv and NUMBER == 3:
    sys.exit("prog: error: no bf16 here")
(folder / "metrics.jsonl").write_text(json.dumps({{"iteration": 1, "loss": NUMBER if "--bf16" in sys.argv else 0}}))
"""


def fake_checkout(folder: Path, number: int) -> Path:
    for name in ("megatron", "tools", "examples"):
        (folder / name).mkdir(parents=True)
    for script in ("pretrain_gpt_bcd.py", "pretrain_llama_bcd.py"):
        (folder / script).write_text(FAKE.format(number=number))
    return folder


@pytest.mark.parametrize("number, told", [(2, "iteration 1, loss"), (3, "after ended with code 1")])
def test_runs_of_both_sides_are_compared(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, number: int, told: str
) -> None:
    """Each side runs its own code, and a run that differs or fails is reported."""
    monkeypatch.setattr(compare_runs, "read_checkpoint", lambda folder: {})
    checkouts = {"before": fake_checkout(tmp_path / "a", 1), "after": fake_checkout(tmp_path / "b", number)}
    task = Task(checkouts=checkouts, output=tmp_path / "out", stop=threading.Event())
    assert compare_runs.compare_all(compare_runs.choose_configurations("mock-data,bf16"), task, jobs=2) == ["bf16"]
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["mock-data"] == "equal" and lines["bf16"].startswith(told)


def test_a_changed_configuration_is_found(tmp_path: Path) -> None:
    """A changed value and a new refusal are differences; a default and a refusal that is gone are none."""
    before = {"a": {"lr": 1e-3, "bf16": False}, "refused": "--lr: must be given"}
    assert compare_runs.first_difference(before, {"a": {"lr": 1e-3}, "refused": {"lr": 1e-3}}) is None
    assert "lr" in str(compare_runs.first_difference(before, {"a": {"lr": 2e-3, "bf16": False}, "refused": "x"}))
    assert "refused" in str(compare_runs.first_difference(before, {"a": "--lr: must be given", "refused": "x"}))


def test_every_start_has_a_command_line() -> None:
    """Every start has a command line."""
    configurations = compare_runs.choose_configurations(None)
    lines = compare_runs.command_lines(configurations)
    assert len(lines) == sum(map(len, configurations.values())) and "one-block, start 1" in lines
