"""Tokenized records of a run's files: made by rank 0, kept on disk in a folder named by what it was made from, and read
by all ranks.

N tokens in all, R samples.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy
import numpy.typing
from rich.console import Console
from rich.progress import Progress

from megatron.bcd.config import RunConfig
from megatron.bcd.data.sft.text import Renderer, Tokens, name_of, read_records, tokens_of
from megatron.bcd.runtime import atomic_io, collectives
from megatron.bcd.tokenizer import Tokenizer

_FORMAT = 2
_FLUSH_TOKENS = 1 << 20
_LEFT_SECONDS = 24 * 3600.0
"""After which a folder that nobody writes to was left by a job that was killed."""
_TOKENIZER_FILES = (
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "config.json",  # transformers takes the kind of the tokenizer from it
)
Files = Sequence[tuple[str, str]]
"""The flag that names a file, and its path."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """All samples of a set of files, memory-mapped."""

    ids: numpy.typing.NDArray[numpy.int32]
    """[N]"""
    learned: numpy.typing.NDArray[numpy.bool_]
    """[N]; see `Tokens.learned`."""
    bounds: numpy.typing.NDArray[numpy.int64]
    """[R + 1]; where in `ids` each sample begins."""
    places: numpy.typing.NDArray[numpy.int64]
    """[R, 3]; number of the file, number of the record in it, and 1 for a line, 0 for an entry of a list."""
    digest: str
    """Of everything that they were made from."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> numpy.typing.NDArray[numpy.int64]:
        """[R]; tokens of each sample."""
        return numpy.diff(self.bounds)


def tokenized_samples(
    config: RunConfig, tokenizer: Tokenizer, files: Files, *, check: Callable[[Samples], object]
) -> Samples:
    """The samples of all files, from the disk where an earlier run has kept them. A collective.

    `check` may refuse new ones, by a ValueError, before they are kept.

    Raises:
        ValueError: a file can't be read, or a record is none; or the samples can't be kept. One line; nothing is left
            on the disk then.
    """
    for flag, path in files:
        if not os.path.isfile(path):
            what = "is a folder" if os.path.isdir(path) else "does not exist"
            raise ValueError(f"{flag} {path} {what}: with --sft give files of records, .jsonl or .json")
    prompt_format = config.data.sft_prompt_format
    digest = collectives.on_rank_0(lambda: digest_of(files, tokenizer, prompt_format))
    beside = os.path.join(os.path.dirname(os.path.abspath(files[0][1])), "cache")
    roots = [config.data.data_cache_path or beside]
    if config.data.data_cache_path is None:  # data are often read-only
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        roots.append(os.path.join(cache, "megatron-bcd"))
    roots = [os.path.join(root, "sft") for root in roots]
    for root in roots:
        if collectives.on_rank_0(lambda: open_samples(root, digest) is not None):  # noqa: B023
            return _open_everywhere(root, digest)
    renderer = Renderer(tokenizer, prompt_format)
    errors = []
    for root in roots:
        try:
            collectives.long_on_rank_0(lambda: _prepare(root, digest, renderer, tokenizer, files, check))  # noqa: B023
            return _open_everywhere(root, digest)
        except OSError as error:
            errors.append(f"{root}: {error.strerror}")
    raise ValueError(
        f"--data-cache-path: the tokenized records can't be written ({', '.join(errors)}); give a folder that can"
    )


def _prepare(
    root: str,
    digest: str,
    renderer: Renderer,
    tokenizer: Tokenizer,
    files: Files,
    check: Callable[[Samples], object],
) -> None:
    """Tokenize into a new folder, with a progress bar on a terminal."""
    with (
        new_folder(root, digest) as folder,
        Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress,
    ):
        write(folder, _tokenized(files, renderer, tokenizer, progress))
        written = open_samples(*os.path.split(folder))
        assert written is not None
        check(written)


def _tokenized(
    files: Files, renderer: Renderer, tokenizer: Tokenizer, progress: Progress
) -> Iterator[tuple[tuple[int, int, int], Tokens]]:
    for number, (flag, path) in enumerate(files):
        task = progress.add_task(f"tokenizing {os.path.basename(path)}", total=os.path.getsize(path))
        try:
            for place in read_records(path):
                try:
                    samples = tokens_of(place.record, renderer, tokenizer)
                except ValueError as error:
                    raise ValueError(f"{name_of(place.number, is_line=place.is_line)} {error}") from error
                for tokens in samples:
                    yield (number, place.number, int(place.is_line)), tokens
                progress.update(task, completed=place.bytes_read)
        except ValueError as error:
            separator = "" if str(error).startswith(("is ", "can't ")) else ","
            raise ValueError(f"{flag} {path}{separator} {error}") from error


