"""Indexed datasets, their checks, and the batches of a run.

Tensor shapes: B micro-batch size, S sequence length.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

from megatron.bcd import platform
from megatron.bcd.config import RunConfig

_CHECKED_CHUNKS = 64
_CHECKED_CHUNK_TOKENS = 1 << 20
_DEFAULT_SPLIT = "969, 30, 1"  # Megatron-LM's
_SPLIT_NAMES = ("training", "validation", "test")
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

Batch = dict[str, torch.Tensor]


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
    except Exception as error:  # its reader raises whatever the bytes happen to be
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


def global_batch_size(config: RunConfig) -> int:
    """Sequences of one training step: --global-batch-size, or one micro-batch on every data-parallel rank."""
    return config.training.global_batch_size or (
        config.training.micro_batch_size * parallel_state.get_data_parallel_world_size()
    )


def num_iterations(config: RunConfig) -> int:
    """Training steps of the run. With --train-samples as stock counts them: a last batch that is not full is left out.

    Raises:
        ValueError: --train-samples holds no full global batch.
    """
    training = config.training
    if training.train_iters is not None or training.skip_train:
        return training.train_iters or 0
    samples, full_batch = training.train_samples or 0, global_batch_size(config)
    consumed = iterations = 0
    if training.rampup_batch_size:
        start, increment, ramp = training.rampup_batch_size
        calculator = RampupBatchsizeNumMicroBatchesCalculator(
            full_batch,
            training.micro_batch_size,
            parallel_state.get_data_parallel_world_size(),
            False,
            1,  # a rank other than 0 prints nothing
            start,
            increment,
            ramp,
        )
        while consumed <= ramp:
            calculator.update(consumed, False)
            if consumed + calculator.get_current_global_batch_size() > samples:
                break
            consumed += calculator.get_current_global_batch_size()
            iterations += 1
    iterations += max(0, samples - consumed) // full_batch
    if iterations < 1:
        raise ValueError(
            f"--train-samples {samples} is less than one global batch; give at least --global-batch-size {full_batch}"
        )
    return iterations


def num_samples(config: RunConfig, train_iters: int) -> tuple[int, int, int]:
    """Sequences that the run draws from the training, validation and test split.

    These are stock Megatron-LM's numbers: they decide the order of the samples.
    """
    training = config.training
    batch = global_batch_size(config)
    train = training.train_samples or train_iters * batch
    evaluations = 1 if training.skip_train else train_iters // training.eval_interval + 1
    return train, evaluations * training.eval_iters * batch, training.eval_iters * batch


class ConsecutiveBatches:
    """Batch sampler: consecutive samples, dealt to the data-parallel ranks in runs of one micro-batch (Megatron-LM's
    `single` order).

    A last batch that would be too short is left out.
    """

    def __init__(
        self, *, total_samples: int, consumed_samples: int, micro_batch_size: int, rank: int, num_ranks: int
    ) -> None:
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.step = micro_batch_size * num_ranks

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(self.consumed_samples, self.total_samples - self.step + 1, self.step):
            first = start + self.rank * self.micro_batch_size
            yield list(range(first, first + self.micro_batch_size))

    def __len__(self) -> int:
        return max(0, (self.total_samples - self.consumed_samples) // self.step)


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Datasets of this rank; None where the split is empty or this stage needs no data."""

    train: Any
    validation: Any
    test: Any
    has_test: bool
    """Whether the run has a test split, also where this stage has no data."""


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """Data that was checked, before anything is written: Megatron Core's configuration, and sequences per split."""

    dataset_config: GPTDatasetConfig
    sizes: tuple[int, int, int]


def plan_splits(config: RunConfig, tokenizer: Any, train_iters: int) -> SplitPlan:
    """Check the data, reading only.

    Raises:
        ValueError: see `check_indexed_dataset`; or a split that is needed is shorter than one sequence.
    """
    dataset_config = _dataset_config(config, tokenizer)
    sizes = num_samples(config, train_iters)
    if not config.data.mock_data:
        _check_splits(config, dataset_config, tokenizer.vocab_size, sizes)
    return SplitPlan(dataset_config=dataset_config, sizes=sizes)


def build_splits(config: RunConfig, plan: SplitPlan) -> Splits:
    """Build the splits and write their index cache, on all ranks together (Megatron Core's builder has barriers).

    Raises:
        ValueError: the index cache can't be written.
    """
    dataset_config = plan.dataset_config
    needs_data = (
        parallel_state.is_pipeline_first_stage()
        or parallel_state.is_pipeline_last_stage()
        or config.data.reset_attention_mask
    )
    dataset_class = MockGPTDataset if config.data.mock_data else GPTDataset
    try:
        built = BlendedMegatronDatasetBuilder(
            dataset_class, list(plan.sizes), lambda: needs_data, dataset_config
        ).build()
    except Exception as error:  # Megatron Core wraps what the disk says
        reason = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(reason, OSError):
            raise
        raise ValueError(
            f"--data-cache-path {config.data.data_cache_path or '(beside the data)'}: the index cache can't be "
            f"written ({reason.strerror}: {reason.filename}); give a folder that can"
        ) from error
    bounds = dataset_config.split_matrix or dataset_config.blend_per_split
    return Splits(train=built[0], validation=built[1], test=built[2], has_test=bounds[2] is not None)


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
        reset_position_ids=data.reset_position_ids,
        eod_mask_loss=data.eod_mask_loss,
        reset_attention_mask=data.reset_attention_mask,
        create_attention_mask=data.reset_attention_mask,  # plain causal attention needs no S x S mask per sample
        **fields,
    )


