"""Compare two versions of this code bit for bit: train the same small runs with both.

    python tools/compare_runs.py --before main                   # compare with the working tree of this file
    python tools/compare_runs.py --before v1.0 --after /other/checkout --only grid,resume --output out/logs

Trains each configuration (compare_runs.yaml, --list) with the code before and after, on the CPU, with the same Python
interpreter and the same text. Compares all lines of the metrics files, except times and peak memory, and all tensors of
the last checkpoints. Both versions are copied first, so they may change meanwhile. Prints one line per configuration:
equal, or the first difference. Before the runs, both versions resolve the flags of every configuration, and the results
are compared. The exit code is 0 if all are equal, 1 if not, 2 for bad flags.
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from _parser import Parser, check_positive, command, run_main
from _processes import ROOT, SCRIPTS, CannotRun, launcher, run, text_commands
from _processes import read_metrics as read_lines

PROG = "tools/compare_runs.py"
SIDES = ("before", "after")
NEEDED = (*SCRIPTS.values(), "megatron", "tools", "examples")
"""The parts of a checkout that are run or imported."""
FLAGS, TEXT = "resolved-flags", "tokenized-text"
"""Names of the two comparisons before the runs, and of their folders."""
START_SECONDS = 300.0
"""Time limit of one start."""
COMMON = (
    "--num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 14 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine "
    "--lr-warmup-iters 2 --seed 1234 --data-cache-path {folder}/index --num-workers 1 --eval-interval 6 --eval-iters 2 "
    "--log-interval 1 --metrics-file {folder}/metrics.jsonl --save {folder}/checkpoints "
    "--distributed-timeout-minutes 5"
)
"""Flags of every start; a configuration's flags follow and override them."""
DATA = "--tokenizer-type ByteLevelTokenizer --data-path {data} --split 80,10,10"
IGNORED_FIELDS = frozenset(
    {"step_time_ms", "exchange_ms", "switch_time_ms", "switches", "tokens_per_second"}
    | {"peak_memory_bytes", "reserved_memory_bytes", "saved_activation_bytes"}
    | {"backward_messages", "run"}
)
"""Metrics fields that are not compared: times, memory as the allocator or operating system counts it, the run's name,
which depends on a version's flags, and what older or newer versions lack. Every other field is compared, including
fields added later."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a training script."""

    flags: str
    processes: int = 1
    family: str = "gpt"
    always_before: bool = False

    def words(self, *, folder: Path, data: Path) -> list[str]:
        text = "" if "--mock-data" in self.flags else DATA
        return [word.format(folder=folder, data=data) for word in f"{COMMON} {text} {self.flags}".split()]


