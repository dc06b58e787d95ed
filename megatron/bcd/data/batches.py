"""The microbatches of this data-parallel rank, and how much of the data a run has used.

Tensor shapes: B microbatch size, S sequence length.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.bcd.blocks.subsets import PhaseSubset
from megatron.bcd.config import RunConfig
from megatron.bcd.data.lengths import global_batch_size
from megatron.bcd.model.implementation import attends_by_text
from megatron.bcd.runtime import device
from megatron.bcd.runtime.compat.megatron_core import context_part
from megatron.bcd.runtime.exit import SIGNALS

_MICROBATCHES_AT_ONCE = 256
"""Number of microbatches whose indices are computed together, which is much faster than one by one."""

Batch = dict[str, torch.Tensor]

_OF_WHOLE_SEQUENCES = ("segment_ids", "text_bounds", "longest_text")
"""Keys of a batch that every context-parallel rank has in full."""


@dataclass(frozen=True, kw_only=True)
class GroupShare:
    """The samples that a replica group reads. The groups alternate: each reads one global batch at a time."""

    group: int = 0
    num_groups: int = 1
    batch_size: int = 1

    def sample_number(self, number: Any) -> Any:
        """Convert a sample number within this group (or an array of them) to the number within all groups."""
        return number + (number // self.batch_size * (self.num_groups - 1) + self.group) * self.batch_size


@dataclass(frozen=True, kw_only=True)
class BatchSharding:
    """How the samples of a batch are divided between the data-parallel ranks: one microbatch each."""

    micro_batch_size: int
    rank: int
    num_ranks: int
    share: GroupShare = GroupShare()

    @classmethod
    def from_run(cls, config: RunConfig, share: GroupShare = GroupShare()) -> BatchSharding:
        return cls(
            share=share,
            micro_batch_size=config.training.micro_batch_size,
            rank=parallel_state.get_data_parallel_rank(),
            num_ranks=parallel_state.get_data_parallel_world_size(),
        )

    @property
    def step(self) -> int:
        """Number of samples in one microbatch of every rank."""
        return self.micro_batch_size * self.num_ranks


def consecutive_indices(sharding: BatchSharding, *, total_samples: int, consumed_samples: int) -> Iterator[list[int]]:
    """Yield the indices of this rank's microbatches: consecutive samples.

    A last batch that is too short is dropped.
    """
    for number in itertools.count(0, sharding.step):
        start = consumed_samples + sharding.share.sample_number(number)
        if start + sharding.step > total_samples:
            return
        first = start + sharding.rank * sharding.micro_batch_size
        yield list(range(first, first + sharding.micro_batch_size))


def subset_indices(sharding: BatchSharding, *, subset: PhaseSubset, phase: int, position: int) -> Iterator[list[int]]:
    """Yield the indices of this rank's microbatches in a phase's subset, endlessly, pass after pass.

    `position` is the number of samples that all ranks together have already trained on in this phase.
    """
    in_batch = sharding.rank * sharding.micro_batch_size + numpy.arange(sharding.micro_batch_size)
    batch_starts = sharding.step * numpy.arange(_MICROBATCHES_AT_ONCE)
    for start in itertools.count(0, sharding.step * _MICROBATCHES_AT_ONCE):
        positions = sharding.share.sample_number(start + batch_starts)[:, None] + in_batch[None, :]
        positions = (position + positions).reshape(-1)
        yield from subset.samples(phase, positions).reshape(-1, sharding.micro_batch_size).tolist()


def _collate(samples: Sequence[dict[str, Any]], *, by_text: bool = False) -> Batch:
    """Stack the samples. Describe masks by the number of each token's text, or with `by_text` by the texts' bounds."""
    batch = {name: torch.stack([torch.as_tensor(sample[name]) for sample in samples]) for name in samples[0]}
    if (mask := batch.pop("attention_mask", None)) is not None:  # the first token of a text masks the one before it
        batch["segment_ids"] = torch.nn.functional.pad(mask[:, 0].diagonal(-1, 1, 2).cumsum(1), (1, 0))
    if by_text and "segment_ids" in batch:
        is_first = torch.nn.functional.pad(batch.pop("segment_ids").diff(dim=1) != 0, (1, 0), value=True)
        starts = is_first.flatten().nonzero().flatten()
        bounds = torch.cat((starts, torch.tensor([is_first.numel()]))).int()
        batch |= {"text_bounds": bounds, "longest_text": bounds.diff().max()}
    return batch


def batches(
    dataset: Any, config: RunConfig, *, consumed_samples: int, share: GroupShare = GroupShare()
) -> Iterator[Batch]:
    """Yield this rank's microbatches on its device, from sample `consumed_samples` on, endlessly.

    After the last sample comes the first one again: a run resumed with other flags may have consumed more samples than
    the dataset has.

    A batch holds `tokens`, `labels`, `position_ids` int64 [B, S] and `loss_mask` float32 [B, S]; with context
    parallelism this rank's part of S. `tokens` stay in host memory if the embedding is there. With
    --reset-attention-mask it also describes its T texts, which do not attend to each other: `segment_ids` int64 [B, S],
    or with variable-length attention `text_bounds` int32 [T + 1] and `longest_text` int32 [] (in host memory).
    """
    sharding, total = BatchSharding.from_run(config, share), len(dataset)
    for start in itertools.chain([consumed_samples % total], itertools.repeat(0)):
        if start == 0 and total < sharding.step:
            return
        yield from _loaded(dataset, consecutive_indices(sharding, total_samples=total, consumed_samples=start), config)


class _Padded(torch.utils.data.Dataset[dict[str, Any]]):
    """A dataset that is padded with copies of its first sample that have no loss."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < len(self._dataset):
            return self._dataset[index]
        sample = self._dataset[0]
        return {**sample, "loss_mask": torch.zeros_like(torch.as_tensor(sample["loss_mask"]))}


