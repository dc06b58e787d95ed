"""Tokenized records. Rank 0 writes them to a folder named by a hash of their sources, and all ranks read them.

N tokens in all, R samples.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import numpy.typing
from rich.console import Console
from rich.progress import Progress

from megatron.bcd.config import RunConfig
from megatron.bcd.data.sft.records import describe_place, parse_record, read_values
from megatron.bcd.data.sft.tables import expand_folders
from megatron.bcd.data.sft.text import Renderer, Tokens, tokenize_record
from megatron.bcd.runtime import atomic_io, collectives
from megatron.bcd.tokenizer import Tokenizer

_FORMAT = 3
_MOST_REASONS = 10
_FLUSH_TOKENS = 1 << 20
_ABANDONED_SECONDS = 24 * 3600.0
"""Age of the last write after which a temporary folder must be the remains of a killed job."""
_TOKENIZER_FILES = (
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "config.json",  # transformers reads the tokenizer's class from it
)
Files = Sequence[tuple[str, str]]
"""Pairs of a flag and the path that it names."""
Position = tuple[int, int, int]
"""Number of the file, number of the record in it, and 1 for a line or 0 for an entry of a list."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """All samples of a set of files, memory-mapped."""

    ids: numpy.typing.NDArray[numpy.int32]
    """[N]"""
    learned: numpy.typing.NDArray[numpy.bool_]
    """[N]; see `Tokens.learned`."""
    bounds: numpy.typing.NDArray[numpy.int64]
    """[R + 1]; start of each sample in `ids`."""
    places: numpy.typing.NDArray[numpy.int64]
    """[R, 3]; see `Position`."""
    bad: tuple[tuple[Position, str], ...]
    """The first bad records, which have no sample, and why they are bad."""
    num_bad: int
    digest: str
    """Hash of all sources."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> numpy.typing.NDArray[numpy.int64]:
        """[R]; number of tokens of each sample."""
        return numpy.diff(self.bounds)

    def describe_bad(self, files: Files) -> str:
        """Return places and reasons of the first bad records, and the number of the others."""
        lines, last = [], -1
        for (number, place, is_line), reason in self.bad:
            where = "" if number == last else f"{' '.join(files[number])}, "
            lines.append(f"{where}{describe_place(place, is_line=bool(is_line))} {reason.rstrip('.')}")
            last = number
        more = self.num_bad - len(lines)
        return "; ".join([*lines, *[f"and {more:,} more bad records"] * (more > 0)])


def _paths_of(config: RunConfig) -> Files:
    data = config.data
    split_paths = {
        "--train-data-path": data.train_data_path,
        "--valid-data-path": data.valid_data_path,
        "--test-data-path": data.test_data_path,
    }
    paths = {"--data-path": data.data_path} if data.data_path else split_paths
    return [(flag, path) for flag, its_paths in paths.items() for path in its_paths or ()]


def files_of(config: RunConfig) -> Files:
    """Return the files of records of a run, with the flags that name them or their folder.

    Raises:
        ValueError: as `expand_folders`.
    """
    return expand_folders(_paths_of(config))


