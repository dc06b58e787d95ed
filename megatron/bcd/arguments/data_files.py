"""--data-args-path and --per-split-data-args-path: files that hold what --data-path and its relatives would."""

from __future__ import annotations

import json
from typing import Any

_SPLITS = ("train", "valid", "test")


def read_data_files(values: dict[str, Any]) -> None:
    """Set the data paths in `values`, by field name, to what the files say.

    Raises:
        ValueError: both a file and a path are given, or a file can't be read; one line that names the flag.
    """
    paths = ["data_path", *(f"{split}_data_path" for split in _SPLITS)]
    for flag, field in (
        ("--data-args-path", "data_args_path"),
        ("--per-split-data-args-path", "per_split_data_args_path"),
    ):
        if values[field] is None:
            continue
        name = f"{flag} {values[field]}"
        given = next((path for path in paths if values[path]), None)
        if given is not None:
            raise ValueError(f"{name} and --{given.replace('_', '-')} are both given: give one of them")
        if field == "data_args_path":
            values["data_path"] = _words(_text(values[field], name), name)
        else:
            values.update(_by_split(_text(values[field], name), name))


def _text(path: str, name: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"{name} can't be read ({reason}): give a file that lists prefixes of datasets") from error


def _words(text: str, name: str) -> tuple[str, ...]:
    if not text.split():
        raise ValueError(f"{name} is empty: give a file that lists prefixes of datasets")
    return tuple(text.split())


def _by_split(text: str, name: str) -> dict[str, tuple[str, ...] | None]:
    """A JSON object as stock's: under each split a list of words, or one string of them; null for none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON ({error})") from error
    right = isinstance(content, dict) and set(content) == set(_SPLITS)
    values = content.values() if right else ()
    if not right or not all(
        value is None or isinstance(value, str) or (isinstance(value, list) and all(isinstance(w, str) for w in value))
        for value in values
    ):
        raise ValueError(f'{name}: must be {{"train": [...], "valid": [...], "test": [...]}}, lists of words')
    return {
        f"{split}_data_path": None if not value else tuple(value.split() if isinstance(value, str) else value)
        for split, value in content.items()
    }