def one_pass(dataset: Any, config: RunConfig) -> Iterator[Batch]:
    """Return this rank's microbatches of one pass over the dataset.

    Pad the last global batch with samples whose `loss_mask` is 0, so that the mean per token does not depend on the
    batch size.
    """
    global_batch = global_batch_size(config)
    total = math.ceil(len(dataset) / global_batch) * global_batch
    order = consecutive_indices(BatchSharding.from_run(config), total_samples=total, consumed_samples=0)
    return _loaded(_Padded(dataset), order, config)


def load_batch(dataset: Any, indices: Sequence[int], config: RunConfig) -> Batch:
    """Load the samples `indices` as one microbatch, in the format of `batches`."""
    samples = [dataset[index] for index in indices]
    return _on_this_rank(config, _collate(samples, by_text=attends_by_text(config)))


def _loaded(dataset: Any, indices: Iterable[list[int]], config: RunConfig) -> Iterator[Batch]:
    workers = config.data.num_workers
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=indices,
        collate_fn=functools.partial(_collate, by_text=attends_by_text(config)),
        num_workers=workers,
        pin_memory=device.has_cuda(),
        worker_init_fn=_ignore_signals,
        # without a generator, the loader would draw from the model's
        generator=torch.Generator().manual_seed(config.training.seed),
    )
    return map(functools.partial(_on_this_rank, config), loader)