def tokenized_samples(
    config: RunConfig, tokenizer: Tokenizer, files: Files, *, check: Callable[[Samples], object]
) -> Samples:
    """Collective. Return the samples of all files, from disk if an earlier run has written them.

    `check` may reject new samples with a ValueError before they are written.

    Raises:
        ValueError: a file is not readable, or the samples can't be written. Nothing is left on disk then.
    """
    for flag, path in files:
        if not os.path.isfile(path):
            raise ValueError(f"{flag} {path}: is no file. With --sft give records (docs/fine_tuning.md).")
    prompt_format, ignored = config.data.sft_prompt_format, config.data.sft_ignore_keys or ()
    digest = collectives.on_rank_0(lambda: data_digest(files, tokenizer, prompt_format, ignored))
    beside = os.path.join(os.path.dirname(os.path.abspath(_paths_of(config)[0][1])), "cache")
    roots = [config.data.data_cache_path or beside]
    if config.data.data_cache_path is None:  # the data's folder is often read-only
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        roots.append(os.path.join(cache, "megatron-bcd"))
    roots = [os.path.join(root, "sft") for root in roots]
    for root in roots:
        if collectives.on_rank_0(lambda: open_samples(root, digest) is not None):  # noqa: B023
            return _open_everywhere(root, digest)

    def prepare(root: str) -> None:
        with new_folder(root, digest) as folder:
            write(folder, tokenize_files(files, tokenizer, prompt_format, ignored))
            written = open_samples(*os.path.split(folder))
            assert written is not None
            check(written)

    errors = []
    for root in roots:
        try:
            collectives.long_on_rank_0(lambda: prepare(root))  # noqa: B023
            return _open_everywhere(root, digest)
        except OSError as error:
            errors.append(f"{root}: {error.strerror}")
    raise ValueError(
        f"--data-cache-path: the tokenized records can't be written ({', '.join(errors)}). Give a writable folder."
    )


Row = tuple[Position, Tokens | str]
"""A sample, or the reason why a record is bad."""


def tokenize_files(files: Files, tokenizer: Tokenizer, prompt_format: str, ignored: tuple[str, ...]) -> Iterator[Row]:
    """Yield the samples and the bad records of all files in order. Show a progress bar on a terminal.

    Raises:
        ValueError: a file is not readable, or the format needs a chat template that the tokenizer has not.
    """
    renderer = Renderer(tokenizer, prompt_format)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        for number, (flag, path) in enumerate(files):
            task = progress.add_task(f"tokenizing {os.path.basename(path)}", total=1.0)
            try:
                for place in read_values(path):
                    position = (number, place.number, int(place.is_line))
                    try:
                        for tokens in tokenize_record(parse_record(place.value, ignored=ignored), renderer, tokenizer):
                            yield position, tokens
                    except ValueError as error:
                        yield position, str(error)
                    progress.update(task, completed=place.share)
            except ValueError as error:
                raise ValueError(f"{flag} {path}: {error}") from error


def data_digest(files: Files, tokenizer: Tokenizer, prompt_format: str, ignored: tuple[str, ...] = ()) -> str:
    """Return a hash of the files' and the tokenizer's content, 32 hexadecimal digits. Raises ValueError."""
    digest = hashlib.sha256(f"{_FORMAT} {prompt_format} {sorted(ignored)}".encode())
    for flag, path in files:
        digest.update(_file_digest(flag, path))
    for name, value in tokenizer.unique_identifiers.items():
        patterns = [os.path.join(glob.escape(value), name) for name in _TOKENIZER_FILES] if os.path.isdir(value) else []
        paths = sorted({path for pattern in patterns for path in glob.glob(pattern) if os.path.isfile(path)})
        for path in paths or ([value] if os.path.isfile(value) else []):
            digest.update(_file_digest("--sft: the tokenizer's file", path))
        digest.update(f"{name} {'' if os.path.exists(value) else value}".encode())
    return digest.hexdigest()[:32]


