"""Ctrl-C and other signals at every stage of a run, as a terminal or a scheduler sends them: a clean end in seconds."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from support.bad_input_cases import command_line
from support.processes import END_SECONDS, ROOT, Job

from megatron.bcd.checkpoint import layout


def handles(job: Job, number: signal.Signals) -> bool:
    """Return True if the process has a handler for the signal."""
    status = Path(f"/proc/{job.process.pid}/status").read_text()
    return bool(int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16) >> (number - 1) & 1)


def imports_torch(job: Job) -> bool:
    return "libtorch" in Path(f"/proc/{job.process.pid}/maps").read_text()


def test_ctrl_c_under_the_launcher(workplace: Path) -> None:
    """Ctrl-C ends a run under the launcher, also during an evaluation and while readers run, with a complete checkpoint
    and a last line that names SIGINT. The launcher forwards the signal: the same Ctrl-C arrives twice."""
    flags = ("--eval-iters", "1000000", "--eval-interval", "3", "--train-iters", "30", "--save", "saved")
    words = command_line(*flags, "--num-workers", "1", num_ranks=2)
    launcher = (str(ROOT / "tools" / "launch.py"), "--standalone", "--nproc-per-node", "2")
    with Job(*launcher, str(ROOT / "pretrain_gpt_bcd.py"), *words, folder=workplace) as run:
        run.wait_for(lambda: re.search(r"iteration +3/", run.output))
        time.sleep(0.5)  # the evaluation begins
        for process in run.alive():
            process.send_signal(signal.SIGINT)
        assert run.exit_code() == 128 + signal.SIGINT, run.output
    assert "SIGINT" in run.output.splitlines()[-1] and "Traceback" not in run.output
    assert layout.candidates(str(workplace / "saved")) == [3]
    assert layout.damage(layout.iteration_folder(str(workplace / "saved"), 3)) is None


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
    """A further Ctrl-C ends a rank that hangs, and torchrun's copy of the first one does not."""
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


def test_while_it_imports(workplace: Path) -> None:
    """Ctrl-C during the imports ends the run at once, without a traceback."""
    words = command_line("--save", "saved", "--train-iters", "1000000")
    with Job(str(ROOT / "pretrain_gpt_bcd.py"), *words, folder=workplace) as run:
        run.wait_for(lambda: imports_torch(run) and not handles(run, signal.SIGINT))
        run.process.send_signal(signal.SIGINT)
        assert run.exit_code() == -signal.SIGINT
    assert run.output == "" and not (workplace / "saved").exists()
