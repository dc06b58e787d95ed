"""The training, validation and test split. All data is checked before any split is built."""

from __future__ import annotations

import contextlib
import functools
import glob
import math
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from filelock import UnixFileLock
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import get_blend_from_list

from megatron.bcd.blocks.subsets import PhaseSubset
from megatron.bcd.config import RunConfig
from megatron.bcd.data.lengths import num_samples

_DEFAULT_SPLIT = "969, 30, 1"  # Megatron-LM's default
_SPLIT_NAMES = ("training", "validation", "test")
_LONGEST_WAIT = 300.0
"""Seconds; below the default timeout of the other ranks' collectives."""
_CHECKED_CHUNKS = 64
_CHECKED_CHUNK_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The datasets of this rank; None if the split is empty or this stage needs no data."""

    train: Any
    validation: Any
    test: Any
    has_test: bool
    """Whether the run has a test split; set on all stages."""
    num_validation: int
    """Number of sequences in the validation split; set on all stages."""


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """Data that has passed all checks."""

    epoch_samples: int
    """Number of sequences in an epoch of the training split."""
    build: Callable[[], Splits]
    """Collective. Builds the splits; call it once."""
    notes: tuple[str, ...] = ()
    """Lines for the run summary."""


def plan_splits(config: RunConfig, tokenizer: Any, train_iters: int, *, least_steps_per_cycle: int) -> DataPlan:
    """Check the data without writing anything.

    Raises:
        ValueError: as `check_indexed_dataset`; or a required split has less than one sequence, or ends before the run.
    """
    dataset_config = _dataset_config(config, tokenizer)
    sizes = num_samples(config, train_iters, least_steps_per_cycle=least_steps_per_cycle)
    epoch_samples, num_validation = sizes[0], sizes[1]  # synthetic data is endless, so its epoch is the run
    if not config.data.mock_data:
        num_tokens = _check_splits(config, dataset_config, tokenizer.vocab_size, sizes)
        epoch_samples = _epoch_samples(config, dataset_config, num_tokens[0])
        if num_validation is None:
            num_validation = sum(_num_sequences(config, tokens) for tokens in num_tokens[1])
        redraws = config.bcd.bcd_sample_ratio is not None
        _check_blends(config, dataset_config, num_tokens, sizes if not redraws else (0, *sizes[1:]))
    if config.bcd.bcd_sample_ratio is not None and not config.training.skip_train:
        sizes = (epoch_samples, *sizes[1:])
        PhaseSubset(num_samples=epoch_samples, ratio=config.bcd.bcd_sample_ratio, seed=config.training.seed)
    assert num_validation is not None
    build = functools.partial(_build_splits, config, dataset_config, sizes, num_validation=num_validation)
    return DataPlan(epoch_samples=epoch_samples, build=build)


def _num_sequences(config: RunConfig, num_tokens: int) -> int:
    """Return the number of sequences in one pass. A sequence's labels extend one token beyond it."""
    return max(0, num_tokens - 1) // config.model.seq_length


def _epoch_samples(config: RunConfig, dataset_config: GPTDatasetConfig, num_tokens: Sequence[int]) -> int:
    """Return the number of sequences after which every dataset of the training split has been read once.

    Without weights this is the sum of the datasets' sequences. With weights the blend must run until the dataset that
    is read most slowly is finished. `num_tokens` are those of the training split, by prefix.
    """
    blend = dataset_config.blend or dataset_config.blend_per_split[0]
    sequences = [_num_sequences(config, tokens) for tokens in num_tokens]
    if blend is None or blend[1] is None or len(sequences) == 1:
        return sum(sequences)
    return max(math.ceil(n * sum(blend[1]) / weight) for n, weight in zip(sequences, blend[1], strict=True))


def stage_needs_data(config: RunConfig) -> bool:
    """Return whether this rank's pipeline stage reads tokens, labels or masks."""
    is_at_an_end = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
    return is_at_an_end or config.data.reset_attention_mask


