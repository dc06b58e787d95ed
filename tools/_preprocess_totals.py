"""Counts and progress of tools/preprocess_data.py."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy


@dataclass(frozen=True, kw_only=True)
class EncodedDocuments:
    """Tokens of the documents of one batch, for one key.

    `tokens` [sum of all lengths]; `lengths` [documents][sequences]: an empty document has no sequences.
    """

    tokens: numpy.ndarray
    lengths: list[list[int]]


@dataclass(frozen=True, kw_only=True)
class EncodedBatch:
    num_file_bytes: int
    num_text_bytes: int
    num_documents: int
    documents: dict[str, EncodedDocuments]


@dataclass(kw_only=True)
class Totals:
    """Running counts: documents once, their tokens and their empty texts over all keys."""

    num_documents: int = 0
    num_empty: int = 0
    num_tokens: int = 0
    num_file_bytes: int = 0
    """Of the files as they are on the disk."""
    num_text_bytes: int = 0

    def add(self, batch: EncodedBatch) -> None:
        self.num_documents += batch.num_documents
        self.num_file_bytes += batch.num_file_bytes
        self.num_text_bytes += batch.num_text_bytes
        for documents in batch.documents.values():
            self.num_empty += documents.lengths.count([])
            self.num_tokens += documents.tokens.size


Report = Callable[[Totals], None]


@contextlib.contextmanager
def show_progress(total_bytes: int, log_interval: int | None) -> Iterator[Report]:
    """A bar on a terminal; else a plain line each tenth of the input, or each `log_interval` documents."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("tokenizing", total=total_bytes)
            yield lambda totals: progress.update(
                task,
                completed=totals.num_file_bytes,
                description=f"{totals.num_documents:,} documents, {totals.num_tokens:,} tokens",
            )
        return

    steps_shown = 0

    def report(totals: Totals) -> None:
        nonlocal steps_shown
        percent = 100 * totals.num_file_bytes // max(total_bytes, 1)
        steps = totals.num_documents // log_interval if log_interval else percent // 10
        if steps > steps_shown and totals.num_tokens:
            steps_shown = steps
            counts = f"{totals.num_documents:,} documents, {totals.num_tokens:,} tokens"
            print(f"{percent:3d} %  {counts}", file=sys.stderr, flush=True)

    yield report
