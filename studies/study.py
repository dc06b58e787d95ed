"""Run a study: models x methods x texts x seeds with tuned learning rates; then write a table and pictures.

    python studies/study.py studies/gpt_10_minutes.yaml
    python studies/study.py studies/gpt_frontier_small.yaml --list
    python studies/study.py studies/gpt_frontier_small.yaml --max-minutes 60 --only 'full*,muon*'

Every run is one training process, and adds a line to the study's CSV file. A run that has a line is not repeated; a
killed run resumes from its checkpoint. docs/learning.md explains study files and columns. The exit code is 1 if a run
failed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import fnmatch
import functools
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tools"))

from _parser import Parser, check_positive, command, cpu_model, run_main
from _processes import CannotRun, failure_reason, read_metrics
from _processes import run as run_process
from results import (
    ROOT,
    Point,
    Result,
    Run,
    Study,
    Table,
    fastest_step_ms,
    fill_in,
    missing_runs,
    points,
    read_results,
    read_study,
    summarise,
    write_results,
)

from megatron.bcd.blocks.partition import partition_from_config
from megatron.bcd.planner.cost import newton_schulz_flops, shape_of

PROG = "studies/study.py"
PICTURES = ROOT / "docs" / "images"
PATIENCE_SECONDS = 60.0
"""Time that a run gets to write a checkpoint after it is asked to stop."""
TIMING_STEPS, TIMING_STEPS_PER_BLOCK = 60, 4
"""With these values a timing run visits up to 15 blocks."""


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Builds the command and the folder of every run."""

    study: Study
    texts: Mapping[str, tuple[Path, str]]
    """The prefix for --data-path and the hash of the text, by name of the data."""
    data_folder: Path
    folder: Path

    def steps(self, run: Run) -> int:
        return max(1, round(self.study.steps * run.budget))

    def words(self, run: Run, *, data_folder: str = "DATA") -> list[str]:
        """Return program and flags, without the parts that depend on the machine."""
        point = run.point
        values = {"lr": run.lr, "steps": self.steps(run), "seed": run.seed, "data": data_folder}
        words = shlex.split(point.method.program or point.model.program or self.study.program)
        for entry in (self.study, point.model, point.data, point.method):
            words += fill_in(entry.flags, values, where=entry.name)
        return [*words, "--lr", f"{run.lr:g}", "--seed", str(run.seed)]

    def shown(self, run: Run) -> str:
        return " ".join(["python", *self.words(run)])

    def sha256(self, run: Run) -> str:
        return self.texts[run.point.data.name][1] if run.point.data.name in self.texts else ""

    def run_folder(self, run: Run) -> Path:
        """Return a folder with a readable name and a hash of all that determines the outcome, except the code."""
        digest = hashlib.sha256(f"{self.shown(run)} {self.sha256(run)}".encode()).hexdigest()[:10]
        return self.folder / "{}-{}-{}-lr{:g}-seed{}-x{:g}-{}".format(*run.key, digest)

    def start(self, run: Run, metrics_file: Path) -> list[str]:
        """Return the command that trains without saving, to be run in the project's root."""
        text = self.texts.get(run.point.data.name)
        paths = [*(["--data-path", str(text[0])] if text else []), "--metrics-file", str(metrics_file)]
        return [sys.executable, *self.words(run, data_folder=str(self.data_folder)), *paths]

    def checkpoint(self, run: Run) -> list[str]:
        values = {"steps": self.steps(run), "folder": str(self.run_folder(run) / "checkpoint")}
        return fill_in(self.study.checkpoint_flags, values, where="checkpoint_flags")

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"OMP_NUM_THREADS": str(self.study.threads), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def prepare_texts(study: Study, *, data_folder: Path, folder: Path) -> dict[str, tuple[Path, str]]:
    """Tokenize the study's texts into `folder` unless that is done. Raises ValueError for a missing text."""
    folder.mkdir(parents=True, exist_ok=True)
    prepared = {}
    for name, text in ((data.name, data.text) for data in study.data if data.text is not None):
        path = data_folder / text
        if text == "stdlib":
            path = folder / f"{name}.jsonl"
            _call("examples/stdlib_text.py", "--megabytes", "100", "--output", str(path), about=name)
        elif not path.is_file():
            raise ValueError(f"data {name}: {path} is missing; give the folder that holds {text} with --data")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        prefix = folder / f"{name}-{digest[:12]}"
        if not os.path.exists(f"{prefix}_text_document.idx"):  # written last
            _call("tools/preprocess_data.py", "--input", str(path), "--tokenizer-type", "ByteLevelTokenizer",
                  "--append-eod", "--output-prefix", str(prefix), about=name)  # fmt: skip
        prepared[name] = Path(f"{prefix}_text_document"), digest
    return prepared


