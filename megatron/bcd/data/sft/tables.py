"""Records in CSV, Parquet and Arrow files, and the files of a folder. The datasets library reads all but CSV."""

from __future__ import annotations

import contextlib
import csv
import glob
import logging
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

_TABLES = (".csv", ".parquet", ".arrow")
_SPLITS = {"--train-data-path": "train", "--valid-data-path": "validation", "--test-data-path": "test"}
_SPLITS["--data"] = "train"  # tools/plan.py


def is_table(path: str) -> bool:
    """Return whether `read_rows` reads this file, and not the reader of JSON."""
    return path.endswith(_TABLES)


def read_rows(path: str) -> Iterator[Any]:
    """Yield the rows of a table as objects, without empty cells of Parquet and Arrow. Yield a ValueError for a bad row.

    Raises:
        ValueError: the file is not readable, or the datasets library is missing. The message does not name the file.
    """
    if path.endswith(".csv"):
        yield from _csv_rows(path)
        return
    with _datasets_library() as (datasets, cache):
        if path.endswith(".arrow"):
            rows = datasets.Dataset.from_file(path)
        else:  # the library takes names as patterns
            options = {"data_files": glob.escape(path), "split": "train", "streaming": True, "cache_dir": cache}
            rows = datasets.load_dataset("parquet", **options)
        yield from map(_without_gaps, rows)


def _csv_rows(path: str) -> Iterator[Any]:
    # not by the datasets library: its pandas drops the first cell of rows that all have one cell too many
    csv.field_size_limit(sys.maxsize)
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            for row in csv.DictReader(file, strict=True):
                yield ValueError("has more cells than the header has names. Quote commas.") if None in row else row
        except (csv.Error, UnicodeError) as error:
            raise ValueError(f"is no CSV in UTF-8 ({error})") from None


def expand_folders(paths: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return pairs of a flag and a file, given pairs of a flag and the file or folder that it names.

    A folder is one that `save_to_disk` wrote, or a downloaded repository. The flag chooses one of several splits.

    Raises:
        ValueError: the datasets library is missing or finds no records, or the split is not clear.
    """
    files: list[tuple[str, str]] = []
    for flag, path in paths:
        try:
            is_index_cache = os.path.isfile(f"{path}.idx")  # of an indexed dataset, which has no records
            names = _folder_files(path, flag) if os.path.isdir(path) and not is_index_cache else [path]
        except ValueError as error:
            raise ValueError(f"{flag} {path}: {error}") from error
        files += [(flag, name) for name in names]
    return files


def _folder_files(path: str, flag: str) -> list[str]:
    with _datasets_library() as (datasets, cache):
        if any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json")):
            names = datasets.load_from_disk(path, keep_in_memory=False).cache_files
            found = names if isinstance(names, dict) else {"": names}
            splits = {split: [part["filename"] for part in parts] for split, parts in found.items()}
        else:  # an absolute path is never taken for a name on the hub
            builder = datasets.load_dataset_builder(os.path.abspath(path), cache_dir=cache)
            splits = {str(split): list(names) for split, names in builder.config.data_files.items()}
    chosen = next(iter(splits)) if len(splits) == 1 else _SPLITS.get(flag)
    if chosen not in splits:
        raise ValueError(
            f"is a folder with the splits {', '.join(splits)}. Give it to --train-data-path, --valid-data-path and "
            "--test-data-path, which take train, validation and test, or give files."
        )
    for file in splits[chosen]:
        if not is_table(file) and not file.endswith((".json", ".jsonl")):
            raise ValueError(f"is a folder with {os.path.relpath(file, path)}. Give files of JSON, CSV or Parquet.")
    return splits[chosen]


@contextlib.contextmanager
def _datasets_library() -> Iterator[tuple[Any, str]]:
    """Yield the datasets library and a temporary folder for its lock files. Raise its errors as ValueError."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"needs the datasets library ({error}). Install it with pip install datasets, or give JSONL."
        ) from None
    datasets.disable_progress_bars()
    for name in ("datasets", "huggingface_hub"):  # what they warn about is raised here, or does not matter
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory() as cache:
            yield datasets, cache
    except Exception as error:  # also those of pyarrow
        raise ValueError(f"can't be read by the datasets library ({' '.join(str(error).split())[:200]})") from error


def _without_gaps(value: Any) -> Any:
    """Return a value without keys that are None. A table gives every object the keys of all others."""
    if isinstance(value, dict):
        return {key: _without_gaps(item) for key, item in value.items() if item is not None}
    return [_without_gaps(item) for item in value] if isinstance(value, list) else value