def _build_splits(
    config: RunConfig,
    dataset_config: GPTDatasetConfig,
    sizes: tuple[int, int | None, int],
    *,
    num_validation: int,
) -> Splits:
    """Collective. Build the splits and write their index cache.

    Raises:
        ValueError: the index cache is not writable, or a killed run left an incomplete file in it.
    """
    dataset_class = MockGPTDataset if config.data.mock_data else GPTDataset
    try:
        with _one_job_at_a_time(next(iter(_cache_folders(config)), None)):
            built = BlendedMegatronDatasetBuilder(
                dataset_class, list(sizes), lambda: stage_needs_data(config), dataset_config
            ).build()
    except (ValueError, EOFError, pickle.UnpicklingError) as error:  # raised by numpy for a truncated file
        damaged = _damaged_indexes(config)
        if not damaged:
            raise
        raise ValueError(
            f"--data-cache-path {config.data.data_cache_path or '(beside the data)'}: the index cache is damaged, "
            f"probably by a run that was killed while writing it. Delete {' and '.join(damaged)}."
        ) from error
    except Exception as error:  # Megatron Core wraps the OSError
        reason = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(reason, OSError):
            raise
        raise ValueError(
            f"--data-cache-path {config.data.data_cache_path or '(beside the data)'}: the index cache can't be "
            f"written ({reason.strerror}: {reason.filename}). Give a writable folder."
        ) from error
    bounds = dataset_config.split_matrix or dataset_config.blend_per_split
    assert sizes[1] is not None or built[1] is None or len(built[1]) == num_validation
    return Splits(
        train=built[0],
        validation=built[1],
        test=built[2],
        has_test=bounds[2] is not None,
        num_validation=num_validation,
    )


@contextlib.contextmanager
def _one_job_at_a_time(folder: str | None) -> Iterator[None]:
    """Let rank 0 wait while another job writes the index cache, whose files are not complete then.

    It waits for _LONGEST_WAIT at most: the lock of a lost node must not stop a job.
    """
    with contextlib.ExitStack() as stack:
        if folder is not None and torch.distributed.get_rank() == 0:
            with contextlib.suppress(OSError):  # no locks, or a timeout; Megatron Core says if it is not writable
                os.makedirs(folder, exist_ok=True)
                stack.enter_context(
                    UnixFileLock(os.path.join(folder, ".lock"), timeout=_LONGEST_WAIT, fallback_to_soft=False)
                )
        yield


def _cache_folders(config: RunConfig) -> list[str]:
    """Return the folders of the index cache: the given one, or Megatron Core's default beside each dataset."""
    data = config.data
    if data.data_cache_path is not None:
        return [data.data_cache_path]
    paths = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    prefixes = [prefix for words in paths if words for prefix in get_blend_from_list(list(words))[0]]
    return [os.path.join(prefix, "cache", f"{GPTDataset.__name__}_indices") for prefix in dict.fromkeys(prefixes)]


def _damaged_indexes(config: RunConfig) -> list[str]:
    """Return the incomplete files of the index cache. Megatron Core writes a file again if it is missing."""
    damaged = []
    for folder in _cache_folders(config):
        for file in sorted(glob.glob(os.path.join(glob.escape(folder), "*_index.npy"))):
            try:
                numpy.load(file, mmap_mode="r")
            except (OSError, ValueError, EOFError):
                damaged.append(file)
    return damaged


