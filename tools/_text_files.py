"""Read the input of the text tools: flags, globs, JSON lines and lines of text, gzip, and documents."""

from __future__ import annotations

import argparse
import glob
import gzip
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    for flag in ("--input-format", "--documents"):
        add(flag, type=_removed, help=argparse.SUPPRESS)


def _removed(value: str) -> None:
    raise argparse.ArgumentTypeError(f"{value}: removed. {OTHER_FORMATS}")


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
        except (OSError, EOFError) as error:
            raise ValueError(f"{path}: cannot be read ({error})") from None
        yield Batch(path=path, input_format=input_format, entries=entries)


# --- documents


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
