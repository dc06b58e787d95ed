"""The reports of a run: console lines, metrics file, TensorBoard and Weights & Biases."""

import dataclasses
import io
import json
import math
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

from megatron.bcd.config import ReportConfig
from megatron.bcd.metrics.console import step_line
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.metrics.schema import EvalMetrics, StepMetrics

MIB = 2**20
REQUIRED_KEYS = {
    *("iteration", "consumed_samples", "cycle", "phase", "block", "loss", "learning_rate", "grad_norm"),
    *("step_time_ms", "tokens_per_second", "model_state_bytes", "peak_memory_bytes"),
}


def collect_step_metrics(iteration: int = 10, **changes: Any) -> StepMetrics:
    record = StepMetrics(
        iteration=iteration,
        consumed_samples=16 * iteration,
        cycle=0,
        phase=1,
        block=1,
        loss=9.87654321987654,
        learning_rate=1e-3 / 3,
        grad_norm=1.2344,
        step_time_ms=123.44,
        tokens_per_second=16384.2,
        model_state_bytes=(40 * MIB, 45 * MIB),
        peak_memory_bytes=(123 * MIB, 99 * MIB),
    )
    return dataclasses.replace(record, **changes)


def eval_record(iteration: int = 10, *, split: str = "validation", loss: float = 2.0) -> EvalMetrics:
    return EvalMetrics(iteration=iteration, consumed_samples=16 * iteration, split=split, loss=loss)


def log_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def quiet(start_iteration: int = 0, **report: Any) -> Reporter:
    """Build a reporter with these flags and a console without output."""
    return Reporter(ReportConfig(**report), train_iters=60, start_iteration=start_iteration, console=log_console())