Configurations = dict[str, list[Start]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """The two checkouts, the output folder and the stop signal of a comparison."""

    checkouts: dict[str, Path]
    output: Path
    stop: threading.Event
    """When set, end all processes and start none."""

    @property
    def data(self) -> Path:
        """Prefix of the tokenized text that all runs read; the code before writes it."""
        return self.output / TEXT / "before" / "stdlib_text_document"

    def start(self, argv: Sequence[str], side: str, log: Path) -> None:
        """Run the command in a side's checkout. Raises CannotRun."""
        checkout = self.checkouts[side]
        # One thread and no GPU fix the order of sums. PYTHONPATH takes precedence over an installed megatron.bcd.
        environment = {"PYTHONPATH": str(checkout), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
        run(argv, log, cwd=checkout, environment=environment, seconds=START_SECONDS, until=self.stop.is_set)
        if self.stop.is_set():
            raise CannotRun("was stopped")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed flags. Raises ValueError for a bad flag."""
    parser = Parser(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("--before", metavar="REV|FOLDER", help="a git revision, or the folder of a checkout")
    add("--after", metavar="REV|FOLDER", help="the same (default: the working tree of this tool)")
    add("--only", metavar="NAME,...", help="these configurations (default: all)")
    add("--no-runs", action="store_true", help="compare resolved flags only, train nothing")
    add("--list", action="store_true", help="show the configurations and exit")
    add("--jobs", type=int, default=1, metavar="N", help="number of configurations run at once (default: 1)")
    add("--output", metavar="FOLDER", help="keep logs, metrics files and checkpoints here (default: discard them)")
    add("--resolve", nargs=2, help=argparse.SUPPRESS)  # for the subprocess that resolves flags with one version
    return parser.parse_args(argv)


def choose_configurations(only: str | None) -> Configurations:
    """Return the configurations of --only, in the file's order. Raises ValueError for an unknown name."""
    entries = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    names = list(entries) if only is None else [name.strip() for name in only.split(",")]
    for name in names:
        if name not in entries:
            raise ValueError(f"--only {only}: {name or 'an empty name'} is no configuration; --list shows them")
    return {name: [Start(**start) for start in starts] for name, starts in entries.items() if name in names}


def copy_code(flag: str, version: str, folder: Path) -> None:
    """Copy the code of a checkout's folder or of a git revision to `folder`, so that later changes do not matter.
    Raises ValueError if `version` is neither of them, or parts are missing."""
    source = Path(version)
    if source.is_dir():
        folder.mkdir()
        for name in NEEDED:
            if (source / name).is_dir():
                shutil.copytree(source / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif (source / name).exists():
                shutil.copy2(source / name, folder / name)
    else:
        archive = folder.with_suffix(".tar")
        words = ["archive", "--format=tar", f"--output={archive}", "--end-of-options", version]
        try:
            subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            raise ValueError(f"{flag} {version}: neither a folder nor a git revision; give one of them") from None
        shutil.unpack_archive(archive, folder, filter="data")
    missing = [name for name in NEEDED if not (folder / name).exists()]
    if missing:
        raise ValueError(f"{flag} {version}: has no {', '.join(missing)}; give a checkout of this project")


Entry = Mapping[str, str]
"""Field names and their values as text. Two floats have the same text only if they have the same bits."""


def read_metrics(path: Path) -> list[Entry]:
    """Return the lines of a metrics file, without the ignored fields. Raises CannotRun if there are none."""
    # null marks a figure that was not requested; an older version may not have the field
    entries = [
        {
            name: json.dumps(value, sort_keys=True)
            for name, value in line.items()
            if name not in IGNORED_FIELDS and value is not None
        }
        for line in read_lines(path)
    ]
    if not entries:
        raise CannotRun("wrote an empty metrics file")
    return entries


def read_checkpoint(folder: Path) -> Entry:
    """Return a hash of each tensor in the newest checkpoint of `folder`: weights, optimizer, random generators. Raises
    CannotRun if there is no checkpoint, or it cannot be read."""
    try:
        iteration = int((folder / "latest_checkpointed_iteration.txt").read_text())
        latest = folder / f"iter_{iteration:07d}"
        hashes = _tensor_hashes(latest)
    except Exception as error:  # torch raises all kinds of errors for a damaged file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CannotRun(f"has no readable checkpoint: {reason}") from None
    files = sorted(latest.glob("*.safetensors"))
    hashes |= {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files}
    return {"iteration": str(iteration)} | hashes


def _tensor_hashes(folder: Path) -> dict[str, str]:
    import torch  # takes seconds, so not for --list and bad flags
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    def text(tensor: Any) -> str:
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = str(tensor.dtype).removeprefix("torch.")
        return f"{kind}{list(tensor.shape)} {hashlib.sha256(content).hexdigest()[:16]}"

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is enough to read
        stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        tensors = {
            name: torch.zeros(entry.size, dtype=entry.properties.dtype)
            for name, entry in stored.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return {name: text(tensor) for name, tensor in sorted(tensors.items())}


def entry_difference(where: str, before: Entry, after: Entry) -> str | None:
    """Return the first field that differs, or None. A new field may be absent before if it is 0 after."""
    for field in before | after:
        if field not in before and str(after[field]) == "0":
            continue
        old, new = before.get(field, "absent"), after.get(field, "absent")
        if old != new:
            return f"{where}, {field}: {old} before, {new} after"
    return None


def metrics_difference(before: Sequence[Entry], after: Sequence[Entry]) -> str | None:
    """Return the first difference of two metrics files, or None."""
    for old, new in zip(before, after, strict=False):
        difference = entry_difference(f"iteration {old.get('iteration', '?')}", old, new)
        if difference is not None:
            return difference
    return None if len(before) == len(after) else f"{len(before)} lines of metrics before, {len(after)} after"


def run_difference(before: Path, after: Path) -> str | None:
    """Return the first difference of two runs: of their metrics, then of their newest checkpoints. Raises CannotRun if
    one side has nothing to compare; the message names it."""
    metrics, last = [], []
    for side, folder in zip(SIDES, (before, after), strict=True):
        try:
            metrics.append(read_metrics(folder / "metrics.jsonl"))
            last.append(read_checkpoint(folder / "checkpoints"))
        except CannotRun as error:
            raise CannotRun(f"{side} {error}") from None
    return metrics_difference(*metrics) or entry_difference("last checkpoint", *last)


def command_lines(configurations: Configurations) -> dict[str, tuple[str, int, list[str]]]:
    """Return family, ranks and flags of all starts by name."""
    return {
        f"{name}, start {number}": (start.family, start.processes, start.words(folder=Path("run"), data=Path("text")))
        for name, starts in configurations.items()
        for number, start in enumerate(starts, start=1)
    }


Resolved = dict[str, object] | str
"""Values by flag, or an error message."""


def resolve(family: str, world_size: int, words: list[str]) -> Resolved:
    """Return the values that the imported version derives from the flags. Uses only parts that every version has."""
    from megatron.bcd.arguments import FAMILY_DEFAULTS, parse_run_config, run_config_to_dict

    options = {"prog": SCRIPTS[family], "world_size": world_size}
    options |= {"defaults": FAMILY_DEFAULTS["llama"] if family == "llama" else None}
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            sections = run_config_to_dict(parse_run_config(words, **options))
    except ValueError as error:
        return str(error)
    except SystemExit:
        return errors.getvalue()
    values = (each for section in sections.values() for each in section.items())
    return {name.replace("_", "-"): value for name, value in values}


def resolved_difference(lines: Mapping[str, tuple[str, int, list[str]]], task: Task) -> str | None:
    """Resolve all lines with both versions and return the first difference. Raises CannotRun naming the side."""
    folder = task.output / FLAGS
    folder.mkdir()
    (folder / "lines.json").write_text(json.dumps(lines))
    resolved = {}
    for side in SIDES:
        argv = [sys.executable, __file__, "--resolve", str(folder / "lines.json"), str(folder / f"{side}.json")]
        try:
            task.start(argv, side, folder / f"{side}.log")
        except CannotRun as error:
            raise CannotRun(f"{side} {error}") from None
        resolved[side] = json.loads((folder / f"{side}.json").read_text())
    accepted = {side: sum(not isinstance(value, str) for value in values.values()) for side, values in resolved.items()}
    print(f"{len(lines)} command lines: {accepted['before']} accepted before, {accepted['after']} after")
    return first_difference(resolved["before"], resolved["after"])


def first_difference(before: Mapping[str, Resolved], after: Mapping[str, Resolved]) -> str | None:
    """Return the first difference among the lines that the old version accepts.

    A flag that only one version has counts as a difference unless it is off.
    """
    for name, values in before.items():
        now = after[name]
        if isinstance(values, str):
            continue
        if isinstance(now, str):
            return f"{name} is refused: {now.strip()}"
        for flag in values | now:
            old, new = values.get(flag), now.get(flag)
            if (old or None) != (new or None):
                return f"{name}: {flag} was {old}, is {new}"
    return None


def tokenize_text(task: Task) -> str | None:
    """Tokenize the standard library with both versions; return which file differs, or None. Raises CannotRun."""
    for side in SIDES:
        folder = task.output / TEXT / side
        folder.mkdir(parents=True)
        for words in text_commands(folder):
            try:
                task.start([sys.executable, *words], side, folder / f"{Path(words[0]).stem}.log")
            except CannotRun as error:
                raise CannotRun(f"{words[0]} {side} {error}") from None
    after = task.output / TEXT / "after" / task.data.name
    for suffix in (".bin", ".idx"):
        if not filecmp.cmp(f"{task.data}{suffix}", f"{after}{suffix}", shallow=False):
            return f"{after.name}{suffix} differs"
    return None


def run_configuration(name: str, starts: Sequence[Start], task: Task) -> None:
    """Run all starts, before and after. Raises CannotRun naming the side and the start."""
    for side in SIDES:
        folder = task.output / name / side
        folder.mkdir(parents=True)
        for number, start in enumerate(starts, start=1):
            words = start.words(folder=folder, data=task.data)
            argv = [*launcher(start.processes), SCRIPTS[start.family], *words]
            try:
                task.start(argv, "before" if start.always_before else side, folder / f"log{number}")
            except CannotRun as error:
                which = f", start {number}," if len(starts) > 1 else ""
                raise CannotRun(f"{side}{which} {error}") from None


def compare_all(configurations: Configurations, task: Task, *, jobs: int) -> list[str]:
    """Run and compare all configurations, print a line for each, and return the names of those that differ."""
    different = []
    with ThreadPoolExecutor(jobs) as pool:
        runs = {pool.submit(run_configuration, name, starts, task): name for name, starts in configurations.items()}
        try:
            for future in as_completed(runs):
                name = runs[future]
                try:
                    future.result()
                    problem = run_difference(*(task.output / name / side for side in SIDES))
                except CannotRun as error:
                    problem = str(error)
                if not _report(name, problem):
                    different.append(name)
        except BaseException:
            task.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return different


def _report(name: str, problem: str | None) -> bool:
    """Print one line; return True if there is no problem."""
    print(f"{name:<20}  {problem or 'equal'}", flush=True)
    return problem is None


def compare(arguments: argparse.Namespace) -> int:
    """Run the comparison and return the exit code. Raises ValueError for a user's mistake."""
    if arguments.resolve:
        lines, result = map(Path, arguments.resolve)
        resolved = {name: resolve(*line) for name, line in json.loads(lines.read_text()).items()}
        result.write_text(json.dumps(resolved, default=str))
        return 0
    configurations = choose_configurations(arguments.only)
    if arguments.list:
        for name, starts in configurations.items():
            print(f"{name:<20}", *(f"{start.family}, {start.processes} ranks: {start.flags}" for start in starts))
        return 0
    if arguments.before is None:
        raise ValueError("--before is required: a git revision, or the folder of a checkout")
    check_positive(arguments, "jobs")
    with tempfile.TemporaryDirectory(prefix="compare_runs_") as temporary:
        output = _empty_folder(arguments.output or f"{temporary}/output")
        checkouts = {side: Path(temporary, side) for side in SIDES}
        copy_code("--before", arguments.before, checkouts["before"])
        copy_code("--after", arguments.after or str(ROOT), checkouts["after"])
        task = Task(checkouts=checkouts, output=output, stop=threading.Event())
        started = time.monotonic()
        try:
            different = [] if _report(FLAGS, resolved_difference(command_lines(configurations), task)) else [FLAGS]
            if arguments.no_runs:
                return 1 if different else 0
            different += [] if _report(TEXT, tokenize_text(task)) else [TEXT]
        except CannotRun as error:
            print(error)
            return 1
        different += compare_all(configurations, task, jobs=arguments.jobs)
    total, seconds = len(configurations) + 2, time.monotonic() - started
    print(f"{f'{len(different)} of {total} not equal' if different else f'all {total} equal'} ({seconds:,.0f} s)")
    if different and not arguments.output:
        print("--output FOLDER keeps the logs")
    return 1 if different else 0


def _empty_folder(name: str) -> Path:
    """Create the folder. Raises ValueError if it cannot be written or is not empty."""
    path = Path(name).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        is_empty = not any(path.iterdir())
    except OSError as error:
        raise ValueError(f"--output {name} can't be written ({error.strerror}): give another folder") from error
    if not is_empty:
        raise ValueError(f"--output {name} is not empty: give a new folder")
    return path


@command(PROG)
def main(argv: Sequence[str]) -> int:
    return compare(parse_arguments(argv))


if __name__ == "__main__":
    run_main(main)
