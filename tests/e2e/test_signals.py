"""Ctrl-C and other signals at every stage of a run, as a terminal or a scheduler sends them: a clean end in seconds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.bad_input_cases import command_line, good_documents, write_dataset

from megatron.bcd.checkpoint import layout

START_SECONDS, END_SECONDS = 200, 60
LONG = ("--train-iters", "1000000", "--save", "saved", "--load", "saved", "--eval-iters", "0")


class Started:
    """A run in a process group of its own, like one in a terminal."""

    def __init__(self, root: Path, place: Path, *flags: str, script: str = "pretrain_gpt_bcd.py") -> None:
        write_dataset(place / "data" / "text_document", good_documents())
        self._log = place / "output.txt"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-u", str(root / script), *command_line(*flags)],
                cwd=place,
                env=os.environ | {"PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            assert self._process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.02)

    def send(self, number: signal.Signals = signal.SIGINT) -> None:
        """To every process of the run, readers too."""
        os.killpg(self._process.pid, number)

    def handles(self, number: signal.Signals) -> bool:
        """Whether it has a handler for the signal."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return bool(int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16) >> (number - 1) & 1)

    def end(self) -> int:
        """The exit code."""
        try:
            return self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end\n{self.output}") from None

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@pytest.fixture
def start(repo_root: Path, tmp_path: Path) -> Iterator[Callable[..., Started]]:
    every = []

    def one(*flags: str, script: str = "pretrain_gpt_bcd.py") -> Started:
        every.append(Started(repo_root, tmp_path, *flags, script=script))
        return every[-1]

    yield one
    for started in every:
        started.kill()


def test_ctrl_c(start: Callable[..., Started], tmp_path: Path) -> None:
    """A traceback, and all steps since the last checkpoint lost; readers that die of it end the run before it saves.
    torchrun forwards the signal: the same Ctrl-C arrives twice."""
    run = start(*LONG, "--num-workers", "1")
    run.wait_for(lambda: "iteration       5/1000000" in run.output)
    run.send()
    run.send()
    assert run.end() == 0, run.output
    (saved,) = layout.candidates(str(tmp_path / "saved"))
    assert layout.damage(layout.iteration_folder(str(tmp_path / "saved"), saved)) is None
    assert "Traceback" not in run.output


HANGING = """
import os, threading, types
from megatron.bcd.config import CheckpointConfig
from megatron.bcd.training import stop

class Timer(threading.Thread):
    'Its time is over when a line comes on stdin.'
    def __init__(self, seconds, function):
        super().__init__(daemon=True)
        self.function = function
    def run(self):
        input()
        self.function()
        print("over", flush=True)

class Requests(stop.StopRequests):
    def _on_signal(self, number, frame):
        super()._on_signal(number, frame)
        os.write(1, b"handled\\n")

stop.threading = types.SimpleNamespace(Timer=Timer)
with Requests(CheckpointConfig()).listening():
    print("listening", flush=True)
    lock = threading.Lock()
    lock.acquire()
    while True:
        lock.acquire(timeout=60)  # as in a collective
"""


def test_a_second_ctrl_c(repo_root: Path) -> None:
    """A rank that hangs for ever; or a run that torchrun's copy of the first Ctrl-C ends unsaved."""
    command = [sys.executable, "-c", HANGING]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=repo_root, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as run:
        assert run.stdin is not None and run.stdout is not None and run.stderr is not None
        assert run.stdout.readline() == "listening\n"
        for _ in range(2):  # the second is torchrun's copy of the first
            run.send_signal(signal.SIGINT)
            assert run.stdout.readline() == "handled\n"
        assert run.stderr.readline()
        print(file=run.stdin, flush=True)
        assert run.stdout.readline() == "over\n"
        run.send_signal(signal.SIGINT)
        assert run.wait(END_SECONDS) == -signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_while_it_imports(start: Callable[..., Started], tmp_path: Path, number: signal.Signals) -> None:
    """A traceback out of the middle of a library, or a process that dies without a word."""
    run = start(*LONG)
    run.wait_for(lambda: run.handles(signal.SIGUSR1))
    run.send(number)
    assert run.end() == 1
    assert number.name in run.output and run.output.count("\n") == 1 and not (tmp_path / "saved").exists()


@pytest.mark.parametrize("flags", [(), ("--skip-train",)])
def test_while_it_evaluates(start: Callable[..., Started], tmp_path: Path, flags: tuple[str, ...]) -> None:
    """An evaluation of minutes that goes on after the signal, until the scheduler kills the run before it has saved."""
    save = () if flags else LONG[2:4]
    evaluation = ("--eval-iters", "1000000", "--eval-interval", "3", "--train-iters", "30")
    run = start(*save, *evaluation, *flags, script="tests/support/announced_evaluation.py")
    run.wait_for(lambda: "it evaluates" in run.output)
    run.send(signal.SIGTERM)
    assert run.end() == 0, run.output
    assert "Traceback" not in run.output
    assert flags or layout.candidates(str(tmp_path / "saved")) == [3]
