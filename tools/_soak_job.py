"""The run that tools/soak.py kills: its flags, one start under torchrun, and its progress."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SAVE_INTERVAL = 5
KEPT_CHECKPOINTS = 3
NUM_SUBMODELS = 3  # per pipeline stage
MARK = "BCD_SOAK_JOB"
_RESUMED = re.compile(
    r"resuming from .+, after iteration (\d+)$|holds no checkpoint: starting from iteration 0$", re.MULTILINE
)
_STOPPED = re.compile(r"stopping after iteration (\d+): signal (SIG\w+)$", re.MULTILINE)


class SoakFailed(RuntimeError):
    """The run failed in a way after which continuing is pointless; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """Output files of one run, in its own folder."""

    folder: Path

    @property
    def checkpoints(self) -> str:
        return str(self.folder / "checkpoints")

    @property
    def metrics(self) -> str:
        return str(self.folder / "metrics.jsonl")


def flags(files: Files, *, num_iterations: int, num_stages: int) -> list[str]:
    """Flags of every start but for --async-save: a model so small that starting takes most of the time.

    Layout submodel lets stages run ahead and switches often; dropout is on, as it is by default.
    """
    return (
        f"--num-layers {max(6, NUM_SUBMODELS * num_stages)} --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
        "--micro-batch-size 2 --global-batch-size 8 "
        f"--train-iters {num_iterations} --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 10 "
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-workers 1 "
        "--log-interval 1 --eval-interval 20 --eval-iters 1 "
        f"--pipeline-model-parallel-size {num_stages} "
        f"--bcd-layout submodel --bcd-num-blocks {NUM_SUBMODELS} --bcd-steps-per-block 7 "
        f"--save-interval {SAVE_INTERVAL} --keep-last-checkpoints {KEPT_CHECKPOINTS}"
    ).split() + ["--load", files.checkpoints, "--save", files.checkpoints, "--metrics-file", files.metrics]


def torchrun(run_flags: list[str], *, num_ranks: int, max_restarts: int) -> list[str]:
    """The command of one start."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [*launcher, "--max-restarts", str(max_restarts), "pretrain_gpt_bcd.py", *run_flags]


@dataclass(frozen=True, kw_only=True)
class Process:
    """A live process of a job: torchrun, a rank, or a rank's child."""

    pid: int
    command: str = field(compare=False)
    parent: int = field(compare=False)  # changes when the parent dies
    rank: int | None


class Job:
    """One start of the run: torchrun, its ranks and their children, identified by an environment variable."""

    def __init__(self, command: list[str], log: Path, *, num_ranks: int, max_restarts: int) -> None:
        self.log = log
        self.num_ranks = num_ranks
        self.restarts_left = max_restarts
        self.mark = uuid.uuid4().hex
        with open(log, "wb") as output:
            self._torchrun = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """torchrun's; None while it runs."""
        return self._torchrun.poll()

    def processes(self) -> frozenset[Process]:
        """All live processes, whatever their parent is now."""
        self._torchrun.poll()  # else it would stay on as a zombie
        found = (_process(int(name), f"{MARK}={self.mark}") for name in os.listdir("/proc") if name.isdigit())
        return frozenset(process for process in found if process is not None)

    def ranks(self) -> dict[int, Process]:
        """Torchrun's own children.

        Raises:
            SoakFailed: one is missing.
        """
        children = [process for process in self.processes() if process.parent == self._torchrun.pid]
        ranks = {process.rank: process for process in children if process.rank is not None}
        if sorted(ranks) != list(range(self.num_ranks)):
            raise SoakFailed(f"of {self.num_ranks} ranks only {sorted(ranks)} live; see {self.log}")
        return ranks

    def send(self, number: signal.Signals, *ranks: Process, torchrun: bool = False) -> None:
        """Signal torchrun (optional), then `ranks`, without delay."""
        for pid in ([self._torchrun.pid] if torchrun else []) + [process.pid for process in ranks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(self) -> None:
        """Until torchrun has an exit code; for jobs without processes that live."""
        self._torchrun.wait()

    def end(self) -> None:
        """Kill all live processes."""
        self._torchrun.kill()  # a process that was only just started has no environment to know it by
        while left := self.processes():
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        self._torchrun.wait()

    def output(self, *, since: int = 0) -> str:
        """The log of torchrun and all ranks, from byte `since` on."""
        return self.log.read_bytes()[since:].decode(errors="replace")

    def taken_up(self) -> list[int | None]:
        """For each start of the ranks, the iteration that they resumed from; None for a fresh start."""
        return [int(number) if number else None for number in _RESUMED.findall(self.output())]

    def stopped(self, *, since: int) -> list[tuple[int, str]]:
        """The iteration after which the ranks report a stop, and the signal."""
        return [(int(number), name) for number, name in _STOPPED.findall(self.output(since=since))]


def _process(pid: int, mark: str) -> Process | None:
    """None if it belongs to another job or is gone. A zombie has no environment."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        if mark not in environment:
            return None
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    rank = next((int(entry.removeprefix("RANK=")) for entry in environment if entry.startswith("RANK=")), None)
    return Process(pid=pid, command=command[:200], parent=int(status[1]), rank=rank)


class Progress:
    """Progress of the run by its metrics file: a new start replaces the file at its first line."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._before: int | None = None

    def new_start(self) -> None:
        """Count only lines of the next start from now on."""
        self._before = self._inode()

    def has_reached(self, iteration: int) -> bool:
        """Whether the present start has written a line of `iteration` or a later one."""
        return self._inode() not in (None, self._before) and self.iteration() >= iteration

    def iteration(self) -> int:
        """Iteration of the last complete line of any start; 0 without one."""
        try:
            with open(self._path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 16384))
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return 0
        return int(json.loads(lines[-1])["iteration"]) if lines else 0

    def _inode(self) -> int | None:
        try:
            return os.stat(self._path).st_ino
        except FileNotFoundError:
            return None
