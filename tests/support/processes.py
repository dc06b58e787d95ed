"""Start programs as users do, and observe processes that may end at any moment."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
START_SECONDS, END_SECONDS = 200, 60


def has_ended(process: psutil.Process) -> bool:
    """Return True if the process has ended, even if its exit code has not been collected."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def disk_for(num_bytes: int) -> Iterator[None]:
    """Limit the size of this process's files to `num_bytes`, so that writes fail as on a full disk, for any user."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Job:
    """`python WORD...` in a folder, in a separate process group like a terminal's job. Ends all its processes on
    exit."""

    def __init__(self, *words: str, folder: Path) -> None:
        self._log = folder / "output.txt"
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-u", *words],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started = [psutil.Process(self.process.pid)]

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds, and store the processes that the job then has."""
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.02)
        self._started += self._started[0].children(recursive=True)

    def ranks(self) -> list[psutil.Process]:
        """Return torchrun's ranks in order."""
        children = [child for child in self._started[0].children() if "RANK" in child.environ()]
        return sorted(children, key=lambda child: int(child.environ()["RANK"]))

    def exit_code(self) -> int:
        """Return the exit code of the job, which must end soon."""
        try:
            return self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end\n{self.output}") from None

    def alive(self) -> list[psutil.Process]:
        """Return the processes of the job that have not ended."""
        return [process for process in self._started if not has_ended(process)]

    def kill(self) -> None:
        """Kill everything, as in a power failure."""
        for number in (signal.SIGSTOP, signal.SIGKILL):  # what has stopped starts no process that would outlive it
            with contextlib.suppress(psutil.NoSuchProcess):
                self._started += self._started[0].children(recursive=True)
            for process in self.alive():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        self.process.wait()
        while self.alive():  # a killed process takes a moment to end
            time.sleep(0.01)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