def _dataset_config(config: RunConfig, tokenizer: Any) -> GPTDatasetConfig:
    data = config.data
    per_split = (data.train_data_path, data.valid_data_path, data.test_data_path)
    fields: dict[str, Any] = {}
    if any(per_split):
        fields["blend_per_split"] = [get_blend_from_list(list(paths) if paths else None) for paths in per_split]
    elif not data.mock_data:
        fields["blend"] = get_blend_from_list(list(data.data_path or ()))
        fields["split"] = data.split or _DEFAULT_SPLIT
    return GPTDatasetConfig(
        random_seed=config.training.seed,
        sequence_length=config.model.seq_length,
        tokenizer=tokenizer,
        path_to_cache=data.data_cache_path,
        mmap_bin_files=data.mmap_bin_files,
        reset_position_ids=data.reset_position_ids,
        eod_mask_loss=data.eod_mask_loss,
        reset_attention_mask=data.reset_attention_mask,
        create_attention_mask=data.reset_attention_mask,  # plain causal attention needs no S x S mask per sample
        **fields,
    )


def _check_splits(
    config: RunConfig, dataset_config: GPTDatasetConfig, vocab_size: int, sizes: tuple[int, int | None, int]
) -> list[list[int]]:
    """Check every file of the blend, and that each required split fills a sequence. Drop a test split that does not.

    Returns:
        Number of tokens by split, then by prefix.
    """
    needed = sizes[0] > 0, config.training.eval_iters > 0, False
    if dataset_config.blend is not None:
        dataset_config.split_matrix[1:] = [
            bounds if config.training.eval_iters else None for bounds in dataset_config.split_matrix[1:]
        ]
        by_prefix = [
            _check_shares(config, dataset_config, prefix, check_indexed_dataset(prefix, vocab_size), needed)
            for prefix in dataset_config.blend[0]
        ]
        return [list(tokens) for tokens in zip(*by_prefix, strict=True)]
    tokens_by_split: list[list[int]] = [[], [], []]
    flags = ("--train-data-path", "--valid-data-path", "--test-data-path")
    for i, blend in enumerate(dataset_config.blend_per_split):
        if blend is None and needed[i]:
            raise ValueError(
                f"{flags[i]}: missing. With data per split, give data for the {_SPLIT_NAMES[i]} split"
                + (", or --eval-iters 0." if i == 1 else ".")
            )
        for prefix in blend[0] if blend else ():
            num_tokens = int(check_indexed_dataset(prefix, vocab_size, flags[i]).sum())
            tokens_by_split[i].append(num_tokens)
            if num_tokens <= config.model.seq_length:
                raise ValueError(
                    f"{flags[i]} {prefix}: holds less than one sequence of {config.model.seq_length + 1:,} tokens. "
                    "Give more text, or a smaller --seq-length."
                )
    return tokens_by_split


def _check_blends(
    config: RunConfig,
    dataset_config: GPTDatasetConfig,
    num_tokens: Sequence[Sequence[int]],
    sizes: Sequence[int | None],
) -> None:
    """Check that datasets without weights have enough sequences, because they are read only once.

    Drop a test split that has too few.
    """
    flags = ("--train-data-path", "--valid-data-path", "--test-data-path")
    for i, name in enumerate(_SPLIT_NAMES):
        blend = dataset_config.blend or dataset_config.blend_per_split[i]
        sequences, drawn = sum(_num_sequences(config, tokens) for tokens in num_tokens[i]), sizes[i]
        if blend is None or blend[1] is not None or len(blend[0]) == 1 or drawn is None or drawn <= sequences:
            continue
        if name == "test":
            (dataset_config.split_matrix or dataset_config.blend_per_split)[i] = None
            continue
        flag = "--data-path" if dataset_config.blend else flags[i]
        weights = " ".join(f"{tokens} {prefix}" for tokens, prefix in zip(num_tokens[i], blend[0], strict=True))
        raise ValueError(
            f"{flag}: {len(blend[0])} datasets without weights have {sequences:,} {name} sequences and are read once, "
            f"but the run draws {drawn:,}. Give weights to read them repeatedly, e.g. {flag} {weights}"
        )


