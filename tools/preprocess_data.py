"""Tokenize text into Megatron's indexed dataset (PREFIX_text_document.bin and .idx).

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix out/corpus \\
        --tokenizer-type GPT2BPETokenizer --vocab-file encoder.json --merge-file vocab.bpe \\
        --append-eod --workers 8

Flags and output bytes equal those of stock Megatron-LM core_v0.16.1's tool of this name. In addition it reads lines of
text. Documents keep their order with any number of workers. The files get their names only when they are
complete.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import gzip
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
import zlib
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _parser import Parser, check_positive, command, run_main

from megatron.bcd.tokenizer import TOKENIZER_TYPES, Tokenizer, build_tokenizer

PROG = "tools/preprocess_data.py"

# --- reading

BATCH_BYTES = 1 << 18
"""Input per worker task: large enough to hide its overhead, small enough to balance the workers."""
UTF8_BOM = b"\xef\xbb\xbf"
_ENDINGS = {".jsonl": "jsonl", ".json": "jsonl", ".txt": "txt"}
OTHER_FORMATS = "Give .jsonl, .json or .txt, also with .gz; the datasets library writes JSONL (docs/data.md)."


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive lines of one input file."""

    path: str
    input_format: str
    """jsonl or txt."""
    entries: list[tuple[int, bytes]]
    """(number, bytes) of each line, counted from 1."""


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("input").add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="files and quoted globs, read in this order: .jsonl "
        "and .json with an object per line, .txt with a document per line, also with .gz")  # fmt: skip
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to read (default: text)")


