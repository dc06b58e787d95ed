"""Whether two versions of this code train the same, bit for bit: the same small runs with both, compared.

    python tools/compare_runs.py --before main                   # with the working tree that this file lies in
    python tools/compare_runs.py --before v1.0 --after /other/checkout --only grid,resume --output out/logs

Each configuration (--list) is trained with the code before and after, by one Python interpreter, on the CPU, on text
that is made once. Compared are all lines of the metrics files but for times and peak memory, and all tensors of the
last checkpoints. Revisions are exported, folders are copied first, so both may change meanwhile. One line for each
configuration: equal, or the first difference. Before the runs, the flags of every configuration are resolved by both
versions and compared, and those of --recipes. Exit code 0 where all are equal, 1 where not, 2 for bad flags.
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _bit_compare_configurations import CONFIGURATIONS, GPT, LLAMA, Configuration
from _parser import Parser, bad_input, leave_with
from _processes import ROOT, kill, last_words
from _resolved_configurations import first_difference

PROG = "tools/compare_runs.py"
SIDES = ("before", "after")
NEEDED = (GPT, LLAMA, "megatron", "tools", "examples")
"""Of a checkout, what is run or imported."""
TEXT = "tokenized-text"
"""The name of what is compared first, and of its folder."""
TEXT_MEGABYTES = "0.6"
FLAGS = "resolved-flags"
"""The name of the comparison of configurations, and of its folder."""
START_SECONDS = 300.0
"""After which a start hangs."""
IGNORED_FIELDS = frozenset(
    {"step_time_ms", "switch_time_ms", "switches", "tokens_per_second"}
    | {"peak_memory_bytes", "reserved_memory_bytes", "run"}
)
"""Fields of a metrics file that differ from one run to the next: times, and memory that the allocator or the operating
system counts; the run's name, which depends on the flags that a version has; and switches, which older versions lack
and the blocks of the steps show. Everything else is compared, fields that are added later too."""
_SCHEDULER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")


class RunFailed(RuntimeError):
    """A run did not end well, or left nothing to compare: one line."""


class Stopped(RuntimeError):
    """The user, or a scheduler, ends the comparison."""


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
    return parser.parse_args(argv)


def chosen(only: str | None) -> list[Configuration]:
    """In the order of the list. Raises ValueError naming what is no configuration."""
    known = {configuration.name: configuration for configuration in CONFIGURATIONS}
    names = list(known) if only is None else [name.strip() for name in only.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"--only {only}: {name or 'an empty name'} is no configuration; --list shows them")
    return [configuration for name, configuration in known.items() if name in names]


# ---------------------------------------------------------------- the two versions


def materialise(flag: str, version: str, folder: Path) -> None:
    """Put the code of a checkout's folder or of a git revision below ``folder``, so that nothing changes it any more.

    Raises:
        ValueError: it is neither, or lacks what is run.
    """
    if Path(version).is_dir():
        _check_complete(flag, version, Path(version))
        folder.mkdir()
        for name in NEEDED:
            source = Path(version, name)
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, folder / name)
        return
    commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{version}^{{commit}}")
    archive = _git("archive", "--format=tar", commit.decode().strip()) if commit else None
    if not archive:
        raise ValueError(f"{flag} {version}: neither a folder nor a git revision; give one of them")
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    _check_complete(flag, version, folder)


def _check_complete(flag: str, version: str, folder: Path) -> None:
    missing = [name for name in NEEDED if not (folder / name).exists()]
    if missing:
        raise ValueError(f"{flag} {version}: lacks {', '.join(missing)}; give a checkout of this project")


def _git(*words: str) -> bytes | None:
    """What git says in this tool's checkout; None where it fails, or is not there."""
    try:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


# ---------------------------------------------------------------- processes


def run_process(argv: Sequence[str], *, checkout: Path, log: Path, stop: threading.Event) -> None:
    """Start, wait, and leave no process, however it ends; the log is added to.

    Raises:
        RunFailed: it ended with an error, or hangs.
        Stopped: ``stop`` was set.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _SCHEDULER}
    # One thread, no GPU: sums in one order. The path keeps an installed megatron.bcd from being taken instead.
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHONPATH": str(checkout), "COLUMNS": "200"}
    end = time.monotonic() + START_SECONDS
    with open(log, "ab") as output:
        start = output.tell()
        process = subprocess.Popen(
            argv,
            cwd=checkout,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt at the terminal is for this tool: it ends them
        )
        try:
            while process.poll() is None and not stop.is_set() and time.monotonic() < end:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
            code = process.poll()
        finally:
            kill(process)
    if stop.is_set():
        raise Stopped
    if code != 0:
        said = log.read_bytes()[start:].decode(errors="replace")
        raise RunFailed(f"hangs for {START_SECONDS:,.0f} s" if code is None else last_words(said, code))


# ---------------------------------------------------------------- what a run has left

Entry = Mapping[str, str]
"""A field's name and its value as text: two floats have the same text only if they are the same bits."""