def _call(*words: str, about: str) -> None:
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"data {about}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")


class Runner:
    """Runs what a study needs in parallel, and leaves no process behind."""

    def __init__(self, commands: Commands, results_file: Path, *, only: str = "*") -> None:
        self.commands, self.study, self.only = commands, commands.study, only
        self._file = results_file
        self.results = {result.key: result for result in read_results(results_file)}
        self._running: dict[Run, tuple[subprocess.Popen[bytes], float]] = {}

    def lookup(self, run: Run) -> Result | None:
        """Return the result of a run if its command and its text are unchanged."""
        result = self.results.get(run.key)
        if result is None or result.failure:
            return result
        is_same = result.command == self.commands.shown(run)
        return result if is_same and self.commands.sha256(run) in ("", result.text_sha256) else None

    @property
    def timing(self) -> Result | None:
        return next((result for result in self.results.values() if result.rounds), None)

    def step_ms(self, point: Point) -> float | None:
        """Return the step time of a timing line, which does not depend on the text."""
        names = (point.model.name, point.method.name)
        timings = (result for result in self.results.values() if result.rounds)
        return next((timing.step_ms for timing in timings if (timing.model, timing.method) == names), None)

    def todo(self) -> tuple[list[Run], float]:
        """Return the runs that can start now, and estimate the minutes until all are done."""
        todo, waiting = missing_runs(self.study, self.lookup, self.only)
        done = [result for result in self.results.values() if result.minutes and result.steps]
        per_step = self.study.minutes / self.study.steps
        if done:
            per_step = sum(result.minutes or 0 for result in done) / sum(result.steps or 0 for result in done)
        minutes = per_step * (sum(map(self.commands.steps, todo)) + self.study.steps * waiting) / self.study.jobs
        return [run for run in todo if run not in self._running], minutes

    def run(self, *, max_minutes: float | None, finished: Callable[[], Any] = lambda: None) -> None:
        """Train the missing runs, some at a time. Start none after `max_minutes`. Call `finished` after each one."""
        begin = time.monotonic()
        try:
            while True:
                is_late = max_minutes is not None and time.monotonic() - begin > 60 * max_minutes
                free = 0 if is_late else self.study.jobs - len(self._running)
                for run in self.todo()[0][:free] if free else []:
                    self._start(run)
                if not self._running:
                    return
                time.sleep(0.2)
                for run in [run for run, (process, _) in self._running.items() if process.poll() is not None]:
                    self._end(run)
                    finished()
        finally:
            self._stop_all()

    def _start(self, run: Run) -> None:
        folder = self.commands.run_folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "log", "ab") as log:
            try:  # the process inherits the lock: a run may have outlived its killed study
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{folder}: in use by a run of a killed study. Wait for it, or end it.") from None
            if not any((folder / "checkpoint").glob("[!.]*")):  # no resumption, perhaps another version: start afresh
                (folder / "metrics.jsonl").unlink(missing_ok=True)
            process = subprocess.Popen(
                [*self.commands.start(run, folder / "metrics.jsonl"), *self.commands.checkpoint(run)],
                cwd=ROOT,
                env=self.commands.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must reach this program only, which then stops the runs
            )
        self._running[run] = process, time.monotonic()
        tell(f"start {run}")

    def _end(self, run: Run) -> None:
        process, start = self._running.pop(run)
        folder, minutes = self.commands.run_folder(run), (time.monotonic() - start) / 60
        model, data, method, lr, seed, budget = run.key
        about = {"model": model, "data": data, "method": method, "lr": lr, "seed": seed, "budget": budget}
        try:
            log = (folder / "log").read_text(encoding="utf-8", errors="replace")
            if process.returncode:
                raise ValueError(failure_reason(log, process.returncode))
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            summary = re.search(r"^parameters\s+([\d,]+) ", log, re.MULTILINE)
            number = int(summary[1].replace(",", "")) if summary else None
            about |= summarise(lines, metric=self.study.metric, num_parameters=number)
            about |= {"steps": self.commands.steps(run), "minutes": minutes, "commit": commit(), "cpu": cpu_model()}
            about |= {"text_sha256": self.commands.sha256(run), "command": self.commands.shown(run)}
            self._add(Result(**about))
            shutil.rmtree(folder / "checkpoint", ignore_errors=True)
        except (OSError, ValueError) as error:
            self.results[run.key] = Result(**about, failure=" ".join(str(error).split()))
        result = self.results[run.key]
        outcome = f"failed: {result.failure}" if result.failure else f"test {result.test}, {minutes:.1f} min"
        tell(f"done  {run}: {outcome}; about {self.todo()[1]:.0f} min left")

    def _add(self, result: Result) -> None:
        """Add a result to the file, which another process may have changed."""
        stored = {other.key: other for other in read_results(self._file)} | {result.key: result}
        write_results(self._file, stored.values())
        self.results[result.key] = result

    def take_times(self, rounds: int) -> None:
        """Time every method in turn, one process at a time, `rounds` times, so that other work slows all alike."""
        first = self.study.data[0].name
        todo = [point for point in points(self.study, self.only) if point.data.name == first]
        taken: dict[Point, list[float]] = {point: [] for point in todo}
        for number in range(rounds):
            for point in todo:
                taken[point].append(self._time(point))
                about = f"{point.model.name} {point.method.name}: {taken[point][-1]:.1f} ms"
                tell(f"step time, round {number + 1} of {rounds}: {about}")
        for point, values in taken.items():
            names = {"model": point.model.name, "data": first, "method": point.method.name}
            self._add(
                Result(**names, step_ms=statistics.median(values), rounds=rounds, commit=commit(), cpu=cpu_model())
            )

    def _time(self, point: Point) -> float:
        run = point.run(self.study.learning_rates[0], self.study.seeds[0], TIMING_STEPS / self.study.steps)
        with tempfile.TemporaryDirectory() as name:
            metrics = Path(name, "metrics.jsonl")
            words = self.commands.start(run, metrics)
            words += ["--bcd-steps-per-block", str(TIMING_STEPS_PER_BLOCK), "--log-interval", "1"]
            try:
                run_process(words, Path(name, "log"), threads=self.study.threads)
                lines = read_metrics(metrics)
            except CannotRun as error:
                raise ValueError(f"{run}: {error}") from None
        return fastest_step_ms([line for line in lines if "step_time_ms" in line])

    def _stop_all(self) -> None:
        """Ask the runs to stop, which makes them write a checkpoint, and kill those that do not."""
        for process, _ in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_SECONDS
        for process, _ in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def tell(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)


