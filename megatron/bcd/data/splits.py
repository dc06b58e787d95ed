"""The training, validation and test split. All data is checked before any split is built."""

from __future__ import annotations

import contextlib
import functools
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
from megatron.bcd.runtime import atomic_io

_DEFAULT_SPLIT = "969, 30, 1"  # Megatron-LM's default
_SPLIT_FLAGS = {"training": "--train-data-path", "validation": "--valid-data-path", "test": "--test-data-path"}
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


def plan_splits(config: RunConfig, tokenizer: Any, train_iters: int) -> DataPlan:
    """Check the data without writing anything.

    Raises:
        ValueError: as `check_indexed_dataset`; or a required split has less than one sequence, or ends before the run.
    """
    dataset_config = _dataset_config(config, tokenizer)
    sizes = num_samples(config, train_iters)
    epoch_samples, num_validation = sizes[0], sizes[1]  # synthetic data is endless, so its epoch is the run
    if not config.data.mock_data:
        num_tokens = _check_splits(config, dataset_config, tokenizer.vocab_size, sizes)
        epoch_samples = _epoch_samples(config, dataset_config, num_tokens[0])
        if num_validation is None:
            num_validation = sum(_num_sequences(config, tokens) for tokens in num_tokens[1])
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
    blends = filter(None, (dataset_config.blend, *(dataset_config.blend_per_split or ())))
    prefix = next((blend[0][0] for blend in blends), None)
    # Megatron Core's default is beside the data
    default = prefix and os.path.join(prefix, "cache", f"{GPTDataset.__name__}_indices")
    try:
        with _one_job_at_a_time(config.data.data_cache_path or default):
            built = BlendedMegatronDatasetBuilder(
                dataset_class, list(sizes), lambda: stage_needs_data(config), dataset_config
            ).build()
    except Exception as error:  # Megatron Core wraps an OSError, and numpy raises others on an incomplete file
        if not isinstance(atomic_io.os_error(error), OSError | ValueError | EOFError | pickle.UnpicklingError):
            raise
        raise ValueError(
            f"--data-cache-path {config.data.data_cache_path or '(beside the data)'}: the index cache can't be read or "
            f"written ({atomic_io.describe(error)}). Give a writable folder, or delete the cache: a killed run may "
            "have left an incomplete file."
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
    """Check every file of the blend, and that each required split fills a sequence and lasts for the run.

    Drop a test split that does not. Datasets without weights are read only once.

    Returns:
        Number of tokens by split, then by prefix.
    """
    blend, length = dataset_config.blend, config.model.seq_length
    documents = {prefix: check_indexed_dataset(prefix, vocab_size) for prefix in (blend[0] if blend else ())}
    splits: list[Any] = dataset_config.split_matrix if blend else dataset_config.blend_per_split
    is_needed = sizes[0] > 0, config.training.eval_iters > 0, False
    num_tokens: list[list[int]] = [[], [], []]
    for i, (name, flag) in enumerate(_SPLIT_FLAGS.items()):
        if blend and i > 0 and not config.training.eval_iters:
            splits[i] = None
        prefixes, weights = blend or splits[i] or ((), None)
        advice = ", or --eval-iters 0." if name == "validation" else "."
        if is_needed[i] and not prefixes:
            raise ValueError(f"{flag}: missing. With data per split, give data for the {name} split{advice}")
        for prefix in prefixes:
            if blend:
                first, last = (int(round(bound * len(documents[prefix]))) for bound in splits[i] or (0, 0))
                tokens = int(documents[prefix][first:last].sum())
            else:
                tokens = int(check_indexed_dataset(prefix, vocab_size, flag).sum())
            num_tokens[i].append(tokens)
            if tokens > length:
                continue
            if is_needed[i] or not blend:
                raise ValueError(
                    f"{f'--split {dataset_config.split}' if blend else flag}: the {name} split of {prefix} holds "
                    f"{tokens:,} tokens, but one sequence needs {length + 1:,}. Give it more{advice}"
                )
            splits[i] = None  # Megatron Core would never finish building it
        sequences = sum(_num_sequences(config, tokens) for tokens in num_tokens[i])
        drawn = 0 if i == 0 and config.bcd.bcd_sample_ratio is not None else sizes[i]
        if weights is not None or len(prefixes) < 2 or drawn is None or drawn <= sequences:
            continue
        if is_needed[i]:
            flag = "--data-path" if blend else flag
            words = " ".join(f"{tokens} {prefix}" for tokens, prefix in zip(num_tokens[i], prefixes, strict=True))
            raise ValueError(
                f"{flag}: {len(prefixes)} datasets without weights have {sequences:,} {name} sequences and are read "
                f"once, but the run draws {drawn:,}. Give weights to read them repeatedly, e.g. {flag} {words}"
            )
        splits[i] = None
    return num_tokens


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
                f"{flag} {prefix}: {prefix}{suffix} does not exist. Give what tools/preprocess_data.py wrote, without "
                ".bin or .idx, such as out/my_text_document."
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
    last = max(0, len(tokens) - _CHECKED_CHUNK_TOKENS)
    starts = numpy.unique(numpy.linspace(0, last, _CHECKED_CHUNKS, dtype=numpy.int64))
    chunks = [tokens[start : start + _CHECKED_CHUNK_TOKENS] for start in starts]
    return min(int(chunk.min()) for chunk in chunks), max(int(chunk.max()) for chunk in chunks)
