"""Count the records that tools/plan.py --data names, in place of Alpaca's."""

from __future__ import annotations

import argparse
import os
from functools import lru_cache
from typing import Any

from megatron.bcd.huggingface.architecture import TRANSFORMERS

EPOCHS = 3
"""As in the command of the planner."""


def with_records(arguments: argparse.Namespace) -> argparse.Namespace:
    """Set --tokens to what the sequences of three epochs of --data have. Raises ValueError."""
    path = arguments.data
    if path is None:
        return arguments
    if arguments.task != "sft":
        raise ValueError(f"--data {path}: plans fine-tuning. Give --task sft too, or --tokens in its place.")
    if arguments.tokens is not None:
        raise ValueError(f"--tokens {arguments.tokens:g}: --data {path} sets it. Leave one of them out.")
    counts = counted(arguments)
    if not counts.sequences:
        raise ValueError(f"{counts.report}. --data needs at least one good record.")
    arguments.tokens = float(EPOCHS * counts.sequences * arguments.seq_length)
    return arguments


def counted(arguments: argparse.Namespace) -> Any:
    """Return the counts of --data with the tokenizer of --model. Raises ValueError."""
    path, model, ignored = arguments.data, arguments.model or "", tuple(arguments.sft_ignore_keys or ())
    if not os.path.exists(path):
        raise ValueError(f"--data {path}: does not exist. Give records (docs/fine_tuning.md).")
    folder = model if os.path.isdir(model) else os.path.dirname(model)
    if not has_tokenizer(folder):
        raise ValueError(f"--data {path}: --model {model} has no tokenizer. Give the model's folder with one.")
    from megatron.bcd.data.sft.tables import expand_folders  # it imports torch, which other plans do not need

    files = tuple(expand_folders([("--data", path)]))
    changed = tuple(os.stat(file).st_mtime_ns for _, file in files)
    return _count(files, changed, folder, arguments.seq_length, ignored, _can_pack(model, arguments.seq_length))


def _can_pack(model: str, sequence: int) -> bool:
    from megatron.bcd.huggingface.folder import read_architecture
    from megatron.bcd.huggingface.measure import read_model

    is_measured = read_architecture(model, is_quantised=True).family == TRANSFORMERS
    return not is_measured or read_model(model, sequence=sequence).can_pack  # the plan's own measurement


def has_tokenizer(folder: str) -> bool:
    """Return whether the records can be counted: rows of the model table have no tokenizer."""
    return os.path.isfile(os.path.join(folder, "tokenizer_config.json"))


@lru_cache(maxsize=16)
def _count(
    files: tuple[tuple[str, str], ...],
    changed: tuple[int, ...],
    folder: str,
    seq_length: int,
    ignored: tuple[str, ...],
    is_packed: bool,
) -> Any:
    from megatron.bcd.data.sft.dataset import count_records
    from megatron.bcd.tokenizer import HuggingFaceTokenizer

    tokenizer = HuggingFaceTokenizer(tokenizer_model=folder)
    return count_records(files, tokenizer, seq_length=seq_length, ignored=ignored, is_packed=is_packed)