@functools.cache
def commit() -> str:
    """Return BCD_COMMIT if it is set, because a copy may have another history, or else the commit from git."""
    if "BCD_COMMIT" in os.environ:
        return os.environ["BCD_COMMIT"]
    words = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def step_arithmetic(commands: Commands, point: Point) -> float | None:
    """Return the arithmetic of a step relative to full training: forward passes, input and weight gradients of the
    layers. Returns None for a program that the planner does not know, or flags that it rejects."""
    if point.method.arithmetic_as is not None:
        point = replace(point, method=commands.study.method(point.method.arithmetic_as))
    program, *flags = commands.words(point.run(1e-3, 1))
    form = {"pretrain_gpt_bcd.py": "gpt", "pretrain_llama_bcd.py": "llama"}.get(PurePath(program).name)
    return flags_arithmetic(form, flags) if form else None


def flags_arithmetic(form: str, flags: Sequence[str]) -> float | None:
    """Return `step_arithmetic` for the flags of a training script: the mean over the blocks, in one process.

    It is computed as in planner.cost, and includes orthogonalisation.
    """
    from megatron.bcd.arguments import FAMILY_DEFAULTS, parse_run_config  # imports torch

    try:
        words = [*flags, "--data-path", "text"]
        config = parse_run_config(words, prog="", defaults=FAMILY_DEFAULTS.get(form), world_size=1)
    except ValueError:
        return None
    partition = partition_from_config(config)
    num_layers, newton_schulz, total = partition.num_layers, _newton_schulz(config), 0.0
    for block in range(partition.num_blocks):
        active = len(partition.blocks[block].layers) * partition.has_active_block
        inactive = sum(partition.has_inactive_update(layer, block) for layer in range(num_layers))
        total += num_layers + (num_layers - len(partition.prefix_layers(block))) + active + inactive
        total += newton_schulz * inactive * (config.bcd.bcd_inactive_update == "orthogonal")
        total += newton_schulz * active * (config.optimizer.optimizer == "muon")
    return total / partition.num_blocks / (3 * num_layers)