def _file_digest(flag: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise ValueError(f"{flag} {path}: can't be read ({error.strerror})") from None


def open_samples(root: str, digest: str) -> Samples | None:
    """Return the samples that `write` has written; None if they are missing or incomplete."""
    folder = os.path.join(root, digest)
    try:
        os.listdir(root)  # an NFS client may answer a look-up by name from a stale cache
        bounds = numpy.load(os.path.join(folder, "bounds.npy"))
        places = numpy.load(os.path.join(folder, "places.npy"))
        with open(os.path.join(folder, "bad.json"), encoding="utf-8") as file:
            num_bad, bad = json.load(file)
        num_tokens = int(bounds[-1])
        ids, learned = (os.path.join(folder, name) for name in ("ids.bin", "learned.bin"))
        if (os.path.getsize(ids), os.path.getsize(learned)) != (4 * num_tokens, num_tokens):
            return None
        return Samples(
            ids=_mapped(ids, numpy.int32),
            learned=_mapped(learned, numpy.bool_),
            bounds=bounds,
            places=places,
            bad=tuple((tuple(position), reason) for position, reason in bad),
            num_bad=num_bad,
            digest=digest,
        )
    except (OSError, ValueError, EOFError, IndexError):
        return None


def _mapped(path: str, kind: type) -> numpy.typing.NDArray[Any]:
    # numpy can't map an empty file, which is written if all records are bad
    return numpy.memmap(path, dtype=kind, mode="r") if os.path.getsize(path) else numpy.empty(0, dtype=kind)


def _open_everywhere(root: str, digest: str) -> Samples:
    samples = open_samples(root, digest)
    hosts = collectives.gather_objects(None if samples is not None else os.uname().nodename)
    blind = sorted({host for host in hosts if host is not None})
    if blind:
        raise ValueError(
            f"--data-cache-path: {', '.join(blind)} can't see the tokenized records in {root}. Give a folder on a disk "
            "that all nodes share."
        )
    assert samples is not None
    return samples


@contextlib.contextmanager
def new_folder(root: str, digest: str) -> Iterator[str]:
    """Create a temporary folder below `root`. Rename it when the context ends, or delete it after an error.

    Also delete temporary folders of killed jobs that are older than a day. Raises OSError.
    """
    parents = [path for path in (os.path.dirname(root), root) if not os.path.isdir(path)]
    os.makedirs(root, exist_ok=True)
    for path in glob.glob(os.path.join(glob.escape(root), "*.part")):
        with contextlib.suppress(OSError):
            last_write = max(os.stat(part).st_mtime for part in (path, *glob.glob(f"{path}/*")))
            if last_write < time.time() - _ABANDONED_SECONDS:
                shutil.rmtree(path)
    folder = os.path.join(root, f"{digest}.{uuid.uuid4().hex}.part")
    os.mkdir(folder)
    try:
        yield folder
        atomic_io.sync(folder)
        if open_samples(root, digest) is None:  # another job may have been faster
            _publish(folder, root, digest)
        atomic_io.sync(root)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for path in reversed(parents):
            with contextlib.suppress(OSError):  # the folder is not empty
                os.rmdir(path)


def _publish(folder: str, root: str, digest: str) -> None:
    target = os.path.join(root, digest)
    try:
        os.rename(folder, target)
    except OSError:  # the folder exists: damaged, or another job has just published it
        if open_samples(root, digest) is None:
            shutil.rmtree(target)
            os.rename(folder, target)


def write(folder: str, rows: Iterable[Row]) -> None:
    """Write samples, their positions and the bad records. Raises OSError."""
    bounds, places, bad = [0], [], []
    with (
        open(os.path.join(folder, "ids.bin"), "wb", buffering=_FLUSH_TOKENS) as ids,
        open(os.path.join(folder, "learned.bin"), "wb", buffering=_FLUSH_TOKENS) as learned,
    ):
        for place, tokens in rows:
            if isinstance(tokens, str):
                bad.append((place, tokens))
                continue
            ids.write(tokens.ids.tobytes())
            learned.write(tokens.learned.tobytes())
            bounds.append(bounds[-1] + len(tokens.ids))
            places.append(place)
    with open(os.path.join(folder, "bad.json"), "w", encoding="utf-8") as file:
        json.dump([len(bad), bad[:_MOST_REASONS]], file)
    for name in ("ids.bin", "learned.bin", "bad.json"):
        atomic_io.sync(os.path.join(folder, name))
    numpy.save(os.path.join(folder, "places.npy"), numpy.array(places, dtype=numpy.int64).reshape(-1, 3))
    numpy.save(os.path.join(folder, "bounds.npy"), numpy.array(bounds, dtype=numpy.int64))
