"""Shared by tools that read text: input flags, one-line errors, documents from entries of text and JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from _text_files import DOCUMENTS, FORMATS, Batch, Source, find_sources


def sources_of(args: argparse.Namespace) -> list[Source]:
    """The files of --input. Raises ValueError for one that cannot be read."""
    sources = find_sources(args.input, args.input_format, args.documents, args.json_keys)
    for source in sources:
        if source.noticed:
            print(f"note: {source.noticed}", file=sys.stderr)
    return sources


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


class OneLineParser(argparse.ArgumentParser):
    """Reports a bad flag in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


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
