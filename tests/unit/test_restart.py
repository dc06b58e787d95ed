"""What a start takes from the previous one: torchrun's store and the metrics file."""

from __future__ import annotations

import datetime
import errno
import io
import json
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from rich.console import Console
from support.processes import disk_for

from megatron.bcd.config import ReportConfig
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.metrics.schema import EvalMetrics
from megatron.bcd.runtime import distributed

TIMEOUT = datetime.timedelta(seconds=20)


def number_by_rank(store: torch.distributed.Store, *, first: int) -> list[int]:
    """Return the number that three ranks agree on when rank `first` arrives first."""
    numbers = {}

    def start(rank: int) -> None:
        numbers[rank] = distributed.draw_start_number(store, rank=rank, world_size=3, timeout=TIMEOUT)

    ranks = [threading.Thread(target=start, args=(rank,), daemon=True) for rank in range(3)]
    ranks[first].start()
    time.sleep(0.2)
    for rank in ranks[:first] + ranks[first + 1 :]:
        rank.start()
    for rank in ranks:
        rank.join(30)
    return [numbers[rank] for rank in range(3)]


def test_ranks_of_a_restart_meet() -> None:
    """The ranks of a restart agree on a new number whichever arrives first, though torchrun keeps its store over
    restarts."""
    store = torch.distributed.HashStore()
    with pytest.raises(RuntimeError, match="rank 0"):
        distributed.draw_start_number(store, rank=2, world_size=3, timeout=datetime.timedelta(seconds=0.1))
    store.add("bcd/starts", 1)  # all that is left of a rank 0 that came and was killed
    starts = [number_by_rank(store, first=first) for first in (1, 0, 2)]
    assert [len(set(numbers)) for numbers in starts] == [1, 1, 1]
    assert len({numbers[0] for numbers in starts}) == 3, "each start has a new number"


def test_the_end_is_told_once(tmp_path: Path) -> None:
    """The file has one final evaluation, also after a restart at the end, and that of an extended run replaces it."""
    path = tmp_path / "metrics.jsonl"
    for start, is_extended in ((0, False), (8, False), (8, True)):
        with Reporter(ReportConfig(metrics_file=str(path)), train_iters=8, start_iteration=start) as reporter:
            if not start:
                reporter.evaluation(evaluation(8, is_final=False))
            reporter.evaluation(evaluation(16 if is_extended else 8, is_final=True))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [(line["iteration"], line.get("is_final", False)) for line in lines] == [
            (8, False),
            (16 if is_extended else 8, True),
        ]


def test_a_full_disk_does_not_end_the_run(tmp_path: Path) -> None:
    """A full disk gives one warning and does not end the run, and all lines are whole once there is room again."""
    path = tmp_path / "metrics.jsonl"
    screen = io.StringIO()
    console = Console(file=screen, width=200)
    with Reporter(ReportConfig(metrics_file=str(path)), train_iters=8, start_iteration=0, console=console) as reporter:
        reporter.evaluation(evaluation(1, is_final=False))
        with disk_for(path.stat().st_size + 10):
            for iteration in (2, 3):
                reporter.evaluation(evaluation(iteration, is_final=False))
        assert len(path.read_text().splitlines()[1]) == 10
        reporter.evaluation(evaluation(4, is_final=False))
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    assert screen.getvalue().count("--metrics-file") == 1


def test_tensorboard_on_a_full_disk_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk for curves gives one warning and ends the curves, but neither the run nor its metrics lines."""
    module = mock.Mock()
    full = OSError(errno.ENOSPC, "No space left on device")
    writer = module.SummaryWriter.return_value
    writer.add_scalar.side_effect = [None, None, full]
    writer.close.side_effect = full
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    path, screen = tmp_path / "metrics.jsonl", io.StringIO()
    with Reporter(
        ReportConfig(metrics_file=str(path), tensorboard_dir=str(tmp_path / "curves")),
        train_iters=8,
        console=Console(file=screen, width=200),
    ) as reporter:
        for iteration in (1, 2, 3):
            reporter.evaluation(evaluation(iteration, is_final=False))
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2, 3]
    (warning,) = [line for line in screen.getvalue().splitlines() if line.startswith("warning")]
    assert "--tensorboard-dir" in warning
    assert writer.add_scalar.call_args.args[2] == 2


def evaluation(iteration: int, *, is_final: bool) -> EvalMetrics:
    return EvalMetrics(iteration=iteration, consumed_samples=iteration, split="validation", loss=2.0, is_final=is_final)
