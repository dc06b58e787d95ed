"""Starts the runs of tools/study.py side by side, and leaves no process behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from _study_data import ROOT
from _study_plan import missing_runs, num_later
from _study_runs import CHECKPOINT_FOLDER, LOG_FILE, METRICS_FILE, Commands, Result, Run

POLL_SECONDS = 0.2
PATIENCE_SECONDS = 60.0
"""What a run that is asked to stop gets to write a checkpoint."""


@dataclass(kw_only=True)
class Started:
    """A run's process."""

    run: Run
    process: subprocess.Popen[bytes]
    start: float

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self.start) / 60


class Runner:
    """Runs what a study needs; results of earlier starts count."""

    def __init__(
        self,
        commands: Commands,
        *,
        jobs: int,
        only: str,
        prefix: str,
        commit: str,
        published: Callable[[Run], Result | None] = lambda run: None,
    ) -> None:
        """`prefix` is put before each command, such as "nice -n 10". Runs that `published` has with the same command
        are not repeated."""
        self.commands = commands
        self.study = commands.study
        self._jobs, self._only, self._prefix, self.commit = jobs, only, shlex.split(prefix), commit
        self._published = published
        self._results: dict[Run, Result | None] = {}
        self._running: list[Started] = []

    def lookup(self, run: Run) -> Result | None:
        """A run's result; a failure of this start counts as one."""
        if self._results.get(run) is None:
            self._results[run] = self.commands.stored(run) or self._published_result(run)
        return self._results[run]

    def _published_result(self, run: Run) -> Result | None:
        result = self._published(run)
        return result if result is not None and result.command == self.commands.shown(run) else None

    def todo(self) -> list[Run]:
        """What could be started now."""
        running = {started.run for started in self._running}
        return [run for run in missing_runs(self.study, self.lookup, self._only) if run not in running]

    def minutes_left(self) -> float:
        """Of wall time, from the finished runs' (the study file's guess before there are any)."""
        done = [result for result in self._results.values() if result is not None and result.minutes]
        per_step = (
            sum(result.minutes for result in done) / sum(result.steps for result in done)
            if done
            else self.study.minutes / self.study.steps
        )
        steps = sum(self.commands.steps(run) for run in (*self.todo(), *(started.run for started in self._running)))
        steps += round(self.study.steps * num_later(self.study, self.lookup, self._only))
        return per_step * steps / self._jobs

    def run(self, *, max_minutes: float | None, finished: Callable[[], None]) -> None:
        """Until nothing is left to start; after `max_minutes` only what runs is waited for.

        `finished` is called after each run.
        """
        begin = time.monotonic()
        try:
            while True:
                is_late = max_minutes is not None and time.monotonic() - begin > 60 * max_minutes
                free = 0 if is_late else self._jobs - len(self._running)
                for run in self.todo()[:free] if free else []:  # it reads the results of all runs
                    self._start(run)
                if not self._running:
                    return
                time.sleep(POLL_SECONDS)
                for started in [one for one in self._running if one.process.poll() is not None]:
                    self._end(started)
                    finished()
        finally:
            self._stop_all()

    def _start(self, run: Run) -> None:
        folder = self.commands.folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / LOG_FILE, "ab") as log:
            try:  # the process inherits the lock: a run of a study that was killed outright may still be there
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{folder}: still in use by a run of a killed study; wait for it, or end it") from None
            if not any((folder / CHECKPOINT_FOLDER).glob("[!.]*")):  # it starts anew, perhaps in another version
                (folder / METRICS_FILE).unlink(missing_ok=True)
            process = subprocess.Popen(
                [*self._prefix, *self.commands.argv(run)],
                cwd=ROOT,
                env=os.environ | self.commands.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt at the terminal is for this tool, which then stops the runs
            )
        self._running.append(Started(run=run, process=process, start=time.monotonic()))
        tell(f"start {run.about}")

    def _end(self, started: Started) -> None:
        self._running.remove(started)
        run, folder = started.run, self.commands.folder(started.run)
        try:
            if started.process.returncode:
                log = (folder / LOG_FILE).read_text(encoding="utf-8", errors="replace")
                raise ValueError(last_words(log, started.process.returncode))
            result = self.commands.finish(run, minutes=started.minutes, commit=self.commit)
            shutil.rmtree(folder / CHECKPOINT_FOLDER, ignore_errors=True)
        except (OSError, ValueError) as error:
            result = self.commands.failed(run, " ".join(str(error).split()))
        self._results[run] = result
        said = f"failed: {result.failure}" if result.failure else f"test {result.test}, {result.minutes:.1f} min"
        tell(f"done  {run.about}: {said}; about {self.minutes_left():.0f} min left")

    def _stop_all(self) -> None:
        """Ask what still runs to stop, which then writes a checkpoint, and kill what does not."""
        for started in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_SECONDS
        for started in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.process.pid, signal.SIGKILL)
            started.process.wait()


def last_words(log: str, code: int) -> str:
    """Why a run failed: its error, or else its last line."""
    said = re.findall(r"^\S+: error: (.+)$", log, re.MULTILINE)
    lines = [line for line in log.splitlines() if line.strip()]
    return said[-1] if said else f"ended with code {code}: {lines[-1] if lines else 'no output'}"


def tell(line: str) -> None:
    """Progress, with the time of day."""
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)
