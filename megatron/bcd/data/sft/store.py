"""Tokenized records. Rank 0 writes them to a file named by a hash of their sources, and all ranks map it.

N tokens in all, R samples.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import pickle
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy
import numpy.typing
import torch

from megatron.bcd.config import RunConfig
from megatron.bcd.config.sections import dashed
from megatron.bcd.data.sft.records import parse_record, read_values
from megatron.bcd.data.sft.tables import expand_folders
from megatron.bcd.data.sft.text import Renderer, Tokens, tokenize_record
from megatron.bcd.runtime import atomic_io, collectives
from megatron.bcd.tokenizer import Tokenizer

_FORMAT = 4
_MOST_REASONS = 10
_LARGEST_TOKENIZER_FILE = 1 << 26
"""Bytes. Larger files in a tokenizer's folder are weights."""
Files = Sequence[tuple[str, str]]
"""Pairs of a flag and the path that it names."""
Row = tuple[tuple[int, int], Tokens | str]
"""Number of a file and of a record in it; a sample of that record, or the place of a bad one and the reason."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """All samples of a set of files, memory-mapped."""

    ids: numpy.typing.NDArray[numpy.int32]
    """[N]"""
    learned: numpy.typing.NDArray[numpy.bool_]
    """[N]; see `Tokens.learned`."""
    bounds: numpy.typing.NDArray[numpy.int64]
    """[R + 1]; start of each sample in `ids`."""
    records: numpy.typing.NDArray[numpy.int64]
    """[R, 2]; the file and the record of each sample, see `Row`."""
    bad: tuple[tuple[int, str], ...]
    """The first bad records, which have no sample: number of the file, place and reason."""
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
        for number, reason in self.bad:
            where = "" if number == last else f"{' '.join(files[number])}, "
            lines.append(f"{where}{reason.rstrip('.')}")
            last = number
        more = self.num_bad - len(lines)
        return "; ".join([*lines, *[f"and {more:,} more bad records"] * (more > 0)])


def files_of(config: RunConfig) -> Files:
    """Return the files of records of a run, with the flags that name them. Raises ValueError as `expand_folders`."""
    names = ("data_path",) if config.data.data_path else ("train_data_path", "valid_data_path", "test_data_path")
    return expand_folders((dashed(name), path) for name in names for path in getattr(config.data, name) or ())


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
    root = config.data.data_cache_path or os.path.join(os.path.dirname(os.path.abspath(files[0][1])), "cache")
    path = os.path.join(root, "sft", f"{digest}.pt")

    def prepare() -> None:
        samples = collect(tokenize_files(files, tokenizer, prompt_format, ignored), digest=digest)
        check(samples)
        if error := atomic_io.capture_error(lambda: save_samples(path, samples)):
            raise ValueError(
                f"--data-cache-path: the tokenized records can't be written ({path}: {error}). Give a writable folder."
            )

    if not collectives.on_rank_0(lambda: open_samples(path) is not None):
        collectives.long_on_rank_0(prepare)
    samples = open_samples(path)
    hosts = collectives.gather_objects(None if samples is not None else os.uname().nodename)
    if blind := sorted({host for host in hosts if host is not None}):
        raise ValueError(
            f"--data-cache-path: {', '.join(blind)} can't see the tokenized records in {path}. Give a folder on a disk "
            "that all nodes share."
        )
    assert samples is not None
    return samples


def tokenize_files(files: Files, tokenizer: Tokenizer, prompt_format: str, ignored: tuple[str, ...]) -> Iterator[Row]:
    """Yield the samples and the bad records of all files in order.

    Raises:
        ValueError: a file is not readable, or the format needs a chat template that the tokenizer has not.
    """
    renderer = Renderer(tokenizer, prompt_format)
    for number, (flag, path) in enumerate(files):
        try:
            for record, (place, value) in enumerate(read_values(path)):
                try:
                    for tokens in tokenize_record(parse_record(value, ignored=ignored), renderer, tokenizer):
                        yield (number, record), tokens
                except ValueError as error:
                    yield (number, record), f"{place} {error}"
        except ValueError as error:
            raise ValueError(f"{flag} {path}: {error}") from error


def collect(rows: Iterable[Row], *, digest: str = "") -> Samples:
    """Return the samples of `tokenize_files` in memory."""
    ids, learned, bounds, records, bad = bytearray(), bytearray(), [0], [], []
    for record, tokens in rows:
        if isinstance(tokens, str):
            bad.append((record[0], tokens))
            continue
        ids += tokens.ids.tobytes()
        learned += tokens.learned.tobytes()
        bounds.append(bounds[-1] + len(tokens.ids))
        records.append(record)
    return Samples(
        ids=numpy.frombuffer(ids, dtype=numpy.int32),
        learned=numpy.frombuffer(learned, dtype=numpy.bool_),
        bounds=numpy.array(bounds),
        records=numpy.array(records, dtype=numpy.int64).reshape(-1, 2),
        bad=tuple(bad[:_MOST_REASONS]),
        num_bad=len(bad),
        digest=digest,
    )


def save_samples(path: str, samples: Samples) -> None:
    """Write the samples to a file that is complete whenever it exists. Raises OSError or RuntimeError."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    values = {name: torch.from_numpy(v) if isinstance(v, numpy.ndarray) else v for name, v in vars(samples).items()}
    incomplete = f"{path}.{uuid.uuid4().hex}.part"
    try:
        with open(incomplete, "wb") as file:
            torch.save(values, file)
        atomic_io.sync(incomplete)
        os.replace(incomplete, path)
        atomic_io.sync(os.path.dirname(path))
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(incomplete)


def open_samples(path: str) -> Samples | None:
    """Return the samples that `save_samples` has written; None if the file is missing or damaged."""
    try:
        os.listdir(os.path.dirname(path))  # an NFS client may answer a look-up by name from a stale cache
        values = torch.load(path, mmap=True, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError):
        return None
    return Samples(**{name: v.numpy() if isinstance(v, torch.Tensor) else v for name, v in values.items()})


def data_digest(files: Files, tokenizer: Tokenizer, prompt_format: str, ignored: tuple[str, ...] = ()) -> str:
    """Return a hash of the files' and the tokenizer's content, 32 hexadecimal digits. Raises ValueError."""
    digest = hashlib.sha256(f"{_FORMAT} {prompt_format} {sorted(ignored)}".encode())
    for flag, path in files:
        digest.update(_file_digest(flag, path))
    for name, value in tokenizer.unique_identifiers.items():
        in_folder = sorted(glob.glob(os.path.join(glob.escape(value), "*"))) if os.path.isdir(value) else [value]
        for path in in_folder:
            if os.path.isfile(path) and os.path.getsize(path) <= _LARGEST_TOKENIZER_FILE:
                digest.update(_file_digest("--sft: the tokenizer's file", path))
        digest.update(f"{name} {'' if os.path.exists(value) else value}".encode())
    return digest.hexdigest()[:32]


def _file_digest(flag: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise ValueError(f"{flag} {path}: can't be read ({error.strerror})") from None
