"""Kills a small run repeatedly until it is finished, and compares it with an uninterrupted one.

    python tools/soak.py --kills 20 --seed 7

Ranks, torchrun or both are killed or signalled to stop, in training and while a checkpoint is written; torchrun
restarts the ranks, or the same command is started again. After every kill no process may remain, every checkpoint must
be valid, and the next start must resume from the newest. At the end weights, optimizer state and metrics must equal
those of the uninterrupted run, bit for bit. Linux only. Exit code 0 if all of this holds, 1 if not, 2 for bad flags.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import itertools
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _parser import leave_with
from _soak_job import KEPT_CHECKPOINTS, SAVE_INTERVAL, Files, Job, Process, Progress, SoakFailed, flags, torchrun

from megatron.bcd.checkpoint import layout

PROG = "tools/soak.py"
ITERATIONS_PER_KILL = 10
MARGIN = 4 * SAVE_INTERVAL  # iterations at the end without kills: a save to wait for must still come
GRACE_SECONDS = 60.0  # torchrun itself gives ranks 30 seconds
STALL_SECONDS = 240.0  # without a word or a line of metrics; starting is silent for long on a busy machine
NUM_SHOWN = 10


class Kind(enum.Enum):
    """Ways to end a run."""

    RANK = "SIGKILL to rank {rank}"
    SAVING_RANK = "SIGKILL to rank {rank} at a save"
    MACHINE = "SIGKILL to torchrun and all ranks"
    TORCHRUN_TERM = "SIGTERM to torchrun"
    RANKS_USR1 = "SIGUSR1 to all ranks"

    @property
    def is_request(self) -> bool:
        """Whether the ranks are to save and stop by themselves."""
        return self in (Kind.TORCHRUN_TERM, Kind.RANKS_USR1)


@dataclass(frozen=True, kw_only=True)
class Kill:
    kind: Kind
    iteration: int
    """Not before the metrics file has a line of it."""
    delay: float
    """Seconds from then on, or from the beginning of a save: less than a step or a save takes."""
    rank: int


@dataclass(frozen=True, kw_only=True)
class Start:
    max_restarts: int
    async_save: bool


def plan_kills(*, num_kills: int, num_iterations: int, num_ranks: int, seed: int) -> list[Kill]:
    """One kill in each of `num_kills` equal parts of the run, at a random moment; kinds come equally often."""
    draw = random.Random(f"kills {seed}")
    rounds = (draw.sample(list(Kind), len(Kind)) for _ in itertools.count())
    kinds = itertools.islice(itertools.chain.from_iterable(rounds), num_kills)
    part = (num_iterations - MARGIN) / num_kills
    return [
        Kill(
            kind=kind,
            iteration=1 + int((index + draw.random()) * part),
            delay=draw.choice((0.0, 0.01, 0.03)) if kind is Kind.SAVING_RANK else 0.1 * draw.random(),
            rank=draw.randrange(num_ranks),
        )
        for index, kind in enumerate(kinds)
    ]


def plan_starts(seed: int) -> Iterator[Start]:
    """With and without torchrun's restarts and asynchronous saves: all four in each four starts."""
    draw = random.Random(f"starts {seed}")
    every = [Start(max_restarts=restarts, async_save=is_async) for restarts in (0, 2) for is_async in (False, True)]
    while True:
        yield from draw.sample(every, len(every))


