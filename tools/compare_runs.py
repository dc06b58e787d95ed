"""Whether two versions of this code train the same, bit for bit: the same small runs with both, compared.

    python tools/compare_runs.py --before main                   # with the working tree that this file lies in
    python tools/compare_runs.py --before v1.0 --after /other/checkout --only grid,resume --output out/logs

Each configuration (compare_runs.yaml, --list) is trained with the code before and after, by one Python interpreter, on
the CPU, on text that is made once. Compared are all lines of the metrics files but for times and peak memory, and all
tensors of the last checkpoints. Revisions are exported, folders are copied first, so both may change meanwhile. One
line for each configuration: equal, or the first difference. Before the runs, the flags of every configuration are
resolved by both versions and compared, and those of --recipes. Exit code 0 where all are equal, 1 where not, 2 for bad
flags.
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
from _parser import Parser, command, leave_with
from _processes import ROOT, SCRIPTS, CannotRun, launcher, run, text_commands
from _processes import read_metrics as read_lines

PROG = "tools/compare_runs.py"
SIDES = ("before", "after")
NEEDED = (*SCRIPTS.values(), "megatron", "tools", "examples")
"""Of a checkout, what is run or imported."""
FLAGS, TEXT = "resolved-flags", "tokenized-text"
"""The names of what is compared before the runs, and of their folders."""
START_SECONDS = 300.0
"""After which a start hangs."""
COMMON = (
    "--num-layers 6 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 14 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine "
    "--lr-warmup-iters 2 --seed 1234 --data-cache-path {folder}/index --num-workers 1 --eval-interval 6 --eval-iters 2 "
    "--log-interval 1 --metrics-file {folder}/metrics.jsonl --save {folder}/checkpoints "
    "--distributed-timeout-minutes 5 --cpu-kernels megatron"
)
"""Of every start; what a configuration says comes after it and wins. Older versions have CPU kernels of their own,
which --cpu-kernels turns off; now it has no effect."""
DATA = "--tokenizer-type ByteLevelTokenizer --data-path {data} --split 80,10,10"
IGNORED_FIELDS = frozenset(
    {"step_time_ms", "exchange_ms", "switch_time_ms", "switches", "tokens_per_second"}
    | {"peak_memory_bytes", "reserved_memory_bytes", "run"}
)
"""Fields of a metrics file that differ from one run to the next: times, and memory that the allocator or the operating
system counts; the run's name, which depends on the flags that a version has; and switches, which older versions lack
and the blocks of the steps show. Everything else is compared, fields that are added later too."""
REPLACED = ("eval-generate", "eval-generate-tokens", "bcd-resting-layers")
"""Flags whose place something else has taken: accepted by both versions, and a value by one only."""
RENAMED = {f"bcd-resting-{name}": f"bcd-inactive-{name}" for name in ("update", "lr-ratio", "grad-dtype")}
"""Flags with other names in older versions."""
ADDED = {"bcd-frozen-weights": "device", "bcd-embedding-update": "adam"}
"""What versions without a flag do, where that is not off."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a training script."""

    flags: str
    processes: int = 1
    family: str = "gpt"
    always_before: bool = False

    def words(self, *, folder: Path, data: Path) -> list[str]:
        """All flags."""
        text = "" if "--mock-data" in self.flags else DATA
        return [word.format(folder=folder, data=data) for word in f"{COMMON} {text} {self.flags}".split()]


