"""One run under torchrun, ended by a signal and by a killed machine, each time started by the same command.

What the parts wrote is what one run without an end writes. Many kills at other moments: tools/soak.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.bad_input_cases import good_documents, write_dataset
from support.forked_runs import ForkedRuns

from megatron.bcd.checkpoint import layout

LAST, SAVE_INTERVAL = 60, 10
FLAGS = [
    *("--pipeline-model-parallel-size", "2", "--bcd-layout", "submodel", "--bcd-num-blocks", "3"),
    *("--bcd-steps-per-block", "7", "--num-layers", "6", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "16", "--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", str(LAST)),
    *("--lr", "1e-3", "--lr-decay-style", "cosine", "--lr-warmup-iters", "5", "--data-path", "data/text_document"),
    *("--tokenizer-type", "ByteLevelTokenizer", "--split", "80,10,10", "--num-workers", "1"),
    *("--eval-iters", "1", "--eval-interval", "20", "--log-interval", "1", "--metrics-file", "metrics.jsonl"),
    *("--save", "saved", "--load", "saved", "--save-interval", str(SAVE_INTERVAL)),
]
START_SECONDS, END_SECONDS = 200, 60


def lines(place: Path) -> list[dict[str, Any]]:
    """Of the metrics file, without what differs from machine to machine; a last line may be half written."""
    names = (
        "iteration",
        "loss",
        "grad_norm",
        "learning_rate",
        "block",
        "consumed_samples",
        "validation_loss",
        "test_loss",
    )
    path = place / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    whole = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [{name: line[name] for name in names if name in line} for line in whole]


def last_iteration(place: Path) -> int:
    return max((line["iteration"] for line in lines(place)), default=0)


class Start:
    """One start under torchrun: two ranks, every process of it ended when this one is over."""

    def __init__(self, root: Path, place: Path, *flags: str) -> None:
        self._place = place
        self._log = place / "output.txt"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        with open(self._log, "wb") as log:
            self._torchrun = subprocess.Popen(
                [*launcher, str(root / "pretrain_gpt_bcd.py"), *FLAGS, *flags],
                cwd=place,
                env=os.environ | {"PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for_iteration(self, iteration: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while last_iteration(self._place) < iteration:
            assert self._torchrun.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.01)

    def ranks(self) -> list[psutil.Process]:
        children = psutil.Process(self._torchrun.pid).children()
        ranks = [child for child in children if "RANK" in child.environ()]
        assert len(ranks) == 2
        return ranks

    def exit_code(self) -> int:
        return self._torchrun.wait(END_SECONDS)

    def kill(self) -> None:
        """As if the machine had lost its power."""
        with contextlib.suppress(psutil.NoSuchProcess):
            torchrun = psutil.Process(self._torchrun.pid)
            for process in [torchrun, *torchrun.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._torchrun.wait()


@contextlib.contextmanager
def start(root: Path, place: Path, *flags: str) -> Iterator[Start]:
    one = Start(root, place, *flags)
    try:
        yield one
    finally:
        one.kill()


@pytest.mark.timeout(900)  # starts of torchrun
@pytest.mark.parametrize(
    "signals",
    [(signal.SIGTERM,), pytest.param((signal.SIGTERM, signal.SIGUSR1), marks=pytest.mark.long)],
    ids=["SIGTERM", "both"],
)
def test_the_same_command_after_every_end(
    repo_root: Path, runs: ForkedRuns, tmp_path: Path, signals: tuple[signal.Signals, ...]
) -> None:
    """A signal that kills in place of stopping, an exit code that a scheduler takes for a failure, a step lost or
    done twice."""
    places = {name: tmp_path / name for name in ("whole", "parts")}
    for place in places.values():
        write_dataset(place / "data" / "text_document", good_documents())
    place = places["parts"]
    assert [rank.code for rank in runs.run(FLAGS, folder=places["whole"], num_ranks=2)] == [0, 0]
    after_signals_and_a_kill(repo_root, place, signals)
    newest = layout.iteration_folder(str(place / "saved"), layout.candidates(str(place / "saved"))[0])
    assert layout.damage(newest) is None
    results = runs.run(FLAGS, folder=place, num_ranks=2)
    assert [(rank.code, rank.stderr) for rank in results] == [(0, "")] * 2
    assert f"resuming from saved/{os.path.basename(newest)}" in results[0].stdout
    assert lines(place) == lines(places["whole"])
    assert weights(place) == weights(places["whole"])


def after_signals_and_a_kill(root: Path, place: Path, signals: tuple[signal.Signals, ...]) -> None:
    """Starts that don't come to the end."""
    stopped_at = 0
    for number, flags in zip(signals, (["--async-save"], []), strict=False):
        with start(root, place, *flags) as one:
            one.wait_for_iteration(stopped_at + 3)
            for rank in one.ranks():
                rank.send_signal(number)
            assert one.exit_code() == 0, one.output  # torchrun's, so every rank's
            (saved,) = layout.candidates(str(place / "saved"))[:1]
            assert stopped_at < saved == last_iteration(place) < LAST
            stopped_at = saved
    with start(root, place) as one:
        one.wait_for_iteration(stopped_at + SAVE_INTERVAL + 2)
        one.kill()


def weights(place: Path) -> dict[str, str]:
    """Checksums of the last checkpoint's shards: the same bits at the same places."""
    records = json.loads((place / "saved" / f"iter_{LAST:07d}" / layout.CHECKSUMS).read_text())["files"]
    return {name: record["sha256"] for name, record in records.items() if name.endswith(".distcp")}


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    """Nothing that a test started is alive after it."""
    yield
    assert [child for child in psutil.Process().children(recursive=True) if is_of_a_run(child)] == []


def is_of_a_run(process: psutil.Process) -> bool:
    try:
        return "pretrain_gpt_bcd" in str(process.cmdline())
    except psutil.Error:  # it ends just now
        return False
