"""Records of supervised fine-tuning: what a line of a JSONL file, or an entry of a JSON list, may be."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SHAPES = "{instruction, input, output}, {prompt, completion} or {messages: [{role, content}, ...]}"
Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One example: a prompt and its answer, or a conversation."""

    prompt: str = ""
    context: str = ""
    """The `input` of an instruction."""
    answer: str = ""
    is_instruction: bool = False
    messages: tuple[Message, ...] = ()
    """The conversation, up to the assistant's last message; empty for a prompt and its answer."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A record, and where it was read."""

    record: Record
    number: int
    """Of its line, or of its entry in a list, from 1."""
    is_line: bool
    bytes_read: int
    """Of the file, up to the end of this record."""

    @property
    def name(self) -> str:
        return name_of(self.number, is_line=self.is_line)


def name_of(number: int, *, is_line: bool) -> str:
    """For messages."""
    return f"line {number}" if is_line else f"entry {number}"


def read_records(path: str) -> Iterator[Place]:
    """The records of a file, JSONL or one JSON list, in order; blank lines are skipped.

    Raises:
        ValueError: a line, its number first, is not a record; or the file can't be read or holds none. The message does
            not name the file.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        entries = _entries_of_list(path) if start == b"[" else _lines(path)
        is_line, is_empty = start != b"[", True
        for number, value, bytes_read in entries:
            is_empty = False
            try:
                record = record_of(value)
            except ValueError as error:
                raise ValueError(f"{name_of(number, is_line=is_line)} {error}") from None
            yield Place(record=record, number=number, is_line=is_line, bytes_read=bytes_read)
    except OSError as error:
        raise ValueError(f"can't be read ({error.strerror})") from None
    if is_empty:
        raise ValueError(f"is empty: give a file with records {SHAPES}")


def _lines(path: str) -> Iterator[tuple[int, Any, int]]:
    bytes_read = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            bytes_read += len(line)
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                try:
                    yield number, json.loads(text), bytes_read
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"line {number} is not JSON ({_reason(error)}): give one record a line") from None


def _entries_of_list(path: str) -> Iterator[tuple[int, Any, int]]:
    size = os.path.getsize(path)
    with open(path, encoding="utf-8-sig") as file:
        try:
            entries = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is not JSON ({_reason(error)}): give a list of records, or one record a line") from None
    for number, entry in enumerate(entries, start=1):
        yield number, entry, size * number // len(entries)


def _reason(error: Exception) -> str:
    return "it is not UTF-8" if isinstance(error, UnicodeError) else " ".join(str(error).split())[:100]


def record_of(value: Any) -> Record:
    """The record of a JSON value. Raises ValueError: it is none; the message follows the record's place."""
    if not isinstance(value, dict):
        raise ValueError(f"is no object but {type(value).__name__}: a record is {SHAPES}")
    if "messages" in value:
        return Record(messages=_conversation(value["messages"]))
    if {"instruction", "output"} <= value.keys():
        return Record(
            prompt=_text(value, "instruction"),
            context=_text(value, "input") if value.get("input") is not None else "",
            answer=_text(value, "output"),
            is_instruction=True,
        )
    if {"prompt", "completion"} <= value.keys():
        return Record(prompt=_text(value, "prompt"), answer=_text(value, "completion"))
    keys = ", ".join(sorted(map(str, value))[:6]) or "no key"
    raise ValueError(f"has {keys}: a record is {SHAPES}")


def _conversation(messages: Any) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError('has messages that are no list of {"role": ..., "content": ...}')
    found = [{"role": _text(message, "role"), "content": _text(message, "content")} for message in messages]
    while found and found[-1]["role"] != "assistant":  # nothing answers them
        found.pop()
    if not found:
        raise ValueError("has no message of the role assistant: there is nothing to learn")
    return tuple(found)


def _text(values: Mapping[str, Any], key: str) -> str:
    text = values.get(key)
    if not isinstance(text, str):
        raise ValueError(f"has {key!r} that is {'missing' if key not in values else 'no text'}: give a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"has {key!r} with half of a surrogate pair, which is no character") from None
    return text
