"""Shared by tools that read text: input flags, one-line errors, documents from jsonl and txt files."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

BATCH_BYTES = 1 << 18
"""Input per worker task: large enough to hide its overhead, small enough to share evenly."""

UTF8_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive whole lines of one input file."""

    path: str
    input_format: str
    first_line: int  # counted from 1, for error messages
    lines: list[bytes]


def detect_format(path: str, input_format: str) -> str:
    """Either "jsonl" or "txt". Raises ValueError if "auto" finds neither ending."""
    if input_format != "auto":
        return input_format
    ending = os.path.splitext(path)[1].lower()
    if ending in (".jsonl", ".json"):
        return "jsonl"
    if ending == ".txt":
        return "txt"
    raise ValueError(f"--input {path}: cannot tell its format by its ending; give --input-format jsonl or txt")


def check_inputs(paths: Sequence[str], input_format: str) -> None:
    """Raises ValueError for the first path that is not a readable file of a known format."""
    for path in paths:
        if not os.path.exists(path):
            raise ValueError(f"--input {path} does not exist")
        if not os.path.isfile(path):
            raise ValueError(f"--input {path} is not a file; give the files themselves")
        if not os.access(path, os.R_OK):
            raise ValueError(f"--input {path} cannot be read")
        detect_format(path, input_format)


def read_batches(paths: Sequence[str], input_format: str) -> Iterator[Batch]:
    """Lines of all files in order. A line ends with a line feed; a UTF-8 BOM at a file's start is dropped."""
    for path in paths:
        first_line = 1
        file_format = detect_format(path, input_format)
        with open(path, "rb") as file:
            while lines := file.readlines(BATCH_BYTES):
                if first_line == 1:
                    lines[0] = lines[0].removeprefix(UTF8_BOM)
                yield Batch(path=path, input_format=file_format, first_line=first_line, lines=lines)
                first_line += len(lines)


def read_documents(batch: Batch, json_keys: Sequence[str]) -> Iterator[tuple[int, dict[str, list[str]]]]:
    """Line number and, by key, the texts of each document: one text, or several where JSON has a list.

    Blank lines are no documents. Plain text is one document a line, stripped, under every key.
    Raises ValueError that names file and line for a line that is not UTF-8 or not the JSON asked for.
    """
    for number, line in enumerate(batch.lines, start=batch.first_line):
        try:
            text = line.decode("utf-8").strip()
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


class OneLineParser(argparse.ArgumentParser):
    """Reports a bad flag in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("input")
    group.add_argument("--input", nargs="+", required=True, metavar="FILE", help="files, read in this order")
    group.add_argument(
        "--input-format",
        choices=("auto", "jsonl", "txt"),
        default="auto",
        help="jsonl: one JSON object a line; txt: each non-empty line, stripped, is a document; "
        "auto: by the ending .jsonl, .json or .txt (default)",
    )
    group.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to read (default: text)")