def digest_of(files: Files, tokenizer: Tokenizer, prompt_format: str) -> str:
    """32 hexadecimal digits of the content of the files and of the tokenizer. Raises ValueError: one can't be read."""
    digest = hashlib.sha256(f"{_FORMAT} {prompt_format}".encode())
    for flag, path in files:
        digest.update(_digest_of_file(flag, path))
    for name, value in tokenizer.unique_identifiers.items():
        patterns = [os.path.join(glob.escape(value), one) for one in _TOKENIZER_FILES] if os.path.isdir(value) else []
        found = sorted({path for pattern in patterns for path in glob.glob(pattern) if os.path.isfile(path)})
        for path in found or ([value] if os.path.isfile(value) else []):
            digest.update(_digest_of_file("--sft: the tokenizer's file", path))
        digest.update(f"{name} {'' if os.path.exists(value) else value}".encode())
    return digest.hexdigest()[:32]


def _digest_of_file(flag: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise ValueError(f"{flag} {path} can't be read ({error.strerror})") from None


def open_samples(root: str, digest: str) -> Samples | None:
    """What `write` has made; None if it is not there, or not whole."""
    folder = os.path.join(root, digest)
    try:
        os.listdir(root)  # an NFS client may answer a look-up by name from its cache
        bounds = numpy.load(os.path.join(folder, "bounds.npy"))
        places = numpy.load(os.path.join(folder, "places.npy"))
        num_tokens = int(bounds[-1])
        ids, learned = (os.path.join(folder, name) for name in ("ids.bin", "learned.bin"))
        if (os.path.getsize(ids), os.path.getsize(learned)) != (4 * num_tokens, num_tokens):
            return None
        return Samples(
            ids=numpy.memmap(ids, dtype=numpy.int32, mode="r"),
            learned=numpy.memmap(learned, dtype=numpy.bool_, mode="r"),
            bounds=bounds,
            places=places,
            digest=digest,
        )
    except (OSError, ValueError, EOFError, IndexError):
        return None


def _open_everywhere(root: str, digest: str) -> Samples:
    found = open_samples(root, digest)
    hosts = collectives.gather_objects(None if found is not None else os.uname().nodename)
    blind = sorted({host for host in hosts if host is not None})
    if blind:
        raise ValueError(
            f"--data-cache-path: {', '.join(blind)} can't see the tokenized records in {root}; give a folder on a disk "
            "that all nodes share"
        )
    assert found is not None
    return found


@contextlib.contextmanager
def new_folder(root: str, digest: str) -> Iterator[str]:
    """A folder of a name of its own below `root`, which gets its final one at the end, and is deleted after an error.

    What jobs that were killed left behind is deleted after a day. Raises OSError.
    """
    parents = [path for path in (os.path.dirname(root), root) if not os.path.isdir(path)]
    os.makedirs(root, exist_ok=True)
    for path in glob.glob(os.path.join(glob.escape(root), "*.part")):
        with contextlib.suppress(OSError):
            if max(os.stat(one).st_mtime for one in (path, *glob.glob(f"{path}/*"))) < time.time() - _LEFT_SECONDS:
                shutil.rmtree(path)
    folder = os.path.join(root, f"{digest}.{uuid.uuid4().hex}.part")
    os.mkdir(folder)
    try:
        yield folder
        atomic_io.sync(folder)
        if open_samples(root, digest) is None:  # another job may have been quicker
            _publish(folder, root, digest)
        atomic_io.sync(root)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for path in reversed(parents):
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(path)


def _publish(folder: str, root: str, digest: str) -> None:
    target = os.path.join(root, digest)
    try:
        os.rename(folder, target)
    except OSError:  # there is a folder: a damaged one, or another job's that was complete a moment ago
        if open_samples(root, digest) is None:
            shutil.rmtree(target)
            os.rename(folder, target)


def write(folder: str, samples: Iterable[tuple[tuple[int, int, int], Tokens]]) -> None:
    """Write samples with their places (see `Samples.places`). Raises OSError."""
    bounds, places = [0], []
    with (
        open(os.path.join(folder, "ids.bin"), "wb", buffering=_FLUSH_TOKENS) as ids,
        open(os.path.join(folder, "learned.bin"), "wb", buffering=_FLUSH_TOKENS) as learned,
    ):
        for place, tokens in samples:
            ids.write(tokens.ids.tobytes())
            learned.write(tokens.learned.tobytes())
            bounds.append(bounds[-1] + len(tokens.ids))
            places.append(place)
    for name in ("ids.bin", "learned.bin"):
        atomic_io.sync(os.path.join(folder, name))
    numpy.save(os.path.join(folder, "places.npy"), numpy.array(places, dtype=numpy.int64).reshape(-1, 3))
    numpy.save(os.path.join(folder, "bounds.npy"), numpy.array(bounds, dtype=numpy.int64))
