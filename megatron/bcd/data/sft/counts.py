"""Count the records of fine-tuning before a run (--dry-run, tools/plan.py --data)."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass

import numpy

from megatron.bcd.data.sft.dataset import pack, pack_one_each
from megatron.bcd.data.sft.store import Files, open_samples, tokenize_files, write
from megatron.bcd.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class RecordCounts:
    """Counts of examples, tokens and sequences."""

    examples: int
    tokens: int
    sequences: int
    seq_length: int
    longest: int
    """Tokens of the longest sample."""
    cut: int
    """Samples that are longer than a sequence."""
    bad: int
    report: str
    """Places and reasons of the first bad records."""

    def __str__(self) -> str:
        return (
            f"{self.examples:,} examples, {self.tokens:,} tokens in {self.sequences:,} sequences of "
            f"{self.seq_length:,}; longest {self.longest:,}, {self.cut:,} longer than a sequence, {self.bad:,} bad"
        )


def count_records(
    files: Files,
    tokenizer: Tokenizer,
    *,
    seq_length: int,
    prompt_format: str = "auto",
    ignored: tuple[str, ...] = (),
    is_packed: bool = True,
) -> RecordCounts:
    """Tokenize all files and count. Write temporary files only.

    Raises:
        ValueError: as `tokenize_files`.
    """
    with tempfile.TemporaryDirectory() as folder:
        write(folder, tokenize_files(files, tokenizer, prompt_format, ignored))
        samples = open_samples(*os.path.split(folder))
    assert samples is not None
    lengths, every = numpy.minimum(samples.lengths - 1, seq_length), numpy.arange(len(samples))
    return RecordCounts(
        examples=len(numpy.unique(samples.places[:, :2], axis=0)),
        tokens=int(samples.lengths.sum()),
        sequences=len(pack(every, lengths, seq_length) if is_packed else pack_one_each(every)),
        seq_length=seq_length,
        longest=int(samples.lengths.max(initial=0)),
        cut=int((samples.lengths > seq_length + 1).sum()),
        bad=samples.num_bad,
        report=samples.describe_bad(files),
    )
