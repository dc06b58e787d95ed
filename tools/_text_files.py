"""Input of the tools that read text: flags, globs, formats, compression, and documents."""

from __future__ import annotations

import argparse
import contextlib
import glob
import gzip
import importlib
import io
import json
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

BATCH_BYTES = 1 << 18
"""Input per worker task: large enough to hide its overhead, small enough to share evenly."""
UTF8_BOM = b"\xef\xbb\xbf"
FORMATS = ("jsonl", "txt", "parquet")
DOCUMENTS = ("line", "paragraph", "file")
"""What is a document of plain text."""
_ENDINGS = {".jsonl": "jsonl", ".json": "jsonl", ".txt": "txt", ".parquet": "parquet"}
_ZSTANDARD = (".zst", ".zstd")
_COMPRESSED = (".gz", *_ZSTANDARD)
_SNIFFED_BYTES = 1 << 20
_PARQUET_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive whole entries of one input file: JSON lines, or documents of plain text."""

    path: str
    input_format: str
    """jsonl or txt; rows of parquet arrive as JSON lines."""
    numbers: Sequence[int]
    """Of each entry's first line (in parquet: row), counted from 1, for error messages."""
    entries: list[bytes]
    num_file_bytes: int
    """Of the file as it is on the disk, since the batch before; for progress."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One input file."""

    path: str
    input_format: str
    documents: str
    json_keys: tuple[str, ...]
    noticed: str = ""
    """What was found out about the file and the user should know."""


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("input")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files and quoted globs, read in this order; .gz as it is, .zst needs zstandard, .parquet pyarrow",
    )
    group.add_argument(
        "--input-format",
        choices=("auto", *FORMATS),
        default="auto",
        help="jsonl: one JSON object a line; txt: plain text; parquet: one row a document; auto: by the ending .jsonl, "
        ".json, .txt or .parquet, before .gz or .zst, and a .txt that holds JSONL is read as such (default)",
    )
    group.add_argument(
        "--documents",
        choices=DOCUMENTS,
        default="line",
        help="documents of plain text: each non-empty line, stripped (default, as stock), what stands between blank "
        "lines, or each file",
    )
    group.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys or columns to read (default: text)"
    )


def sources_of(args: argparse.Namespace) -> list[Source]:
    """The files of --input in order, those of a glob sorted.

    Raises ValueError for the first that is no readable file of a known format, and for a missing package.
    """
    paths = [path for pattern in args.input for path in _expanded(pattern)]
    for path in paths:
        if not os.path.exists(path):
            raise ValueError(f"--input {path} does not exist")
        if not os.path.isfile(path):
            raise ValueError(f"--input {path} is not a file; give the files themselves, or a glob such as '{path}/*'")
        if not os.access(path, os.R_OK):
            raise ValueError(f"--input {path} cannot be read")
    sources = [_source(path, args.input_format, args.documents, tuple(args.json_keys)) for path in paths]
    for source in sources:
        if source.noticed:
            print(f"note: {source.noticed}", file=sys.stderr)
    return sources


def _expanded(pattern: str) -> list[str]:
    if os.path.exists(pattern) or not glob.has_magic(pattern):
        return [pattern]
    found = sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
    if not found:
        raise ValueError(f"--input {pattern}: no file has such a name")
    return found


def _source(path: str, input_format: str, documents: str, json_keys: tuple[str, ...]) -> Source:
    stem, ending = os.path.splitext(path.lower())
    if ending in _ZSTANDARD:
        _needed("zstandard", path)
    if ending in _COMPRESSED:
        ending = os.path.splitext(stem)[1]
    found, noticed = input_format, ""
    if found == "auto":
        if ending not in _ENDINGS:
            raise ValueError(
                f"--input {path}: cannot tell its format by its ending; give --input-format {', '.join(FORMATS)}"
            )
        found = _ENDINGS[ending]
        if found == "txt" and _looks_like_jsonl(path, json_keys):
            found = "jsonl"
            noticed = f"{path}: read as JSONL, which it holds; --input-format txt takes its lines as text"
    if found == "parquet":
        _needed("pyarrow", path)
    if found != "txt" and documents != "line":
        raise ValueError(
            f"--documents {documents} is for plain text; {path} is {found}, where each entry is a document"
        )
    return Source(path=path, input_format=found, documents=documents, json_keys=json_keys, noticed=noticed)