def _check_shares(
    config: RunConfig,
    dataset_config: GPTDatasetConfig,
    prefix: str,
    documents: numpy.ndarray,
    needed: tuple[bool, ...],
) -> list[int]:
    """Check the splits of one prefix. Return its tokens by split.

    Remove splits of less than one sequence: Megatron Core would never finish building them.
    """
    tokens_by_split = []
    for i, name in enumerate(_SPLIT_NAMES):
        first, last = (int(round(bound * len(documents))) for bound in dataset_config.split_matrix[i] or (0, 0))
        num_tokens = int(documents[first:last].sum())
        tokens_by_split.append(num_tokens)
        if num_tokens > config.model.seq_length:
            continue
        dataset_config.split_matrix[i] = None
        if needed[i]:
            raise ValueError(
                f"--split {dataset_config.split}: the {name} split of {prefix} holds {num_tokens:,} tokens, but one "
                f"sequence needs {config.model.seq_length + 1:,}. Give it a larger share"
                + (", or --eval-iters 0." if i == 1 else ".")
            )
    return tokens_by_split


# --- files


def check_indexed_dataset(prefix: str, vocab_size: int, flag: str = "--data-path") -> numpy.ndarray:
    """Check `prefix`.bin and .idx, and return the number of tokens of each document.

    Compare every token of a small dataset with the vocabulary; of a large one, 64 evenly spaced chunks of 1 Mi tokens.

    Raises:
        ValueError: a file is missing, truncated, not Megatron's, or written with another tokenizer.
    """
    for suffix in (".idx", ".bin"):
        if not os.path.isfile(prefix + suffix):
            raise ValueError(
                f"{flag} {prefix}: {prefix}{suffix} does not exist. Give the prefix that tools/preprocess_data.py "
                "wrote, without .bin or .idx."
            )
    if not os.path.getsize(prefix + ".bin"):
        raise ValueError(f"{flag} {prefix}: {prefix}.bin is empty. Run tools/preprocess_data.py on a non-empty text.")
    try:
        dataset = IndexedDataset(prefix)
        lengths, dtype = dataset.index.sequence_lengths, numpy.dtype(dataset.index.dtype)
        num_documents = len(dataset.index.document_indices) - 1
    except Exception as error:  # the reader raises all kinds of exceptions on damaged files
        raise ValueError(
            f"{flag} {prefix}: {prefix}.idx is truncated or no Megatron index. Run tools/preprocess_data.py again."
        ) from error
    expected, actual = int(lengths.sum(dtype=numpy.int64)) * dtype.itemsize, os.path.getsize(prefix + ".bin")
    if expected != actual or num_documents < 1:
        raise ValueError(
            f"{flag} {prefix}: {prefix}.bin has {actual:,} bytes, but its index describes {expected:,}. One of the two "
            "is truncated or of another run. Run tools/preprocess_data.py again."
        )
    smallest, largest = _token_range(prefix + ".bin", dtype)
    if smallest < 0 or largest >= vocab_size:
        raise ValueError(
            f"{flag} {prefix}: holds token {smallest if smallest < 0 else largest}, but the vocabulary of this "
            f"--tokenizer-type has {vocab_size}. Give the tokenizer that made the data."
        )
    bounds = dataset.index.document_indices
    return numpy.add.reduceat(lengths.astype(numpy.int64), bounds[:-1])


def _token_range(path: str, dtype: numpy.dtype) -> tuple[int, int]:
    tokens = numpy.memmap(path, dtype=dtype, mode="r")
    if len(tokens) <= _CHECKED_CHUNKS * _CHECKED_CHUNK_TOKENS:
        return int(tokens.min()), int(tokens.max())
    starts = numpy.linspace(0, len(tokens) - _CHECKED_CHUNK_TOKENS, _CHECKED_CHUNKS, dtype=numpy.int64)
    chunks = [tokens[start : start + _CHECKED_CHUNK_TOKENS] for start in starts]
    return min(int(chunk.min()) for chunk in chunks), max(int(chunk.max()) for chunk in chunks)