Configurations = dict[str, list[Start]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What both sides share."""

    checkouts: dict[str, Path]
    output: Path
    stop: threading.Event
    """Set: end all processes and start none."""

    @property
    def data(self) -> Path:
        """Prefix of the tokenized text that all runs read: the one made by the code before."""
        return self.output / TEXT / "before" / "stdlib_text_document"

    def start(self, argv: Sequence[str], side: str, log: Path) -> None:
        """Run it in a side's checkout. Raises CannotRun."""
        checkout = self.checkouts[side]
        # One thread, no GPU: sums in one order. The path keeps an installed megatron.bcd from being taken instead.
        environment = {"PYTHONPATH": str(checkout), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
        run(argv, log, cwd=checkout, environment=environment, seconds=START_SECONDS, until=self.stop.is_set)
        if self.stop.is_set():
            raise CannotRun("was stopped")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Raises ValueError for a flag that is unknown, missing or no number."""
    parser = Parser(prog=PROG, description=__doc__)
    add = parser.add_argument
    add("--before", metavar="REV|FOLDER", help="a git revision, or the folder of a checkout")
    add("--after", metavar="REV|FOLDER", help="the same (default: the working tree that this tool lies in)")
    add("--only", metavar="NAME,...", help="these configurations (default: all)")
    add("--recipes", metavar="FILE,...", help="compare the configurations of these command lines too: JSON lists of "
        "{name, world_size, flags}")  # fmt: skip
    add("--no-runs", action="store_true", help="compare resolved flags alone, train nothing")
    add("--list", action="store_true", help="show the configurations and end")
    add("--jobs", type=int, default=1, metavar="N", help="configurations at the same time (default: 1)")
    add("--output", metavar="FOLDER", help="keep logs, metrics files and checkpoints here (default: kept nowhere)")
    add("--resolve", nargs=2, help=argparse.SUPPRESS)  # a process of its own for each version
    return parser.parse_args(argv)


def chosen(only: str | None) -> Configurations:
    """In the order of the file. Raises ValueError naming what is no configuration."""
    entries = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    names = list(entries) if only is None else [name.strip() for name in only.split(",")]
    for name in names:
        if name not in entries:
            raise ValueError(f"--only {only}: {name or 'an empty name'} is no configuration; --list shows them")
    return {name: [Start(**start) for start in starts] for name, starts in entries.items() if name in names}


def materialise(flag: str, version: str, folder: Path) -> None:
    """Put the code of a checkout's folder or of a git revision below ``folder``, so that nothing changes it any more.

    Raises:
        ValueError: it is neither, or lacks what is run.
    """
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
        raise ValueError(f"{flag} {version}: lacks {', '.join(missing)}; give a checkout of this project")


# ---------------------------------------------------------------- what a run has left

Entry = Mapping[str, str]
"""A field's name and its value as text: two floats have the same text only if they are the same bits."""


def read_metrics(path: Path) -> list[Entry]:
    """The lines of a metrics file, without the ignored fields. Raises CannotRun where there are none."""
    # null is a figure that was not asked for, which an older version may not know
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
    """A hash of each tensor in the newest checkpoint below `folder`: weights, optimizer state, random generators.

    Raises CannotRun: there is no checkpoint, or it can't be read.
    """
    try:
        iteration = int((folder / "latest_checkpointed_iteration.txt").read_text())
        latest = folder / f"iter_{iteration:07d}"
        hashes = _tensor_hashes(latest)
    except Exception as error:  # whatever torch raises for a damaged file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CannotRun(f"left no checkpoint that can be read: {reason}") from None
    files = sorted(latest.glob("*.safetensors"))
    hashes |= {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files}
    return {"iteration": str(iteration)} | hashes


def _tensor_hashes(folder: Path) -> dict[str, str]:
    import torch  # takes seconds, which --list and bad flags need not wait for
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
    """The first field that is not the same in both; None where they are equal."""
    for field in before | after:
        one, two = before.get(field, "absent"), after.get(field, "absent")
        if one != two:
            return f"{where}, {field}: {one} before, {two} after"
    return None


def metrics_difference(before: Sequence[Entry], after: Sequence[Entry]) -> str | None:
    """The first difference of two metrics files; None where all lines are equal."""
    for one, two in zip(before, after, strict=False):
        found = entry_difference(f"iteration {one.get('iteration', '?')}", one, two)
        if found is not None:
            return found
    return None if len(before) == len(after) else f"{len(before)} lines of metrics before, {len(after)} after"


def run_difference(before: Path, after: Path) -> str | None:
    """Of two folders that a run wrote: ``metrics.jsonl``, then the newest of ``checkpoints``. Raises CannotRun naming
    the side that has nothing to compare."""
    metrics, last = [], []
    for side, folder in zip(SIDES, (before, after), strict=True):
        try:
            metrics.append(read_metrics(folder / "metrics.jsonl"))
            last.append(read_checkpoint(folder / "checkpoints"))
        except CannotRun as error:
            raise CannotRun(f"{side} {error}") from None
    return metrics_difference(*metrics) or entry_difference("last checkpoint", *last)


# ---------------------------------------------------------------- resolved flags


def command_lines(configurations: Configurations, recipes: Sequence[str]) -> dict[str, tuple[str, int, list[str]]]:
    """Family, ranks and flags by name: of all starts, and of the recipes as they are and as one block.

    Raises:
        ValueError: a file of --recipes has other content.
    """
    lines = {}
    for name, starts in configurations.items():
        for number, start in enumerate(starts, start=1):
            words = start.words(folder=Path("run"), data=Path("text"))
            lines[f"{name}, start {number}"] = (start.family, start.processes, words)
    for file in recipes:
        try:
            for row in json.loads(Path(file).read_text()):
                for flags in ([], ["--bcd-num-blocks", "1"]):
                    lines[" ".join([row["name"], *flags])] = ("gpt", row["world_size"], [*row["flags"], *flags])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--recipes {file}: not a JSON list of {{name, world_size, flags}} ({error!r})") from error
    return lines


Resolved = dict[str, object] | str
"""Values by flag, or one error."""


def resolve(family: str, world_size: int, words: list[str]) -> Resolved:
    """What the version that is imported makes of the flags. Every version has `read_command_line`, --print-config."""
    from megatron.bcd.arguments import FAMILY_DEFAULTS, read_command_line

    options = {"prog": SCRIPTS[family], "world_size": world_size}
    options |= {"defaults": FAMILY_DEFAULTS["llama"] if family == "llama" else None}
    printed, errors = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            read_command_line([*words, "--print-config"], **options)
    except ValueError as error:
        return str(error)
    except SystemExit as end:
        if end.code:
            return errors.getvalue() or printed.getvalue()
    # comment lines hold what was not given
    lines = [line.removeprefix("# ") for line in printed.getvalue().splitlines()]
    values = yaml.safe_load("\n".join(line for line in lines if not line.startswith(("Flags for", "Not given"))))
    return {RENAMED.get(flag, flag): value for flag, value in values.items()}


def resolved_difference(lines: Mapping[str, tuple[str, int, list[str]]], task: Task) -> str | None:
    """Resolve all lines with both versions; the first difference. Raises CannotRun naming the side."""
    folder = task.output / FLAGS
    folder.mkdir()
    (folder / "lines.json").write_text(json.dumps(lines))
    found = {}
    for side in SIDES:
        argv = [sys.executable, __file__, "--resolve", str(folder / "lines.json"), str(folder / f"{side}.json")]
        try:
            task.start(argv, side, folder / f"{side}.log")
        except CannotRun as error:
            raise CannotRun(f"{side} {error}") from None
        found[side] = json.loads((folder / f"{side}.json").read_text())
    accepted = {side: sum(not isinstance(value, str) for value in values.values()) for side, values in found.items()}
    print(f"{len(lines)} command lines: {accepted['before']} accepted before, {accepted['after']} after")
    return first_difference(found["before"], found["after"])


def first_difference(before: Mapping[str, Resolved], after: Mapping[str, Resolved]) -> str | None:
    """Of the lines that the version before accepts; a flag that only one version has counts unless it is off there, or
    something else took its place."""
    for name, values in before.items():
        now = after[name]
        if isinstance(values, str):
            continue
        if isinstance(now, str):
            return f"{name} is refused: {now.strip()}"
        for flag in values | now:
            one, two = values.get(flag, ADDED.get(flag)), now.get(flag, ADDED.get(flag))
            if flag not in REPLACED and (one or None) != (two or None):
                return f"{name}: {flag} was {one}, is {two}"
    return None


# ---------------------------------------------------------------- data, runs, comparison


def make_data(task: Task) -> str | None:
    """Tokenize the standard library's text with both versions; what is not the same, or None. Raises CannotRun."""
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
            return f"{after.name}{suffix} is not the same"
    return None


def run_configuration(name: str, starts: Sequence[Start], task: Task) -> None:
    """All starts, before and after. Raises CannotRun naming the side and the start."""
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
    """Run and compare, a line for each as soon as it is through; the names of those that are not equal."""
    different = []
    with ThreadPoolExecutor(jobs) as pool:
        runs = {pool.submit(run_configuration, name, starts, task): name for name, starts in configurations.items()}
        try:
            for one in as_completed(runs):
                name = runs[one]
                try:
                    one.result()
                    problem = run_difference(*(task.output / name / side for side in SIDES))
                except CannotRun as error:
                    problem = str(error)
                if not _tell(name, problem):
                    different.append(name)
        except BaseException:
            task.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return different


def _tell(name: str, problem: str | None) -> bool:
    """One line; whether all is well."""
    print(f"{name:<20}  {problem or 'equal'}", flush=True)
    return problem is None


def compare(arguments: argparse.Namespace) -> int:
    """The exit code. Raises ValueError for what the user can mend."""
    if arguments.resolve:
        lines, result = map(Path, arguments.resolve)
        found = {name: resolve(*line) for name, line in json.loads(lines.read_text()).items()}
        result.write_text(json.dumps(found, default=str))
        return 0
    configurations = chosen(arguments.only)
    if arguments.list:
        for name, starts in configurations.items():
            print(f"{name:<20}", *(f"{start.family}, {start.processes} ranks: {start.flags}" for start in starts))
        return 0
    named = command_lines(configurations, arguments.recipes.split(",") if arguments.recipes else [])
    if arguments.before is None:
        raise ValueError("--before is required: a git revision, or the folder of a checkout")
    if arguments.jobs < 1:
        raise ValueError(f"--jobs {arguments.jobs}: must be at least 1")
    with tempfile.TemporaryDirectory(prefix="compare_runs_") as temporary:
        output = _empty_folder(arguments.output or f"{temporary}/output")
        checkouts = {side: Path(temporary, side) for side in SIDES}
        materialise("--before", arguments.before, checkouts["before"])
        materialise("--after", arguments.after or str(ROOT), checkouts["after"])
        task = Task(checkouts=checkouts, output=output, stop=threading.Event())
        started = time.monotonic()
        try:
            different = [] if _tell(FLAGS, resolved_difference(named, task)) else [FLAGS]
            if arguments.no_runs:
                return 1 if different else 0
            different += [] if _tell(TEXT, make_data(task)) else [TEXT]
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
    """Raises ValueError where it can't be had."""
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
    leave_with(main)