def find_sources(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return paths and formats of the files of --input in order, sorted within a glob. Raises ValueError if a file is
    missing, unreadable or of unknown format."""
    sources = []
    for path in (path for pattern in args.input for path in _expanded(pattern)):
        if not os.path.isfile(path):
            raise ValueError(f"--input {path}: no such file; give files, or a glob such as 'folder/*'")
        if not os.access(path, os.R_OK):
            raise ValueError(f"--input {path} cannot be read")
        ending = os.path.splitext(path.lower().removesuffix(".gz"))[1]
        if ending not in _ENDINGS:
            raise ValueError(f"--input {path}: cannot tell its format by its ending. {OTHER_FORMATS}")
        sources.append((path, _ENDINGS[ending]))
    return sources


def _expanded(pattern: str) -> list[str]:
    if os.path.exists(pattern) or not glob.has_magic(pattern):
        return [pattern]
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
    if not paths:
        raise ValueError(f"--input {pattern}: no file matches")
    return paths


def read_batches(sources: Sequence[tuple[str, str]]) -> Iterator[Batch]:
    """Yield the lines of all files in order. A UTF-8 BOM at a file's start is dropped. Raises ValueError if a file
    cannot be decompressed or read."""
    for path, input_format in sources:
        entries: list[tuple[int, bytes]] = []
        size = 0
        try:
            with gzip.open(path) if path.lower().endswith(".gz") else open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    entries.append((number, line.removeprefix(UTF8_BOM) if number == 1 else line))
                    size += len(line)
                    if size >= BATCH_BYTES:
                        yield Batch(path=path, input_format=input_format, entries=entries)
                        entries, size = [], 0
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: cannot be read ({error})") from None
        yield Batch(path=path, input_format=input_format, entries=entries)


def read_documents(batch: Batch, json_keys: Sequence[str]) -> Iterator[tuple[int, dict[str, list[str]]]]:
    """Yield the line number of each document and its texts by key: one text, or several if JSON has a list.

    Blank lines are skipped. Plain text is stripped and returned for every key. Raises ValueError that names file and
    line if a line is not UTF-8, or not JSON with the requested keys.
    """
    for number, entry in batch.entries:
        try:
            text = entry.decode("utf-8").strip()
            if not text:
                continue
            if batch.input_format == "txt":
                yield number, {key: [text] for key in json_keys}
            else:
                yield number, _parse_json_document(text, json_keys)
        except UnicodeDecodeError as error:
            raise ValueError(f"{batch.path}, line {number}: not UTF-8 ({error.reason})") from error
        except ValueError as error:
            raise ValueError(f"{batch.path}, line {number}: {error}") from error


def _parse_json_document(line: str, json_keys: Sequence[str]) -> dict[str, list[str]]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}); each line must be one JSON object") from error
    if not isinstance(entry, dict):
        raise ValueError("not a JSON object; each line must be one")
    document = {}
    for key in json_keys:
        if key not in entry:
            raise ValueError(f'no key "{key}"; --json-keys must name keys that every object has')
        value = entry[key]
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f'key "{key}" must hold text or a list of texts')
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:
            raise ValueError(f'key "{key}" holds half of a surrogate pair, which UTF-8 cannot encode') from None
        document[key] = texts
    return document


@dataclass(frozen=True, kw_only=True)
class EncodedDocuments:
    """Tokens of the documents of one batch, for one key.

    `tokens` [sum of all lengths]; `lengths` [documents][sequences]: an empty document has no sequences.
    """

    tokens: numpy.ndarray
    lengths: list[list[int]]


EncodedBatch = dict[str, EncodedDocuments]
"""The documents of a batch by key."""

# --- encoding


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Turns batches of lines into token ids. Every worker receives a copy and builds its own tokenizer."""

    tokenizer_type: str
    tokenizer_options: dict[str, Any]
    json_keys: tuple[str, ...]
    append_eod: bool

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return build_tokenizer(self.tokenizer_type, **self.tokenizer_options)

    def encode(self, batch: Batch) -> EncodedBatch:
        """Encode a batch. Raises ValueError that names file and line if text cannot be read or tokenized."""
        tokens: dict[str, list[int]] = {key: [] for key in self.json_keys}
        lengths: dict[str, list[list[int]]] = {key: [] for key in self.json_keys}
        for number, document in read_documents(batch, self.json_keys):
            for key, texts in document.items():
                try:
                    sequences = self._encode_document(texts)
                except ValueError as error:
                    raise ValueError(f"{batch.path}, line {number}: {error}") from error
                for sequence in sequences:
                    tokens[key].extend(sequence)
                lengths[key].append([len(sequence) for sequence in sequences])
        return {
            key: EncodedDocuments(tokens=numpy.array(tokens[key], dtype=numpy.int32), lengths=lengths[key])
            for key in tokens
        }

    def _encode_document(self, texts: list[str]) -> list[list[int]]:
        sequences = [ids for text in texts if (ids := self.tokenizer.tokenize(text))]
        if sequences and self.append_eod:
            sequences[-1].append(self.tokenizer.eod)
        return sequences


_worker_encoder: Encoder | None = None


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    # Ctrl-C reaches the whole process group; only the parent should handle it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A parent that was killed cannot stop its workers, which would wait for work forever.
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker_encoder = encoder


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(batch: Batch) -> EncodedBatch:
    assert _worker_encoder is not None
    return _worker_encoder.encode(batch)


def encode_batches(batches: Iterable[Batch], encoder: Encoder, num_workers: int) -> Generator[EncodedBatch]:
    """Yield the encoded batches in order. With one worker, encode in this process.

    Keeps only a few batches per worker in flight, so that memory does not grow with the input. Raises ValueError for
    bad text, and if a worker was killed.
    """
    if num_workers == 1:
        yield from map(encoder.encode, batches)
        return
    with ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(replace(encoder),),  # without its tokenizer
    ) as pool:
        pending: deque[Future[EncodedBatch]] = deque()
        try:
            for batch in batches:
                pending.append(pool.submit(_encode_in_worker, batch))
                if len(pending) >= 4 * num_workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenExecutor as error:
            raise ValueError(
                f"--workers {num_workers}: a worker was killed, perhaps out of memory. Try fewer."
            ) from error
        finally:
            for future in pending:
                future.cancel()


# --- writing