def metrics(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_metrics_lines(tmp_path: Path) -> None:
    """A step's line has all keys and exact floats and is flushed at once; an evaluation has the loss of its split."""
    path = tmp_path / "new" / "folder" / "m.jsonl"
    with quiet(metrics_file=str(path)) as reporter:
        reporter.phase(iteration=9, cycle=0, phase=1, block=1, switch_time_ms=12.5)
        reporter.step(collect_step_metrics())
        assert len(metrics(path)) == 1, "lines must be flushed one by one"
        reporter.step(collect_step_metrics(11))
        reporter.evaluation(eval_record(11))
        reporter.evaluation(eval_record(11, split="test", loss=3.0))
    first, second, validation, test = metrics(path)
    assert set(first) >= REQUIRED_KEYS
    assert (first["loss"], first["learning_rate"]) == (9.87654321987654, 1e-3 / 3)
    assert first["model_state_bytes"] == [40 * MIB, 45 * MIB]
    assert (first["switch_time_ms"], second["switch_time_ms"]) == (12.5, 0.0)
    assert first["switches"] == [[9, 1]] and "switches" not in second
    assert validation == {
        "iteration": 11,
        "consumed_samples": 176,
        "validation_loss": 2.0,
        "validation_perplexity": math.exp(2.0),
    }
    assert set(test) == {"iteration", "consumed_samples", "test_loss", "test_perplexity"}


def test_metrics_stay_json_when_training_diverges(tmp_path: Path) -> None:
    """A value that is not finite is null in its JSON, and a step's line names it in `non_finite`."""
    path = tmp_path / "m.jsonl"
    with quiet(metrics_file=str(path)) as reporter:
        reporter.step(collect_step_metrics(loss=math.nan, grad_norm=math.inf))
        reporter.evaluation(eval_record(loss=math.nan))
    step, evaluation = metrics(path)
    assert step["loss"] is None and step["grad_norm"] is None
    assert step["non_finite"] == {"loss": "nan", "grad_norm": "inf"}
    assert evaluation["validation_loss"] is None


def test_a_fresh_run_replaces_the_file_at_its_first_line(tmp_path: Path) -> None:
    """A fresh run replaces the file at its first line, and not before."""
    path = tmp_path / "m.jsonl"
    path.write_text("an older run\n")
    quiet(metrics_file=str(path)).close()
    assert path.read_text() == "an older run\n"
    with quiet(metrics_file=str(path)) as reporter:
        reporter.step(collect_step_metrics(1))
    assert [line["iteration"] for line in metrics(path)] == [1]
    assert [file.name for file in tmp_path.iterdir()] == ["m.jsonl"]


def test_a_resumed_run_drops_what_it_repeats(tmp_path: Path) -> None:
    """A resumed run drops the lines that it repeats, and a torn last line."""
    path = tmp_path / "m.jsonl"
    with quiet(metrics_file=str(path)) as reporter:
        for iteration in range(1, 8):
            reporter.step(collect_step_metrics(iteration))
            if iteration == 4:
                reporter.evaluation(eval_record(4))
    before = path.read_text().splitlines()
    with path.open("a") as file:
        file.write('{"iteration": 8, "lo')
    resumed = quiet(start_iteration=4, metrics_file=str(path))
    with resumed as reporter:
        reporter.step(collect_step_metrics(5))
    assert [line["iteration"] for line in metrics(path)] == [1, 2, 3, 4, 4, 5]
    assert path.read_text().splitlines()[:4] == before[:4]


def test_metrics_through_a_link_and_to_a_device(tmp_path: Path) -> None:
    """Metrics go through a link and to a device, and both stay."""
    target, link = tmp_path / "target.jsonl", tmp_path / "link.jsonl"
    target.write_text("")
    link.symlink_to(target)
    for path in (str(link), "/dev/null"):
        with quiet(metrics_file=path) as reporter:
            reporter.step(collect_step_metrics(1))
    assert link.is_symlink() and len(metrics(target)) == 1
    assert Path("/dev/null").is_char_device()


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Replace torch.utils.tensorboard by a recorder."""
    module = mock.Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return module


def test_tensorboard_tags(tensorboard: mock.Mock) -> None:
    """Curves have the names and units of Megatron's dashboards, and a resume purges the steps that it repeats."""
    with quiet(start_iteration=4, tensorboard_dir="tb") as reporter:
        reporter.step(collect_step_metrics())
        reporter.evaluation(eval_record())
    tensorboard.SummaryWriter.assert_called_once_with("tb", purge_step=5)
    tensorboard.SummaryWriter.return_value.close.assert_called_once()
    calls = tensorboard.SummaryWriter.return_value.add_scalar.call_args_list
    scalars = {tag: (value, step) for tag, value, step in (call.args for call in calls)}
    assert scalars["lm loss"] == (9.87654321987654, 10)
    assert scalars["iteration-time"] == (0.12344, 10), "Megatron's is in seconds"
    assert scalars["bcd/model-state-bytes/rank 1"] == (45 * MIB, 10)
    assert scalars["lm loss validation ppl"] == (math.exp(2.0), 10)
    assert {"learning-rate", "grad-norm", "tokens-per-sec", "bcd/block", "bcd/cycle"} <= set(scalars)
    assert "loss-scale" not in scalars


def test_wandb_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings and metrics reach wandb, and its run is finished."""
    wandb = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with Reporter(
        ReportConfig(wandb_project="p", wandb_exp_name="e", wandb_save_dir="d"),
        train_iters=60,
        run_config={"lr": 1e-3},
        console=log_console(),
    ) as reporter:
        reporter.step(collect_step_metrics())
        reporter.evaluation(eval_record())
    wandb.init.assert_called_once_with(project="p", name="e", entity=None, dir="d", config={"lr": 1e-3})
    step, evaluation = wandb.init.return_value.log.call_args_list
    assert step.args[0]["lm loss"] == 9.87654321987654 and step.kwargs == evaluation.kwargs == {"step": 10}
    assert evaluation.args[0] == {"lm loss validation": 2.0, "lm loss validation ppl": math.exp(2.0)}
    wandb.init.return_value.finish.assert_called_once()


def test_wandb_that_is_absent_or_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wandb that is absent or refuses ends the run with an error that names --wandb-project."""
    for wandb in (None, mock.Mock(init=mock.Mock(side_effect=RuntimeError("no API key\nconfigured")))):
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        with pytest.raises(ValueError, match="--wandb-project"):
            quiet(wandb_project="p")


def test_the_log_line_shows_the_rate_of_its_step() -> None:
    """The console shows the rate that the step used; `learning_rate` keeps that of the next step, as in Megatron-LM."""
    line = step_line(collect_step_metrics(step_learning_rate=2e-3), train_iters=20, left="")
    assert "lr 2.000E-03" in line