def _check_splits(config: RunConfig, dataset_config: GPTDatasetConfig, vocab_size: int, sizes: tuple[int, ...]) -> None:
    """Check every file of the blend, and that each split that is needed fills a sequence; a test split that does not
    is left out."""
    needed = sizes[0] > 0, config.training.eval_iters > 0, False
    if dataset_config.blend is not None:
        dataset_config.split_matrix[1:] = [
            bounds if config.training.eval_iters else None for bounds in dataset_config.split_matrix[1:]
        ]
        for prefix in dataset_config.blend[0]:
            _check_shares(config, dataset_config, prefix, check_indexed_dataset(prefix, vocab_size), needed)
        return
    flags = ("--train-data-path", "--valid-data-path", "--test-data-path")
    for i, blend in enumerate(dataset_config.blend_per_split):
        if blend is None and needed[i]:
            raise ValueError(
                f"{flags[i]} is missing; with data per split give one for the {_SPLIT_NAMES[i]} split"
                + (", or --eval-iters 0" if i == 1 else "")
            )
        for prefix in blend[0] if blend else ():
            if check_indexed_dataset(prefix, vocab_size, flags[i]).sum() <= config.model.seq_length:
                raise ValueError(
                    f"{flags[i]} {prefix}: holds less than one sequence of {config.model.seq_length + 1:,} tokens"
                )


def _check_shares(
    config: RunConfig,
    dataset_config: GPTDatasetConfig,
    prefix: str,
    documents: numpy.ndarray,
    needed: tuple[bool, ...],
) -> None:
    """Check what --split gives of one prefix; Megatron Core wants a sequence of each, or builds for ever."""
    for i, name in enumerate(_SPLIT_NAMES):
        first, last = (int(round(bound * len(documents))) for bound in dataset_config.split_matrix[i] or (0, 0))
        num_tokens = int(documents[first:last].sum())
        if num_tokens > config.model.seq_length:
            continue
        dataset_config.split_matrix[i] = None
        if needed[i]:
            raise ValueError(
                f"--split {dataset_config.split}: the {name} split of {prefix} holds {num_tokens:,} tokens and one "
                f"sequence needs {config.model.seq_length + 1:,}; give it a larger share"
                + (", or --eval-iters 0" if i == 1 else "")
            )


def _collate(samples: Sequence[dict[str, Any]]) -> Batch:
    return {name: torch.stack([torch.as_tensor(sample[name]) for sample in samples]) for name in samples[0]}


def batches(
    dataset: Any, config: RunConfig, *, consumed_samples: int, total_samples: int | None = None
) -> Iterator[Batch]:
    """Micro-batches of this data-parallel rank, on its device, from sample `consumed_samples` on.

    `tokens`, `labels`, `position_ids` int64 [B, S], `loss_mask` float32 [B, S], and with --reset-attention-mask
    `attention_mask` bool [B, 1, S, S], True = masked.
    """
    sampler = ConsecutiveBatches(
        total_samples=len(dataset) if total_samples is None else total_samples,
        consumed_samples=consumed_samples,
        micro_batch_size=config.training.micro_batch_size,
        rank=parallel_state.get_data_parallel_rank(),
        num_ranks=parallel_state.get_data_parallel_world_size(),
    )
    workers = config.data.num_workers
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=_collate,
        num_workers=workers,
        pin_memory=platform.has_cuda(),
        persistent_workers=workers > 0,
        worker_init_fn=_leave_signals_to_the_rank,
        generator=torch.Generator().manual_seed(config.training.seed),
    )  # else the loader would draw from the model's generator
    return _on_device(loader)


def _leave_signals_to_the_rank(worker: int) -> None:
    """Slurm signals every process of a job: a reader that died of it would end the rank before it has saved.

    Its own rank's SIGTERM still ends a reader: Python sends one when a rank fails, and then waits without a limit.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    threading.Thread(target=_end_with_the_rank, name="signals", daemon=True).start()


def _end_with_the_rank() -> None:
    while signal.sigwaitinfo(_STOP_SIGNALS).si_pid != os.getppid():
        pass
    os._exit(0)


def _on_device(loader: Iterable[Batch]) -> Iterator[Batch]:
    device = platform.device()
    for batch in loader:
        yield {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def no_batches() -> Iterator[Batch]:
    """What a stage in the middle of the pipeline reads: empty batches, for ever."""
    return itertools.repeat({})