def _needed(package: str, path: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ValueError(f"--input {path} needs the package {package}: pip install {package}") from None


def _looks_like_jsonl(path: str, json_keys: Sequence[str]) -> bool:
    """Whether the first line that is not blank is a JSON object with these keys."""
    with _read_errors(path), open(path, "rb") as file:
        lines = _decompressed(file, path).readlines(_SNIFFED_BYTES)
    try:
        value = json.loads(next((line for line in lines if line.strip()), b"").removeprefix(UTF8_BOM))
    except ValueError:  # neither UTF-8 nor JSON
        return False
    return isinstance(value, dict) and set(json_keys) <= value.keys()


def _decompressed(file: BinaryIO, path: str) -> BinaryIO:
    """The contents of an open file."""
    ending = os.path.splitext(path.lower())[1]
    if ending == ".gz":
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    if ending in _ZSTANDARD:
        reader = _needed("zstandard", path).ZstdDecompressor().stream_reader(file, read_across_frames=True)
        return io.BufferedReader(reader)  # type: ignore[return-value]
    return file


def read_batches(sources: Sequence[Source]) -> Iterator[Batch]:
    """Entries of all files in order. A line ends with a line feed; a UTF-8 BOM at a file's start is dropped.

    Raises ValueError that names the file that cannot be decompressed or read.
    """
    for source in sources:
        with _read_errors(source.path):
            yield from _parquet_batches(source) if source.input_format == "parquet" else _text_batches(source)


@contextlib.contextmanager
def _read_errors(path: str) -> Iterator[None]:
    """Errors of the file system and of the packages as a ValueError that names the file."""
    try:
        yield
    except ValueError as error:
        if type(error).__module__ == "builtins":
            raise
        raise ValueError(f"{path}: cannot be read ({error})") from None  # pyarrow's are of this kind too
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("zstandard", "pyarrow"):
            raise
        raise ValueError(f"{path}: cannot be read ({error})") from None


def _text_batches(source: Source) -> Iterator[Batch]:
    group = {"line": _lines, "paragraph": _paragraphs, "file": _whole}[source.documents]
    with open(source.path, "rb") as file:
        done = 0
        for numbers, entries in group(_decompressed(file, source.path)):
            position = file.tell()
            yield Batch(
                path=source.path,
                input_format=source.input_format,
                numbers=numbers,
                entries=entries,
                num_file_bytes=position - done,
            )
            done = position


_Group = tuple[Sequence[int], list[bytes]]


def _lines(file: BinaryIO) -> Iterator[_Group]:
    first = 1
    while lines := file.readlines(BATCH_BYTES):
        if first == 1:
            lines[0] = lines[0].removeprefix(UTF8_BOM)
        yield range(first, first + len(lines)), lines
        first += len(lines)


def _paragraphs(file: BinaryIO) -> Iterator[_Group]:
    """Lines between blank ones, together."""
    open_lines: list[bytes] = []
    for numbers, lines in _lines(file):
        starts: list[int] = []
        entries: list[bytes] = []
        for number, line in zip(numbers, lines, strict=True):
            if line.strip():
                open_lines.append(line)
            elif open_lines:
                starts.append(number - len(open_lines))
                entries.append(b"".join(open_lines))
                open_lines = []
        last = numbers[-1]
        yield starts, entries
    if open_lines:
        yield [last + 1 - len(open_lines)], [b"".join(open_lines)]


def _whole(file: BinaryIO) -> Iterator[_Group]:
    yield [1], [file.read().removeprefix(UTF8_BOM)]


def _parquet_batches(source: Source) -> Iterator[Batch]:
    """Rows as JSON lines, so that they are checked and encoded as those are."""
    file = importlib.import_module("pyarrow.parquet").ParquetFile(source.path)
    missing = [key for key in source.json_keys if key not in file.schema_arrow.names]
    if missing:
        columns = ", ".join(file.schema_arrow.names)
        raise ValueError(f'{source.path}: no column "{missing[0]}"; --json-keys must name some of {columns}')
    first, num_rows, num_bytes = 1, max(1, file.metadata.num_rows), os.path.getsize(source.path)
    for part in file.iter_batches(batch_size=_PARQUET_ROWS, columns=list(source.json_keys)):
        try:
            entries = [json.dumps(row).encode() for row in part.to_pylist()]
        except TypeError as error:  # bytes, a date, a decimal number
            raise ValueError(f"{source.path}: a column of --json-keys must be text ({error})") from None
        yield Batch(
            path=source.path,
            input_format="jsonl",
            numbers=range(first, first + len(entries)),
            entries=entries,
            num_file_bytes=num_bytes * len(entries) // num_rows,
        )
        first += len(entries)


# --- documents


def read_documents(batch: Batch, json_keys: Sequence[str]) -> Iterator[tuple[int, dict[str, list[str]]]]:
    """Line number and, by key, the texts of each document: one text, or several where JSON has a list.

    Blank entries are no documents. Plain text is stripped, and stands under every key.
    Raises ValueError that names file and line for a line that is not UTF-8 or not the JSON asked for.
    """
    for number, entry in zip(batch.numbers, batch.entries, strict=True):
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
        if any(not _is_valid_unicode(text) for text in texts):
            raise ValueError(f'key "{key}" holds half of a surrogate pair, which no UTF-8 text can')
        document[key] = texts
    return document


def _is_valid_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