def _ignore_signals(worker: int) -> None:
    """Make a data worker ignore all signals except those from its own rank.

    Slurm and terminals signal every process of a job. If a worker died, its rank would fail before it saves. When a
    rank fails, Python sends SIGTERM to its workers and waits for them without a limit, so that signal must work.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=_end_with_the_rank, name="signals", daemon=True).start()


def _end_with_the_rank() -> None:
    while signal.sigwaitinfo(SIGNALS).si_pid != os.getppid():
        pass
    os._exit(0)


def _on_this_rank(config: RunConfig, batch: Batch) -> Batch:
    """Move a batch to this rank's device, and select this context-parallel rank's part of each sequence."""
    stays, target = {"longest_text", *["tokens"] * config.has_embedding_on_host}, device.current()
    moved = {name: tensor if name in stays else tensor.to(target, non_blocking=True) for name, tensor in batch.items()}
    whole = {name: moved.pop(name) for name in _OF_WHOLE_SEQUENCES if name in moved}
    return context_part(moved) | whole


def attention_inputs(batch: Batch) -> dict[str, Any]:
    """Return the arguments by which a model keeps the texts of a batch apart; None for plain causal attention.

    `attention_mask` bool [B, 1, S, S], True = masked (of context-parallel ranks, their rows), is made where it is used,
    because an iteration may keep all of its batches. `packed_seq_params` describes the texts without a mask.
    """
    inputs: dict[str, Any] = {"attention_mask": None, "packed_seq_params": None}
    if "text_bounds" in batch:
        longest, length = int(batch["longest_text"]), batch["position_ids"].size(1)
        lengths = {"max_seqlen_q": longest, "max_seqlen_kv": length}  # the larger is that of the rotary embedding
        bounds = batch["text_bounds"]
        inputs["packed_seq_params"] = PackedSeqParams(
            qkv_format="sbhd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, **lengths
        )
    elif "segment_ids" in batch:
        inputs |= context_part({"attention_mask": _attention_mask(batch["segment_ids"])})
    return inputs


def _attention_mask(segment_ids: torch.Tensor) -> torch.Tensor:
    """Return the mask of segments [B, S]."""
    length = segment_ids.size(1)
    is_later = torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).triu(1)
    return ((segment_ids[:, :, None] != segment_ids[:, None, :]) | is_later)[:, None]


def context_shard(hidden_states: torch.Tensor) -> torch.Tensor:
    """Return this context-parallel rank's part of [S, B, H]."""
    by_sample = {"": hidden_states.transpose(0, 1)}
    return context_part(by_sample)[""].transpose(0, 1).contiguous()


class TrainingSamples:
    """Batches of the training split: consecutive samples, or with --bcd-sample-ratio a subset for each phase."""

    def __init__(self, config: RunConfig, *, dataset: Any, epoch_samples: int) -> None:
        """
        Args:
            dataset: None on a stage that needs no data.
            epoch_samples: number of sequences in an epoch.
        """
        ratio = config.bcd.bcd_sample_ratio
        self.subset = (
            None
            if ratio is None or config.training.skip_train
            else PhaseSubset(num_samples=epoch_samples, ratio=ratio, seed=config.training.seed)
        )
        self.epoch_samples = epoch_samples
        self._config = config
        self.dataset = dataset
        self._batches: Iterator[Batch] | None = None
        self.share = GroupShare()

    def batches(self, *, phase: int, consumed_samples: int, position: int) -> Iterator[Batch]:
        """Return this rank's remaining microbatches of the run, or with subsets of the phase, endlessly.

        `position` is the number of samples that the phase has trained on.
        """
        if self._batches is None:
            self._batches = self._open(phase, consumed_samples, position)
        return self._batches

    def set_share(self, share: GroupShare) -> None:
        """Read this replica group's samples from the next batch on."""
        if share != self.share:
            self.close()
        self.share = share

    def close(self) -> None:
        """Stop the data workers. The next batches may be at another position."""
        self._batches = None

    def end_phase(self) -> None:
        """Start the next phase's subset with the next batch."""
        if self.subset is not None:
            self.close()

    def num_distinct(self, num_in_phase: int) -> int:
        """Return the number of different samples among the first `num_in_phase` of a phase."""
        return num_in_phase if self.subset is None else min(num_in_phase, self.subset.size)

    def share_seen(self, *, in_phase: int, seen_before: int) -> float:
        """Return the fraction of an epoch that the run has trained on, at most 1.

        It is exact until a phase repeats samples of an earlier one.
        """
        return min(1.0, (seen_before + self.num_distinct(in_phase)) / max(1, self.epoch_samples))

    def _open(self, phase: int, consumed_samples: int, position: int) -> Iterator[Batch]:
        if self.dataset is None:
            return itertools.repeat({})
        if self.subset is None:
            return batches(self.dataset, self._config, consumed_samples=consumed_samples, share=self.share)
        sharding = BatchSharding.from_run(self._config, self.share)
        order = subset_indices(sharding, subset=self.subset, phase=phase, position=position)
        return _loaded(self.dataset, order, self._config)