def _newton_schulz(config: Any) -> float:
    """Return the cost of Newton-Schulz for one layer's matrices, relative to a forward pass of the layer for one
    iteration's tokens, which takes 2 m n operations per token and m x n matrix.
    """
    shape = shape_of(config, vocab_size=0)
    hidden, query, key, ffn = shape.hidden_size, shape.query_size, shape.key_value_size, shape.ffn_hidden_size
    attention = [(query, hidden), (key, hidden), (key, hidden)]
    if not config.optimizer.muon_split_qkv:
        attention = [(query + 2 * key, hidden)]
    matrices = [*attention, (hidden, query), ((1 + shape.gated) * ffn, hidden), (hidden, ffn)]
    num_steps, is_gram_iterated = config.optimizer.muon_num_ns_steps, config.bcd.muon_gram_iteration
    steps = [newton_schulz_flops(*each, num_steps=num_steps, is_gram_iterated=is_gram_iterated) for each in matrices]
    tokens = config.training.global_batch_size * config.model.seq_length
    return sum(steps) / (2 * tokens * sum(map(math.prod, matrices)))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed flags. Raises ValueError for a bad flag."""
    parser = Parser(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("study", metavar="STUDY.yaml")
    add("--results", type=Path, metavar="FILE", help="CSV file of results (default: beside the study file)")
    add("--output", type=Path, default=Path("out", "studies"), metavar="FOLDER",
        help="folder of the runs (default: out/studies)")  # fmt: skip
    add("--data", type=Path, default=Path(os.environ.get("STUDY_DATA") or ROOT.parent / "shared" / "data"),
        metavar="FOLDER", help="folder with wikitext-2/train.txt and others (default: $STUDY_DATA, or else "
        "../shared/data)")  # fmt: skip
    add("--only", default="*", metavar="GLOB,...", help="methods to run (default: all)")
    add("--jobs", type=int, metavar="N", help="parallel runs (default: the study's)")
    add("--max-minutes", type=float, metavar="X", help="start no run after this time, but wait for the current ones")
    add("--list", action="store_true", help="print the runs that are missing, and exit")
    add("--redraw", action="store_true", help="run nothing: write table and pictures from the existing results")
    add("--step-times", type=int, metavar="N", help="only time every method in turn, N times")
    return parser.parse_args(argv)


@command(PROG)
def main(argv: Sequence[str]) -> int:
    """Run the study and return the exit code."""
    arguments = parse_arguments(argv)
    study = read_study(arguments.study)
    check_positive(arguments, "jobs", "step_times")
    study = replace(study, jobs=arguments.jobs or study.jobs)
    for pattern in arguments.only.split(","):
        if not fnmatch.filter([method.name for method in study.methods], pattern.strip()):
            names = ", ".join(method.name for method in study.methods)
            raise ValueError(f"--only {arguments.only}: {pattern.strip() or 'an empty name'} matches none of {names}")
    results_file = arguments.results or Path(arguments.study).with_suffix(".csv")
    folder = (arguments.output / study.name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    data_folder = arguments.data.resolve()
    texts = {} if arguments.redraw else prepare_texts(study, data_folder=data_folder, folder=folder.parent / "texts")
    commands = Commands(study=study, texts=texts, data_folder=data_folder, folder=folder)
    runner = Runner(commands, results_file, only=arguments.only)
    todo, minutes = runner.todo()
    if arguments.list:
        print(*todo, f"{len(todo)} runs can start now; about {minutes:.0f} minutes for all", sep="\n")
        return 0
    if arguments.step_times:
        runner.take_times(arguments.step_times)
    elif not arguments.redraw:
        tell(f"{study.name}: about {minutes:.0f} min, in {folder}")
        runner.run(max_minutes=arguments.max_minutes)
    arithmetic = functools.cache(functools.partial(step_arithmetic, commands))
    table = Table(study, runner.lookup, arithmetic=arithmetic, step_ms=runner.step_ms)
    text = table.markdown(command=f"python {PROG} studies/{study.name}.yaml", timing=runner.timing)
    results_file.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    from figures import draw  # matplotlib is slow to import

    is_published = results_file.resolve().parent == ROOT / "studies"
    for path in draw(study, [row for row in table.rows if row.test is not None], PICTURES if is_published else folder):
        print(f"wrote {path}")
    return 1 if any(row.failure for row in table.rows) else 0


if __name__ == "__main__":
    run_main(main)
