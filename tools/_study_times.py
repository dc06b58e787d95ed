"""Step times of a study's methods, taken in turn, so that other work on the machine slows all of them alike."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _study_data import ROOT
from _study_plan import Point, points
from _study_runner import last_words, tell
from _study_runs import METRICS_FILE, Commands, fastest_step_ms, write_json

TIMES_FILE = "step_times.json"
STEPS = 60
STEPS_PER_BLOCK = 4
"""So that each of up to 15 blocks has its turn within a run; of more blocks, 15 are timed."""

Times = Mapping[str, Any]
""""ms": model: method: milliseconds of a step; "rounds" and "commit", with which they were taken."""


def step_ms(times: Times, point: Point) -> float | None:
    """Of a method on a model; texts make no difference."""
    return times.get("ms", {}).get(point.model.name, {}).get(point.method.name)


def take_times(commands: Commands, *, folder: Path, only: str, rounds: int, commit: str) -> Times:
    """Run every method for `STEPS` steps, one process at a time, and again in each round; write the medians.

    Times of methods that `only` leaves out stay as they were if they come from the same commit: otherwise they are
    dropped, since a table compares them. Raises ValueError for a run that fails.
    """
    first = commands.study.data[0].name
    todo = [point for point in points(commands.study, only) if point.data.name == first]
    taken: dict[Point, list[float]] = {point: [] for point in todo}
    for number in range(rounds):
        for point in todo:
            taken[point].append(_one(commands, point))
            about = f"{point.model.name} {point.method.name}: {taken[point][-1]:.1f} ms"
            tell(f"step time, round {number + 1} of {rounds}: {about}")
    before = read_times(folder)
    kept = before.get("ms", {}) if before.get("commit") == commit else {}
    ms = {model: dict(methods) for model, methods in kept.items()}
    for point, values in taken.items():
        ms.setdefault(point.model.name, {})[point.method.name] = statistics.median(values)
    times = {"rounds": rounds, "commit": commit, "ms": ms}
    write_json(folder / TIMES_FILE, times)
    return times


def _one(commands: Commands, point: Point) -> float:
    study = commands.study
    run = point.run(study.learning_rates[0], study.seeds[0], STEPS / study.steps)
    with tempfile.TemporaryDirectory() as name:
        words = commands.start_words(run, metrics_file=Path(name, METRICS_FILE))
        words += ["--bcd-steps-per-block", str(STEPS_PER_BLOCK), "--log-interval", "1"]
        done = subprocess.run(
            words,
            cwd=ROOT,
            env=os.environ | commands.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if done.returncode:
            raise ValueError(f"{run.about}: {last_words(done.stdout, done.returncode)}")
        with open(Path(name, METRICS_FILE), encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
    return fastest_step_ms([line for line in lines if "step_time_ms" in line])


def read_times(folder: Path) -> Times:
    """What `take_times` has written; empty where it has not."""
    try:
        return json.loads((folder / TIMES_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
