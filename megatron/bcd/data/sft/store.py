"""Tokenized records on disk: a folder that appears only when it is complete, named by what it was made from.

N tokens in all, R samples.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy
import numpy.typing

from megatron.bcd.data.sft.tokens import Tokens
from megatron.bcd.runtime import atomic_io
from megatron.bcd.runtime.dir_lock import DirLock
from megatron.bcd.tokenizer import Tokenizer

_FORMAT = 2
_FLUSH_TOKENS = 1 << 20
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


def digest_of(files: Sequence[str], tokenizer: Tokenizer, prompt_format: str) -> str:
    """32 hexadecimal digits of the content of the files and of the tokenizer. Raises OSError."""
    digest = hashlib.sha256(f"{_FORMAT} {prompt_format}".encode())
    for path in files:
        digest.update(_digest_of_file(path))
    for name, value in tokenizer.unique_identifiers.items():
        patterns = [os.path.join(glob.escape(value), one) for one in _TOKENIZER_FILES] if os.path.isdir(value) else []
        found = sorted({path for pattern in patterns for path in glob.glob(pattern) if os.path.isfile(path)})
        for path in found or ([value] if os.path.isfile(value) else []):
            digest.update(_digest_of_file(path))
        digest.update(f"{name} {'' if os.path.exists(value) else value}".encode())
    return digest.hexdigest()[:32]


def _digest_of_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:  # a failed read does not name the file
        raise OSError(error.errno, error.strerror, path) from error


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


@contextlib.contextmanager
def new_folder(root: str, digest: str) -> Iterator[str]:
    """A folder of a name of its own below `root`, which gets its final one at the end, and is deleted after an error.

    What jobs that were killed left behind is deleted first. Raises OSError.
    """
    parents = [path for path in (os.path.dirname(root), root) if not os.path.isdir(path)]
    os.makedirs(root, exist_ok=True)
    _delete_leftovers(root)
    folder = os.path.join(root, f"{digest}.{uuid.uuid4().hex}.part")
    lock = DirLock(f"{folder}.new", flag="--data-cache-path", contents="samples")
    lock.acquire()
    os.rename(f"{folder}.new", folder)  # only now another job may find it
    try:
        yield folder
        atomic_io.sync(folder)
        if open_samples(root, digest) is None:  # another job may have been quicker
            _publish(folder, root, digest)
        atomic_io.sync(root)
    finally:
        lock.release()
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


def _delete_leftovers(root: str) -> None:
    for folder in glob.glob(os.path.join(glob.escape(root), "*.part")):
        lock = DirLock(folder, flag="--data-cache-path", contents="samples")
        try:
            lock.acquire()
        except (ValueError, OSError):  # a job that is at work
            continue
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def write(folder: str, samples: Iterable[tuple[tuple[int, int, int], Tokens]]) -> Iterator[None]:
    """Write samples with their places (see `Samples.places`), and pause after each. Raises OSError."""
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
            yield
    for name in ("ids.bin", "learned.bin"):
        atomic_io.sync(os.path.join(folder, name))
    numpy.save(os.path.join(folder, "places.npy"), numpy.array(places, dtype=numpy.int64).reshape(-1, 3))
    numpy.save(os.path.join(folder, "bounds.npy"), numpy.array(bounds, dtype=numpy.int64))
