"""Read the input of the text tools: flags, globs, formats, compression, and documents."""

from __future__ import annotations

import argparse
import glob
import gzip
import importlib
import io
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

BATCH_BYTES = 1 << 18
"""Input per worker task: large enough to hide its overhead, small enough to balance the workers."""
UTF8_BOM = b"\xef\xbb\xbf"
FORMATS = ("jsonl", "txt", "parquet")
DOCUMENTS = ("line", "paragraph", "file")
"""What counts as one document of plain text."""
_ENDINGS = {".jsonl": "jsonl", ".json": "jsonl", ".txt": "txt", ".parquet": "parquet"}
_ZSTANDARD = (".zst", ".zstd")
_COMPRESSED = (".gz", *_ZSTANDARD)
_SNIFFED_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive whole entries of one input file: JSON lines, or documents of plain text."""

    path: str
    input_format: str
    """jsonl or txt; rows of parquet arrive as JSON lines."""
    entries: list[tuple[int, bytes]]
    """(number, bytes) of each entry; the number is its first line (parquet: row), counted from 1."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One input file."""

    path: str
    input_format: str
    documents: str
    json_keys: tuple[str, ...]


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("input").add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="files and quoted globs, read in this order; .gz "
        "works directly, .zst needs zstandard, .parquet pyarrow")  # fmt: skip
    add("--input-format", choices=("auto", *FORMATS), default="auto", help="jsonl: one JSON object per line; txt: "
        "plain text; parquet: one document per row; auto (default): by the ending .jsonl, .json, .txt or .parquet, "
        "before .gz or .zst; a .txt that contains JSON lines is read as JSONL")  # fmt: skip
    add("--documents", choices=DOCUMENTS, default="line", help="documents of plain text: each non-empty line, stripped "
        "(default, as in stock); text between blank lines; or each file")  # fmt: skip
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys or columns to read (default: text)")


def find_sources(args: argparse.Namespace) -> list[Source]:
    """Return the files of --input in order, sorted within a glob. Raises ValueError if a file is missing, unreadable or
    of unknown format, or needs a package that is not installed."""
    paths = [path for pattern in args.input for path in _expanded(pattern)]
    for path in paths:
        if not os.path.isfile(path):
            raise ValueError(f"--input {path}: no such file; give files, or a glob such as 'folder/*'")
        if not os.access(path, os.R_OK):
            raise ValueError(f"--input {path} cannot be read")
    return [_source(path, args.input_format, args.documents, tuple(args.json_keys)) for path in paths]


def _expanded(pattern: str) -> list[str]:
    if os.path.exists(pattern) or not glob.has_magic(pattern):
        return [pattern]
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
    if not paths:
        raise ValueError(f"--input {pattern}: no file matches")
    return paths


def _source(path: str, input_format: str, documents: str, json_keys: tuple[str, ...]) -> Source:
    stem, ending = os.path.splitext(path.lower())
    if ending in _ZSTANDARD:
        _import_package("zstandard", path)
    if ending in _COMPRESSED:
        ending = os.path.splitext(stem)[1]
    if input_format == "auto":
        if ending not in _ENDINGS:
            raise ValueError(
                f"--input {path}: cannot tell its format by its ending; give --input-format {', '.join(FORMATS)}"
            )
        input_format = _ENDINGS[ending]
        if input_format == "txt" and _looks_like_jsonl(path, json_keys):
            input_format = "jsonl"
            if documents == "line":  # otherwise it is refused below
                note = "contains JSON lines and is read as such; --input-format txt reads its lines as text"
                print(f"note: {path}: {note}", file=sys.stderr)
    if input_format == "parquet":
        _import_package("pyarrow", path)
    if input_format != "txt" and documents != "line":
        raise ValueError(
            f"--documents {documents} is for plain text; {path} is {input_format}, where each entry is a document"
        )
    return Source(path=path, input_format=input_format, documents=documents, json_keys=json_keys)


def _import_package(package: str, path: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ValueError(f"--input {path} needs the package {package}: pip install {package}") from None


def _looks_like_jsonl(path: str, json_keys: Sequence[str]) -> bool:
    """Return whether the first line that is not blank is a JSON object with these keys."""
    try:
        with open(path, "rb") as file:
            lines = _decompressed(file, path).readlines(_SNIFFED_BYTES)
        value = json.loads(next((line for line in lines if line.strip()), b"").removeprefix(UTF8_BOM))
    except Exception:  # not JSON, or unreadable, which the reader reports later
        return False
    return isinstance(value, dict) and set(json_keys) <= value.keys()


def _decompressed(file: BinaryIO, path: str) -> BinaryIO:
    """Return the decompressed contents of an open file."""
    ending = os.path.splitext(path.lower())[1]
    if ending == ".gz":
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    if ending in _ZSTANDARD:
        reader = _import_package("zstandard", path).ZstdDecompressor().stream_reader(file, read_across_frames=True)
        return io.BufferedReader(reader)  # type: ignore[return-value]
    return file


def read_batches(sources: Sequence[Source]) -> Iterator[Batch]:
    """Yield the entries of all files in order. A line ends with \n; a UTF-8 BOM at a file's start is dropped. Raises
    ValueError if a file cannot be decompressed or read."""
    for source in sources:
        is_parquet = source.input_format == "parquet"
        about = {"path": source.path, "input_format": "jsonl" if is_parquet else source.input_format}
        entries: list[tuple[int, bytes]] = []
        size = 0
        try:
            for number, entry in _rows(source) if is_parquet else _texts(source):
                entries.append((number, entry))
                size += len(entry)
                if size >= BATCH_BYTES:
                    yield Batch(**about, entries=entries)
                    entries, size = [], 0
        except Exception as error:  # packages raise all kinds of errors for damaged files
            raise ValueError(f"{source.path}: cannot be read ({error})") from None
        yield Batch(**about, entries=entries)


def _texts(source: Source) -> Iterator[tuple[int, bytes]]:
    """Yield JSON lines, or documents of plain text, with the number of their first line."""
    with open(source.path, "rb") as raw:
        file = _decompressed(raw, source.path)
        if source.documents == "file":
            yield 1, file.read().removeprefix(UTF8_BOM)
            return
        lines = ((number, line.removeprefix(UTF8_BOM) if number == 1 else line) for number, line in enumerate(file, 1))
        if source.documents == "line":
            yield from lines
            return
        for is_text, paragraph in itertools.groupby(lines, key=lambda line: bool(line[1].strip())):
            if is_text:
                numbers, parts = zip(*paragraph, strict=True)
                yield numbers[0], b"".join(parts)


def _rows(source: Source) -> Iterator[tuple[int, bytes]]:
    """Yield rows of parquet as JSON lines, so that they are checked and encoded like those."""
    file = importlib.import_module("pyarrow.parquet").ParquetFile(source.path)
    missing = [key for key in source.json_keys if key not in file.schema_arrow.names]
    if missing:
        raise ValueError(
            f'no column "{missing[0]}"; --json-keys must name some of {", ".join(file.schema_arrow.names)}'
        )
    rows = (row for part in file.iter_batches(columns=list(source.json_keys)) for row in part.to_pylist())
    for number, row in enumerate(rows, 1):
        yield number, json.dumps(row).encode()  # raises TypeError for bytes, dates and decimal numbers


# --- documents


def read_documents(batch: Batch, json_keys: Sequence[str]) -> Iterator[tuple[int, dict[str, list[str]]]]:
    """Yield the line number of each document and its texts by key: one text, or several if JSON has a list.

    Blank entries are skipped. Plain text is stripped and returned for every key. Raises ValueError that names file and
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
