"""A rank that dies or hangs ends the whole job: no rank waits for ever for a message that will not come."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
from support.processes import has_ended

FLAGS = [
    *("--pipeline-model-parallel-size", "2", "--bcd-layout", "stage"),
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--micro-batch-size", "1", "--global-batch-size", "16", "--train-iters", "5000", "--lr", "1e-3"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--num-workers", "0"),
    *("--eval-iters", "0", "--log-interval", "1"),
]
START_SECONDS, END_SECONDS = 200, 60
TIMEOUT_SECONDS = 6  # of a message, where a rank hangs


class Job:
    """torchrun with two ranks of a script, and all the processes that it has started."""

    def __init__(self, script: Path, arguments: list[str], folder: Path) -> None:
        root = Path(__file__).resolve().parents[2]
        environment = os.environ | {"PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._output = folder / "output.txt"
        with open(self._output, "wb") as file:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            self._process = subprocess.Popen(
                [*launcher, str(script), *arguments],
                cwd=folder,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._started = [psutil.Process(self._process.pid)]

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def rank(self, number: int) -> psutil.Process:
        [process] = [child for child in self._started[0].children() if child.environ().get("RANK") == str(number)]
        return process

    def is_running(self) -> bool:
        return self._process.poll() is None

    def note_processes(self) -> None:
        """Remember the processes that it has now, for `alive`."""
        self._started += self._started[0].children(recursive=True)

    def wait_for_output(self, text: str) -> None:
        deadline = time.monotonic() + END_SECONDS
        while text not in self.output:
            assert time.monotonic() < deadline, f"the job hangs\n{self.output}"
            time.sleep(0.05)

    def resume(self, rank: int) -> None:
        """Let a stopped rank run again, unless it is gone already."""
        with contextlib.suppress(ValueError, psutil.Error):
            self.rank(rank).send_signal(signal.SIGCONT)

    def wait_for_end(self) -> int:
        """Its exit code."""
        try:
            return self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job hangs\n{self.output}") from None

    def alive(self) -> list[psutil.Process]:
        """Processes of the job that have not ended."""
        return [process for process in self._started if not has_ended(process)]

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.note_processes()
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()


@contextlib.contextmanager
def started(script: Path, arguments: list[str], folder: Path) -> Iterator[Job]:
    job = Job(script, arguments, folder)
    try:
        yield job
    finally:
        job.end()


def wait_until(conditions: dict[Job, Callable[[], bool]]) -> None:
    """Wait until each running job's condition held once, and note its processes then."""
    deadline = time.monotonic() + START_SECONDS
    waiting = dict(conditions)
    while waiting:
        for job, condition in list(waiting.items()):
            if condition():
                job.note_processes()
                del waiting[job]
            else:
                assert job.is_running() and time.monotonic() < deadline, job.output
        time.sleep(0.1)


def is_stopped(job: Job, rank: int) -> bool:
    try:
        return job.rank(rank).status() == psutil.STATUS_STOPPED
    except (ValueError, psutil.Error):  # it is not there yet
        return False


def test_a_rank_that_is_killed(repo_root: Path, tmp_path: Path) -> None:
    """A job of which one rank is left, waiting for the other: a machine that is paid for and does nothing."""
    metrics = tmp_path / "metrics.jsonl"
    arguments = [*FLAGS, "--bcd-steps-per-block", "3", "--metrics-file", str(metrics)]
    with started(repo_root / "pretrain_gpt_bcd.py", arguments, tmp_path) as job:
        wait_until({job: lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 5})
        job.rank(1).send_signal(signal.SIGKILL)
        assert job.wait_for_end() != 0
        assert job.alive() == []
        assert "Signal 9 (SIGKILL)" in job.output


def test_a_rank_that_hangs(repo_root: Path, tmp_path: Path) -> None:
    """A one-way message without a timeout: a forward-only stage that waits for ever in `send` for the receiver of its
    outputs, or the first trainable stage in `receive` for its inputs."""
    waits = {1: ("in _finish_oldest_send", "send operation"), 0: ("in receive", "recv operation")}  # by who hangs
    with contextlib.ExitStack() as stack:
        jobs = {}
        for hanging in waits:  # both at once: they wait rather than compute
            (tmp_path / str(hanging)).mkdir()
            arguments = [str(hanging), "40", str(TIMEOUT_SECONDS), *FLAGS, "--bcd-steps-per-block", "1000"]
            script = repo_root / "tests" / "support" / "hanging_rank.py"
            jobs[hanging] = stack.enter_context(started(script, arguments, tmp_path / str(hanging)))
        wait_until({job: partial(is_stopped, job, hanging) for hanging, job in jobs.items()})
        for hanging, job in jobs.items():
            job.wait_for_output("Timed out waiting")
            job.resume(hanging)  # torchrun gives a stopped process 30 s to hear SIGTERM before it kills it
            assert job.wait_for_end() != 0
            assert job.alive() == []
            function, operation = waits[hanging]
            assert function in job.output
            assert f"Timed out waiting {TIMEOUT_SECONDS}000ms for {operation}" in job.output