class KilledRun:
    """The run under kills. `problems` are faults after which it could still go on, one line each."""

    def __init__(self, own: Files, run_flags: list[str], *, num_ranks: int, starts: Iterator[Start]) -> None:
        self.num_kills = self.num_resumes = self.num_invalid = 0
        self.problems: list[str] = []
        self._own, self._flags, self._num_ranks, self._starts = own, run_flags, num_ranks, starts
        self._progress = Progress(own.metrics)
        self._num_starts = self._num_taken_up = 0
        self._job: Job | None = None

    def run(self, kills: Sequence[Kill]) -> None:
        """Through all kills to the end.

        Raises:
            SoakFailed: the run hangs, ends by itself, or leaves processes behind.
        """
        self._start()
        self._wait_until_taken_up()
        for kill in kills:
            line = self._kill(kill)
            expected = next(iter(layout.candidates(self._own.checkpoints)), None)
            if self.job.exit_code is not None:
                self._start()
            taken_up = self._wait_until_taken_up()
            self.num_resumes += taken_up is not None
            if taken_up != expected:
                self.problems.append(f"taken up from {taken_up} where {expected} was the newest checkpoint")
            origin = "starts afresh" if taken_up is None else f"resumed from {taken_up}"
            print(f"kill {self.num_kills:2}/{len(kills)}: {line}, {origin}", flush=True)
        self._wait(lambda: self.job.exit_code is not None, "the end")
        if self.job.exit_code != 0:
            raise SoakFailed(f"the last start ended with code {self.job.exit_code}; see {self.job.log}")
        self._wait_until_gone(self.job.processes, "the end")

    def end(self) -> None:
        """Leave no process, however `run` ended."""
        if self._job is not None:
            self._job.end()

    @property
    def job(self) -> Job:
        assert self._job is not None
        return self._job

    def _start(self) -> None:
        start, self._num_starts = next(self._starts), self._num_starts + 1
        ranks_and_restarts = {"num_ranks": self._num_ranks, "max_restarts": start.max_restarts}
        self._job = Job(
            torchrun(self._flags + ["--async-save"] * start.async_save, **ranks_and_restarts),
            self._own.folder / f"start_{self._num_starts:02}.log",
            **ranks_and_restarts,
        )
        self._num_taken_up = 0

    def _wait_until_taken_up(self) -> int | None:
        self._wait(lambda: len(self.job.taken_up()) > self._num_taken_up, "it took up a checkpoint", pause=0.1)
        self._num_taken_up += 1
        return self.job.taken_up()[-1]

    def _kill(self, kill: Kill) -> str:
        """Wait for the moment, kill, and see what is left; a line that says what happened."""
        self._wait(lambda: self._progress.has_reached(kill.iteration), f"iteration {kill.iteration}")
        if kill.kind is Kind.SAVING_RANK:
            last = kill.iteration + 2 * SAVE_INTERVAL
            self._wait(lambda: bool(self._in_save()) or self._progress.has_reached(last), "a save", pause=0.0)
        time.sleep(kill.delay)
        ranks, before, size = self.job.ranks(), self.job.processes(), self.job.log.stat().st_size
        if kill.kind in (Kind.RANK, Kind.SAVING_RANK):
            self.job.send(signal.SIGKILL, ranks[kill.rank])
        elif kill.kind is Kind.MACHINE:
            self.job.send(signal.SIGKILL, *ranks.values(), torchrun=True)
        elif kill.kind is Kind.TORCHRUN_TERM:
            self.job.send(signal.SIGTERM, torchrun=True)
        else:
            self.job.send(signal.SIGUSR1, *ranks.values())
        self.num_kills += 1
        return self._aftermath(kill, ranks, before, output_before=size)

    def _aftermath(
        self, kill: Kill, ranks: dict[int, Process], before: frozenset[Process], *, output_before: int
    ) -> str:
        started = time.monotonic()
        what = kill.kind.value.format(rank=kill.rank)
        restarts = kill.kind in (Kind.RANK, Kind.SAVING_RANK) and self.job.restarts_left > 0
        self._wait_until_gone(lambda: self.job.processes() & set(ranks.values()), what)
        iteration, in_save = self._progress.iteration(), self._in_save()
        self._progress.new_start()
        self._check_checkpoints(what)  # at once: ranks that torchrun restarts are busy importing
        if restarts:
            self.job.restarts_left -= 1
            self._wait_until_gone(lambda: {one for one in self.job.processes() & before if one.rank is not None}, what)
        else:
            self._wait_until_gone(self.job.processes, what)
            self.job.wait()
        if "forcefully exiting" in self.job.output(since=output_before):
            self.problems.append(f"{what}: torchrun had to kill a rank that did not end; see {self.job.log}")
        if kill.kind.is_request:
            self._check_request(kill, iteration, output_before=output_before)
        return (
            f"{what} at iteration {iteration}{in_save and f' with {in_save}'}, gone after "
            f"{time.monotonic() - started:.1f} s, {'restarted by torchrun' if restarts else 'started again'}"
        )

    def _check_request(self, kill: Kill, iteration: int, *, output_before: int) -> None:
        """All ranks have saved after the same iteration and ended by themselves."""
        name = "SIGTERM" if kill.kind is Kind.TORCHRUN_TERM else "SIGUSR1"
        what = f"{kill.kind.value} at iteration {iteration}"
        stopped = self.job.stopped(since=output_before)
        if stopped != [(iteration, name)]:
            self.problems.append(f"{what}: the ranks said {stopped or 'nothing'}; see {self.job.log}")
        if layout.read_tracker(self._own.checkpoints) != iteration:
            self.problems.append(f"{what}: that iteration was not saved; see {self.job.log}")
        if name == "SIGUSR1" and self.job.exit_code != 0:  # torchrun that gets SIGTERM itself never ends with 0
            self.problems.append(f"{what}: torchrun's exit code is {self.job.exit_code}; see {self.job.log}")

    def _check_checkpoints(self, what: str) -> None:
        """Every complete one is valid and the tracker names one; before its first move there may be one without."""
        root = self._own.checkpoints
        complete = complete_checkpoints(root)
        damage = [layout.damage(layout.iteration_folder(root, iteration)) for iteration in complete]
        self.num_invalid += sum(fault is not None for fault in damage)
        self.problems += [f"{what}: {fault}" for fault in damage if fault is not None]
        named = layout.read_tracker(root)
        if named not in complete and not (named is None and len(complete) <= 1):
            self.problems.append(f"{what}: {layout.TRACKER} names {named}, and there are {complete}")

    def _in_save(self) -> str:
        """Name of the checkpoint under construction; empty where there is none."""
        with contextlib.suppress(FileNotFoundError):
            return next((name for name in os.listdir(self._own.checkpoints) if name.endswith(".incomplete")), "")
        return ""

    def _wait(self, condition: Callable[[], bool], what: str, *, pause: float = 0.005) -> None:
        """Until `condition` holds.

        Raises:
            SoakFailed: the job ended, or said nothing for `STALL_SECONDS`.
        """
        heard, since = -1, time.monotonic()
        while not condition():
            if self.job.exit_code is not None and not condition():
                raise SoakFailed(f"ended by itself with code {self.job.exit_code} before {what}; see {self.job.log}")
            if heard != (heard := self.job.log.stat().st_size):  # each iteration is a line
                since = time.monotonic()
            if time.monotonic() - since > STALL_SECONDS:
                raise SoakFailed(f"hangs, in wait for {what}; see {self.job.log}")
            time.sleep(pause)

    def _wait_until_gone(self, left: Callable[[], Collection[Process]], what: str) -> None:
        """Raises SoakFailed where processes are left after `GRACE_SECONDS`."""
        deadline = time.monotonic() + GRACE_SECONDS
        while orphans := left():
            if time.monotonic() > deadline:
                named = "; ".join(f"{one.pid} ({one.command})" for one in orphans)
                raise SoakFailed(f"orphan, {GRACE_SECONDS:.0f} s after {what}: {named}; see {self.job.log}")
            time.sleep(0.02)


