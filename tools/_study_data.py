"""Texts of tools/study.py, tokenized once into a folder that studies share."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from _study_file import Study
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]
STDLIB_MEGABYTES = 100  # all of it


@dataclass(frozen=True, kw_only=True)
class Text:
    """A tokenized text."""

    prefix: Path
    """For --data-path."""
    sha256: str
    """Of the text before it was tokenized."""


def prepare(study: Study, *, data_folder: Path, folder: Path) -> Mapping[str, Text]:
    """The study's texts by name, tokenized into `folder` where they are not there yet.

    Raises ValueError if a text is missing or cannot be tokenized.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):  # two studies may start at the same time
        return {
            data.name: _prepared(data.name, _source(data.name, data.text, data_folder, folder), folder)
            for data in study.data
            if data.text is not None
        }


def _source(name: str, text: str, data_folder: Path, folder: Path) -> Path:
    if text == "stdlib":
        path = folder / f"{name}.jsonl"
        _run(["examples/stdlib_text.py", "--megabytes", str(STDLIB_MEGABYTES), "--output", str(path)], name)
        return path
    path = data_folder / text
    if not path.is_file():
        raise ValueError(f"data {name}: {path} is missing; give the folder that holds {text} with --data")
    return path


def _prepared(name: str, source: Path, folder: Path) -> Text:
    with open(source, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    stem = folder / f"{name}-{digest[:12]}"
    prefix = Path(f"{stem}_text_document")
    if not os.path.exists(f"{prefix}.idx"):  # written last
        flags = ["--tokenizer-type", "ByteLevelTokenizer", "--append-eod", "--output-prefix", str(stem)]
        _run(["tools/preprocess_data.py", "--input", str(source), *flags], name)
    return Text(prefix=prefix, sha256=digest)


def _run(words: list[str], name: str) -> None:
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"data {name}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
