"""Checks of an indexed dataset (Megatron's .bin and .idx), before anything is built from it."""

from __future__ import annotations

import os
from typing import Any

import numpy
from megatron.core.datasets.indexed_dataset import IndexedDataset

_CHECKED_CHUNKS = 64
_CHECKED_CHUNK_TOKENS = 1 << 20


def check_indexed_dataset(prefix: str, vocab_size: int, flag: str = "--data-path") -> numpy.ndarray:
    """Check `prefix`.bin and .idx and return the tokens of each document.

    Every token of a small dataset is compared with the vocabulary, 64 spread chunks of 1 Mi tokens of a large one.

    Raises:
        ValueError: a file is missing, truncated, not Megatron's, or made with another tokenizer.
    """
    for suffix in (".idx", ".bin"):
        if not os.path.isfile(prefix + suffix):
            raise ValueError(
                f"{flag} {prefix}: {prefix}{suffix} does not exist; give the prefix that tools/preprocess_data.py "
                "wrote, without .bin or .idx"
            )
    if not os.path.getsize(prefix + ".bin"):
        raise ValueError(f"{flag} {prefix}: {prefix}.bin is empty; run tools/preprocess_data.py on a text that is not")
    try:
        dataset = IndexedDataset(prefix)
        lengths, dtype = dataset.index.sequence_lengths, numpy.dtype(dataset.index.dtype)
        num_documents = len(dataset.index.document_indices) - 1
    except Exception as error:  # its reader raises any exception on damaged bytes
        raise ValueError(
            f"{flag} {prefix}: {prefix}.idx is truncated or no Megatron index; run tools/preprocess_data.py again"
        ) from error
    expected, found = int(lengths.sum(dtype=numpy.int64)) * dtype.itemsize, os.path.getsize(prefix + ".bin")
    if expected != found or num_documents < 1:
        raise ValueError(
            f"{flag} {prefix}: {prefix}.bin has {found:,} bytes and its index describes {expected:,}; one of the two "
            "is truncated or of another run; run tools/preprocess_data.py again"
        )
    if not _is_consistent(dataset.index):
        raise ValueError(f"{flag} {prefix}: {prefix}.idx is damaged; run tools/preprocess_data.py again")
    smallest, largest = _token_range(prefix + ".bin", dtype)
    if smallest < 0 or largest >= vocab_size:
        raise ValueError(
            f"{flag} {prefix}: holds token {smallest if smallest < 0 else largest} and the vocabulary of this "
            f"--tokenizer-type has {vocab_size}; give the tokenizer that made the data"
        )
    bounds = dataset.index.document_indices
    return numpy.add.reduceat(lengths.astype(numpy.int64), bounds[:-1])


def _is_consistent(index: Any) -> bool:
    """Whether sequences follow each other in the file, and documents hold all of them in order."""
    lengths, bounds = index.sequence_lengths.astype(numpy.int64), index.document_indices
    ends = numpy.cumsum(lengths * numpy.dtype(index.dtype).itemsize)
    return bool(
        (lengths >= 0).all()
        and index.sequence_pointers[0] == 0
        and (index.sequence_pointers[1:] == ends[:-1]).all()
        and bounds[0] == 0
        and bounds[-1] == len(lengths)
        and (bounds[1:] >= bounds[:-1]).all()
    )


def _token_range(path: str, dtype: numpy.dtype) -> tuple[int, int]:
    tokens = numpy.memmap(path, dtype=dtype, mode="r")
    if len(tokens) <= _CHECKED_CHUNKS * _CHECKED_CHUNK_TOKENS:
        return int(tokens.min()), int(tokens.max())
    starts = numpy.linspace(0, len(tokens) - _CHECKED_CHUNK_TOKENS, _CHECKED_CHUNKS, dtype=numpy.int64)
    chunks = [tokens[start : start + _CHECKED_CHUNK_TOKENS] for start in starts]
    return min(int(chunk.min()) for chunk in chunks), max(int(chunk.max()) for chunk in chunks)