class DatasetWriter:
    """Writes one dataset per key to a temporary folder; `publish` moves them to their final names."""

    def __init__(self, output_prefix: str, json_keys: Sequence[str], vocab_size: int) -> None:
        with warnings.catch_warnings():
            # Megatron Core warns about optional GPU libraries, which this tool does not use.
            warnings.simplefilter("ignore")
            from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

        self.prefixes = {key: f"{output_prefix}_{key}_document" for key in json_keys}
        folder = os.path.dirname(os.path.abspath(output_prefix))
        self._new_folders = [path for path in (folder, *map(str, Path(folder).parents)) if not os.path.exists(path)]
        try:
            os.makedirs(folder, exist_ok=True)
            self._temporary = tempfile.mkdtemp(dir=folder, prefix=".preprocess_data_")
        except OSError as error:
            raise ValueError(f"--output-prefix: cannot write {error.filename}: {error.strerror}") from error
        dtype = DType.optimal_dtype(vocab_size)
        self._builders: dict[str, Any] = {
            key: IndexedDatasetBuilder(os.path.join(self._temporary, f"{key}.bin"), dtype=dtype) for key in json_keys
        }

    def add(self, key: str, documents: EncodedDocuments) -> None:
        """Append to a key's dataset. An empty document adds only an index boundary, as in stock."""
        start = 0
        for lengths in documents.lengths:
            end = start + sum(lengths)
            self._builders[key].add_document(documents.tokens[start:end], lengths)
            start = end

    def publish(self) -> None:
        for key in self.prefixes:
            self._builders[key].finalize(os.path.join(self._temporary, f"{key}.idx"))
        for key, prefix in self.prefixes.items():
            # Remove the old index first: a kill in between then leaves no dataset rather than a mixed one.
            with contextlib.suppress(FileNotFoundError):
                os.remove(f"{prefix}.idx")
            for ending in (".bin", ".idx"):
                os.replace(os.path.join(self._temporary, f"{key}{ending}"), f"{prefix}{ending}")

    def close(self) -> None:
        """Remove what was not published, and new folders that are empty."""
        for builder in self._builders.values():
            with contextlib.suppress(OSError):  # on a full disk, flushing the buffer fails again
                builder.data_file.close()
        shutil.rmtree(self._temporary, ignore_errors=True)
        for folder in self._new_folders:
            with contextlib.suppress(OSError):
                os.rmdir(folder)


# --- command line


def build_parser() -> Parser:
    parser = Parser(prog=PROG, description=__doc__)
    add_input_flags(parser)
    add = parser.add_argument_group("tokenizer", "same flags as the training scripts").add_argument
    add("--tokenizer-type", choices=TOKENIZER_TYPES, required=True)
    add("--vocab-file", metavar="FILE", help="GPT2BPETokenizer: encoder.json")
    add("--merge-file", metavar="FILE", help="GPT2BPETokenizer: vocab.bpe")
    add("--tokenizer-model", metavar="PATH", help="SentencePiece model file, or local Hugging Face folder")
    add("--vocab-size", type=int, metavar="N", help="NullTokenizer: ids 0..N-1, and N ends a document")
    add("--append-eod", action="store_true", help="end every document with the tokenizer's eod id")
    add = parser.add_argument_group("output and running").add_argument
    add("--output-prefix", required=True, metavar="PREFIX", help="folders are created")
    add("--workers", type=int, default=1, metavar="N", help="processes (default: 1)")
    add("--log-interval", type=int, default=100_000, metavar="N", help="documents between progress lines (100000)")
    return parser


def run(args: argparse.Namespace) -> str:
    """Write the dataset and return a summary. Raises ValueError for bad input; then nothing is written."""
    check_positive(args, "workers", "log_interval")
    sources = find_sources(args)
    names = "vocab_file merge_file tokenizer_model vocab_size"
    encoder = Encoder(
        tokenizer_type=args.tokenizer_type,
        tokenizer_options={name: getattr(args, name) for name in names.split()},
        json_keys=tuple(dict.fromkeys(args.json_keys)),
        append_eod=args.append_eod,
    )
    keys, count, start = encoder.json_keys, Counter[str](), time.perf_counter()
    with (
        contextlib.closing(DatasetWriter(args.output_prefix, keys, encoder.tokenizer.vocab_size)) as writer,
        contextlib.closing(encode_batches(read_batches(sources), encoder, args.workers)) as encoded_batches,
    ):
        for batch in encoded_batches:
            for key, documents in batch.items():
                writer.add(key, documents)
                count["tokens"] += documents.tokens.size
                count["empty"] += documents.lengths.count([])
            num_reported = count["documents"] // args.log_interval
            count["documents"] += len(batch[keys[0]].lengths)
            if count["documents"] // args.log_interval > num_reported:
                print(f"{count['documents']:,} documents, {count['tokens']:,} tokens", file=sys.stderr, flush=True)
        if count["tokens"] == 0:
            raise ValueError(f"--input {' '.join(args.input)}: contains no text. Give files with text.")
        writer.publish()
    empty = f" ({count['empty']:,} empty)" if count["empty"] else ""
    return (
        f"{', '.join(writer.prefixes.values())}: {count['documents']:,} documents{empty}, {count['tokens']:,} tokens, "
        f"{count['tokens'] / (time.perf_counter() - start):,.0f} tokens/s"
    )


@command(PROG)
def main(argv: Sequence[str]) -> None:
    print(run(build_parser().parse_args(argv)))


if __name__ == "__main__":
    run_main(main)