def complete_checkpoints(root: str) -> list[int]:
    """Iterations, ascending."""
    names = os.listdir(root) if os.path.isdir(root) else []
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"iter_\d{7}", name))


def run_reference(own: Files, run_flags: list[str], *, num_ranks: int) -> None:
    """The uninterrupted run. Raises SoakFailed if it fails."""
    command = torchrun(run_flags, num_ranks=num_ranks, max_restarts=0)
    job = Job(command, own.folder / "start.log", num_ranks=num_ranks, max_restarts=0)
    try:
        while job.exit_code is None:
            time.sleep(0.1)
    finally:
        job.end()
    if job.exit_code != 0:
        raise SoakFailed(f"the reference run ended with code {job.exit_code}; see {job.log}")


def left_behind(root: str) -> list[str]:
    """What should not lie in the folder of a run that is through: half checkpoints, and more than were to be kept."""
    complete = complete_checkpoints(root)
    good = {*(os.path.basename(layout.iteration_folder(root, one)) for one in complete), layout.TRACKER, ".lock"}
    lines = [f"{os.path.join(root, name)} was left behind" for name in sorted(set(os.listdir(root)) - good)]
    if len(complete) != KEPT_CHECKPOINTS:
        lines.append(f"{root} holds {complete} and not {KEPT_CHECKPOINTS} checkpoints")
    return lines


