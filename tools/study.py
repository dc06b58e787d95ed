"""Runs a study: models x methods x texts x seeds with tuned learning rates, then a table and two pictures.

    python tools/study.py studies/gpt_10_minutes.yaml
    python tools/study.py studies/gpt_frontier_small.yaml --list
    python tools/study.py studies/gpt_frontier_small.yaml --max-minutes 60 --only 'full*,muon*'

Each run is one training process with its own folder below --output. A study that was killed continues where it was:
finished runs are not repeated, others resume from their checkpoints. docs/learning.md explains study files and columns.
Exit code 1 if a run failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _parser import Parser, bad_input, leave_when_stopped
from _study_data import ROOT, prepare
from _study_file import Study, check_only, made_folder, read_study
from _study_report import Report, published_lookup, published_times
from _study_runner import Runner, tell
from _study_runs import Commands
from _study_times import read_times, take_times
from filelock import FileLock, Timeout

PROG = "tools/study.py"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Raises ValueError for a flag that is unknown or no number."""
    parser = Parser(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("study", metavar="STUDY.yaml")
    add("--output", type=Path, default=Path("out", "studies"), metavar="FOLDER", help="(default: out/studies)")
    add(
        "--data",
        type=Path,
        default=Path(os.environ.get("STUDY_DATA") or ROOT.parent / "shared" / "data"),
        metavar="FOLDER",
        help="holds wikitext-2/train.txt and others (default: $STUDY_DATA, else ../shared/data)",
    )
    add("--only", default="*", metavar="GLOB", help="methods to run, with commas")
    add("--jobs", type=int, metavar="N", help="runs side by side (default: the study's)")
    add("--extend", type=int, metavar="N", help="factors of 2 by which a learning-rate grid may grow at its best edge")
    add("--max-minutes", type=float, metavar="X", help="start no run after this time; what runs is waited for")
    add("--prefix", default="", metavar="COMMAND", help='put before each run\'s command, such as "nice -n 10"')
    add("--list", action="store_true", help="print what is to be run, and end")
    add("--report-only", action="store_true", help="run nothing: table and pictures of what has finished")
    add("--redraw", action="store_true", help="run nothing: table and pictures of the results in studies/")
    add("--keep-published", action="store_true", help="do not repeat runs whose results are in studies/")
    add("--step-times", type=int, metavar="N", help="run nothing else: time every method in turn, N times")
    add("--publish", action="store_true", help="write results to studies/ and docs/images/ too")
    return parser.parse_args(argv)


def read(arguments: argparse.Namespace) -> Study:
    """The study with what flags change. Raises ValueError."""
    study = read_study(arguments.study)
    for name, least in (("jobs", 1), ("extend", 0), ("step_times", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
        if value is not None and name != "step_times":
            study = replace(study, **{name: value})
    check_only(arguments.only, study)
    return study


def run(arguments: argparse.Namespace) -> int:
    """All of it; the exit code. Raises ValueError for a user's mistake."""
    study = read(arguments)
    folder = made_folder((arguments.output / study.name).resolve(), flag="--output", given=arguments.output)
    texts = {}
    if not arguments.redraw:
        texts = prepare(study, data_folder=arguments.data.resolve(), folder=folder.parent / "texts")
    commands = Commands(study, texts, data_folder=arguments.data.resolve(), folder=folder)
    runner = Runner(
        commands,
        jobs=study.jobs,
        only=arguments.only,
        prefix=arguments.prefix,
        commit=_commit(),
        **({"published": published_lookup(study.name)} if arguments.keep_published else {}),
    )
    if arguments.list:
        todo = runner.todo()
        for one in todo:
            print(one.about)
        print(f"{len(todo)} runs can start now; about {runner.minutes_left():.0f} minutes for all")
        return 0

    lookup = published_lookup(study.name) if arguments.redraw else runner.lookup
    times = read_times(folder)
    if arguments.redraw or (arguments.keep_published and not times):
        times = published_times(study.name)
    if arguments.step_times:
        times = take_times(
            commands, folder=folder, only=arguments.only, rounds=arguments.step_times, commit=runner.commit
        )
    report = Report(commands, lookup, times, folder=folder, texts=texts)
    if not (arguments.report_only or arguments.redraw or arguments.step_times):
        try:
            with FileLock(folder / ".lock", timeout=0):
                tell(f"{study.name}: about {runner.minutes_left():.0f} min, in {folder}")
                runner.run(max_minutes=arguments.max_minutes, finished=report.write)
        except Timeout:
            raise ValueError(f"{folder} is in use by another {PROG}; wait for it, or give another --output") from None
    print(report.write())
    pictures = report.draw()
    for path in report.publish(pictures) if arguments.publish else [folder / "table.md", *pictures]:
        print(f"wrote {path}")
    return 1 if report.has_failures else 0


def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(parse_arguments(argv))
    except ValueError as error:
        return bad_input(PROG, error)


if __name__ == "__main__":
    leave_when_stopped(main)