class _Literal(str):
    """A number as the file spells it; -0.0 and 0.0 are equal as floats, and so are 1 and 1.0."""


def read_metrics(path: Path) -> list[Entry]:
    """The lines of a metrics file, without the ignored fields. Raises RunFailed where there are none."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [json.loads(line, parse_float=_Literal) for line in file]
        # null is a figure that was not asked for, which an older version may not know
        entries = [
            {name: _text(value) for name, value in line.items() if name not in IGNORED_FIELDS and value is not None}
            for line in lines
        ]
    except (OSError, ValueError, AttributeError) as error:
        raise RunFailed(f"wrote no metrics file that can be read: {error}") from None
    if not entries:
        raise RunFailed("wrote an empty metrics file")
    return entries


def _text(value: object) -> str:
    if isinstance(value, _Literal):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(value[key])}' for key in sorted(value))}}}"
    return json.dumps(value)


def read_checkpoint(folder: Path) -> Entry:
    """A hash of each tensor in the newest checkpoint below `folder`: weights, optimizer state, random generators.

    Raises RunFailed: there is no checkpoint, or it can't be read.
    """
    try:
        iteration = int((folder / "latest_checkpointed_iteration.txt").read_text())
        latest = folder / f"iter_{iteration:07d}"
        hashes = _tensor_hashes(latest)
    except Exception as error:  # whatever torch raises for a damaged file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RunFailed(f"left no checkpoint that can be read: {reason}") from None
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
    """Of two folders that a run wrote: ``metrics.jsonl``, then the newest of ``checkpoints``. Raises RunFailed naming
    the side that has nothing to compare."""
    metrics, last = [], []
    for side, folder in zip(SIDES, (before, after), strict=True):
        try:
            metrics.append(read_metrics(folder / "metrics.jsonl"))
            last.append(read_checkpoint(folder / "checkpoints"))
        except RunFailed as error:
            raise RunFailed(f"{side} {error}") from None
    return metrics_difference(*metrics) or entry_difference("last checkpoint", *last)


# ---------------------------------------------------------------- data, runs, comparison


def make_data(task: Task) -> str | None:
    """Tokenize the standard library's text with both versions; what is not the same, or None.

    Raises:
        RunFailed: the code before can't.
    """
    for side in SIDES:
        folder = task.output / TEXT / side
        folder.mkdir(parents=True)
        text, prefix = folder / "stdlib.jsonl", folder / "stdlib"
        fetch = ["examples/stdlib_text.py", "--megabytes", TEXT_MEGABYTES, "--output", str(text)]
        tokenize = ["tools/preprocess_data.py", "--input", str(text), "--output-prefix", str(prefix), "--append-eod",
                    "--tokenizer-type", "ByteLevelTokenizer", "--workers", "1"]  # fmt: skip
        try:
            for words in (fetch, tokenize):
                run_process([sys.executable, *words], checkout=task.checkouts[side], log=folder / "log", stop=task.stop)
        except RunFailed as error:
            if side == "before":
                raise RunFailed(f"{words[0]} before {error}") from None
            return f"{words[0]} after {error}"
    before, after = (task.data.parents[1] / side / task.data.name for side in SIDES)
    for suffix in (".bin", ".idx"):
        if not filecmp.cmp(f"{before}{suffix}", f"{after}{suffix}", shallow=False):
            return f"{before.name}{suffix} is not the same"
    return None


def command_lines(configurations: Sequence[Configuration], recipes: Sequence[str]) -> dict[str, tuple[object, ...]]:
    """Script, ranks and flags by name: of all starts, and of the recipes as they are and as one block.

    Raises:
        ValueError: a file of --recipes has other content.
    """
    lines: dict[str, tuple[object, ...]] = {}
    for each in configurations:
        for number, start in enumerate(each.starts, start=1):
            words = start.argv(folder=Path("run"), data=Path("text"))
            flags = words[words.index(start.script) + 1 :]
            lines[f"{each.name}, start {number}"] = (start.script, start.num_processes, flags)
    for file in recipes:
        try:
            for row in json.loads(Path(file).read_text()):
                for flags in ([], ["--bcd-num-blocks", "1"]):
                    lines[" ".join([row["name"], *flags])] = (GPT, row["world_size"], [*row["flags"], *flags])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--recipes {file}: not a JSON list of {{name, world_size, flags}} ({error!r})") from error
    return lines


def resolved_difference(lines: dict[str, tuple[object, ...]], task: Task) -> str | None:
    """Resolve all lines with both versions; the first difference. Raises RunFailed naming the side."""
    folder = task.output / FLAGS
    folder.mkdir()
    (folder / "lines.json").write_text(json.dumps(lines))
    found = {}
    for side in SIDES:
        program = [str(ROOT / "tools" / "_resolved_configurations.py"), str(folder / "lines.json")]
        argv = [sys.executable, *program, str(folder / f"{side}.json")]
        try:
            run_process(argv, checkout=task.checkouts[side], log=folder / f"{side}.log", stop=task.stop)
        except RunFailed as error:
            raise RunFailed(f"{side} {error}") from None
        found[side] = json.loads((folder / f"{side}.json").read_text())
    accepted = {side: sum(not isinstance(value, str) for value in values.values()) for side, values in found.items()}
    print(f"{len(lines)} command lines: {accepted['before']} accepted before, {accepted['after']} after")
    return first_difference(found["before"], found["after"])


def run_configuration(configuration: Configuration, task: Task) -> None:
    """All starts, before and after. Raises RunFailed naming the side and the start."""
    for side in SIDES:
        folder = task.output / configuration.name / side
        folder.mkdir(parents=True)
        for number, start in enumerate(configuration.starts, start=1):
            checkout = task.checkouts["before" if start.always_before else side]
            argv = start.argv(folder=folder, data=task.data)
            try:
                run_process(argv, checkout=checkout, log=folder / "log", stop=task.stop)
            except RunFailed as error:
                which = f", start {number}," if len(configuration.starts) > 1 else ""
                raise RunFailed(f"{side}{which} {error}") from None


def compare_all(configurations: Sequence[Configuration], task: Task, *, jobs: int) -> list[str]:
    """Run and compare, a line for each as soon as it is through; the names of those that are not equal."""
    different = []
    with ThreadPoolExecutor(jobs) as pool:
        runs = {pool.submit(run_configuration, each, task): each.name for each in configurations}
        try:
            for run in as_completed(runs):
                name = runs[run]
                try:
                    run.result()
                    problem = run_difference(*(task.output / name / side for side in SIDES))
                except RunFailed as error:
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
    width = max(len(configuration.name) for configuration in CONFIGURATIONS)
    print(f"{name:<{width}}  {problem or 'equal'}", flush=True)
    return problem is None


def compare(arguments: argparse.Namespace) -> int:
    """The exit code. Raises ValueError for what the user can mend."""
    configurations = chosen(arguments.only)
    if arguments.list:
        for each in configurations:
            print(f"{each.name:<20}{each.about}")
        return 0
    lines = command_lines(configurations, arguments.recipes.split(",") if arguments.recipes else [])
    if arguments.before is None:
        raise ValueError("--before is required: a git revision, or the folder of a checkout")
    if arguments.jobs < 1:
        raise ValueError(f"--jobs {arguments.jobs}: must be at least 1")
    with tempfile.TemporaryDirectory(prefix="compare_runs_") as temporary, _output(arguments.output) as output:
        checkouts = {side: Path(temporary, side) for side in SIDES}
        materialise("--before", arguments.before, checkouts["before"])
        materialise("--after", arguments.after or str(ROOT), checkouts["after"])
        task = Task(checkouts=checkouts, output=output, stop=threading.Event())
        started = time.monotonic()
        try:
            different = [] if _tell(FLAGS, resolved_difference(lines, task)) else [FLAGS]
            if arguments.no_runs:
                return 1 if different else 0
            different += [] if _tell(TEXT, make_data(task)) else [TEXT]
        except RunFailed as error:
            print(error)
            return 1
        different += compare_all(configurations, task, jobs=arguments.jobs)
    total, seconds = len(configurations) + 2, time.monotonic() - started
    print(f"{f'{len(different)} of {total} not equal' if different else f'all {total} equal'} ({seconds:,.0f} s)")
    if different and not arguments.output:
        print("--output FOLDER keeps the logs")
    return 1 if different else 0


@contextlib.contextmanager
def _output(folder: str | None) -> Iterator[Path]:
    """An empty folder; a temporary one where none is asked for. Raises ValueError where it can't be had."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="compare_runs_") as temporary:
            yield Path(temporary)
        return
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        is_empty = not any(path.iterdir())
    except OSError as error:
        raise ValueError(f"--output {folder} can't be written ({error.strerror}): give another folder") from error
    if not is_empty:
        raise ValueError(f"--output {folder} is not empty: give a new folder")
    yield path


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return compare(parse_arguments(argv))
    except ValueError as error:
        return bad_input(PROG, error)


if __name__ == "__main__":
    leave_with(main)