def soak(arguments: argparse.Namespace, base: Path) -> bool:
    """Both runs and their comparison below `base`; whether all is well. The last line is the tally."""
    num_ranks, num_iterations = arguments.pipeline_model_parallel_size, arguments.iterations
    reference, own = (Files(folder=base / name) for name in ("reference", "killed"))
    sizes = {"num_iterations": num_iterations, "num_stages": num_ranks}
    for files in (reference, own):
        files.folder.mkdir()
    kills = plan_kills(
        num_kills=arguments.kills, num_iterations=num_iterations, num_ranks=num_ranks, seed=arguments.seed
    )
    killed = KilledRun(own, flags(own, **sizes), num_ranks=num_ranks, starts=plan_starts(arguments.seed))
    is_through, tensors, metrics = False, ["not compared"], ["not compared"]
    try:
        print(f"reference: {num_iterations} iterations on {num_ranks} rank(s)", flush=True)
        run_reference(reference, flags(reference, **sizes), num_ranks=num_ranks)
        killed.run(kills)
        is_through = True
    except SoakFailed as failed:
        killed.problems.append(str(failed))
    finally:
        killed.end()
    if is_through:
        from _soak_comparison import different_metrics, different_tensors  # torch takes seconds to import

        killed.problems += left_behind(own.checkpoints)
        last = [layout.iteration_folder(files.checkpoints, num_iterations) for files in (reference, own)]
        tensors, metrics = different_tensors(*last), different_metrics(reference.metrics, own.metrics)
    for problem in (*killed.problems, *tensors[:NUM_SHOWN], *metrics[:NUM_SHOWN]):
        print(f"fault: {problem}")
    answer = {True: "no", False: "yes"}
    print(
        f"kills {killed.num_kills}, resumes {killed.num_resumes}, invalid checkpoints {killed.num_invalid}, "
        f"final weights equal: {answer[bool(tensors)]}, metrics equal: {answer[bool(metrics)]}",
        flush=True,
    )
    return not (killed.problems or tensors or metrics)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{PROG}: error: {message.removeprefix('argument ')}", file=sys.stderr)
        sys.exit(2)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Exits with code 2, after one line, where a flag is wrong."""
    parser = _Parser(prog=PROG, allow_abbrev=False, description=__doc__,
                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="default: 20")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of moments and kinds (default: 1)")
    parser.add_argument(
        "--iterations",
        type=int,
        metavar="N",
        help=f"of the run (default: {ITERATIONS_PER_KILL} per kill, and {MARGIN})",
    )
    parser.add_argument(
        "--output",
        "--folder",
        metavar="FOLDER",
        help="kept; default a temporary folder, removed on success and named on failure",
    )
    parser.add_argument("--pipeline-model-parallel-size", "--pipeline-size", type=int, default=2, metavar="N",
                        help="stages and ranks (default: 2)")  # fmt: skip
    arguments = parser.parse_args(argv)
    if arguments.iterations is None:
        arguments.iterations = ITERATIONS_PER_KILL * arguments.kills + MARGIN
    for name in ("kills", "pipeline_model_parallel_size"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be at least 1")
    least = arguments.kills + MARGIN
    if arguments.iterations < least:
        parser.error(f"--iterations {arguments.iterations}: --kills {arguments.kills} needs at least {least}")
    if arguments.output is not None:
        try:
            os.makedirs(arguments.output, exist_ok=True)
            is_empty = not os.listdir(arguments.output)
        except OSError as error:
            parser.error(f"--output {arguments.output}: {error.strerror}; give a folder that can be written")
        if not is_empty:
            parser.error(f"--output {arguments.output}: is not empty; give a new one")
    return arguments


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    base = Path(arguments.output or tempfile.mkdtemp(prefix="soak_")).resolve()
    with tempfile.TemporaryDirectory(prefix="soak_") as temporary:  # for what killed processes leave behind
        os.environ["TMPDIR"] = temporary
        is_well = soak(arguments, base)
    if not arguments.output and is_well:
        shutil.rmtree(base)
    elif not is_well:
        print(f"{PROG}: logs, metrics and checkpoints are kept in {base}", file=sys.stderr)
    return 0 if is_well else 1


if __name__ == "__main__":
    leave_with(lambda: main(sys.argv[1:]))
