"""Microbatches of this data-parallel rank.

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
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron.bcd.blocks.subsets import PhaseSubset
from megatron.bcd.config import RunConfig
from megatron.bcd.data.lengths import global_batch_size
from megatron.bcd.runtime import device
from megatron.bcd.runtime.exit import SIGNALS

_MICROBATCHES_AT_ONCE = 256
"""Microbatches whose indices are computed together, far faster than one by one."""

INDICES = "indices"
"""Key of a batch: which samples of the dataset it holds."""

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class GroupShare:
    """Which samples a replica group reads: the groups take turns, a global batch each."""

    group: int = 0
    num_groups: int = 1
    batch_size: int = 1

    def place(self, number: Any) -> Any:
        """Of this group's sample of that number (or numbers, an array), among those of all groups."""
        return number + (number // self.batch_size * (self.num_groups - 1) + self.group) * self.batch_size


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """How the samples of a batch are dealt to the data-parallel ranks, of which this is one: a microbatch each."""

    micro_batch_size: int
    rank: int
    num_ranks: int
    share: GroupShare = GroupShare()

    @classmethod
    def of_run(cls, config: RunConfig, share: GroupShare = GroupShare()) -> Dealt:
        return cls(
            share=share,
            micro_batch_size=config.training.micro_batch_size,
            rank=parallel_state.get_data_parallel_rank(),
            num_ranks=parallel_state.get_data_parallel_world_size(),
        )

    @property
    def step(self) -> int:
        """Samples of a microbatch on every rank."""
        return self.micro_batch_size * self.num_ranks


def consecutive(dealt: Dealt, *, total_samples: int, consumed_samples: int) -> Iterator[list[int]]:
    """Indices of this rank's microbatches: consecutive samples (Megatron-LM's `single` order).

    A last batch that would be too short is left out.
    """
    for number in itertools.count(0, dealt.step):
        start = consumed_samples + dealt.share.place(number)
        if start + dealt.step > total_samples:
            return
        first = start + dealt.rank * dealt.micro_batch_size
        yield list(range(first, first + dealt.micro_batch_size))


def of_subset(dealt: Dealt, *, subset: PhaseSubset, phase: int, position: int) -> Iterator[list[int]]:
    """The same of the subset of one phase, pass after pass without end. `position`: samples that the phase has trained
    on already, over all ranks."""
    in_batch = dealt.rank * dealt.micro_batch_size + numpy.arange(dealt.micro_batch_size)
    of_batches = dealt.step * numpy.arange(_MICROBATCHES_AT_ONCE)
    for start in itertools.count(0, dealt.step * _MICROBATCHES_AT_ONCE):
        positions = (position + dealt.share.place(start + of_batches)[:, None] + in_batch[None, :]).reshape(-1)
        yield from subset.samples(phase, positions).reshape(-1, dealt.micro_batch_size).tolist()


def reshuffled(dealt: Dealt, *, total_samples: int, consumed_samples: int, has_shards: bool) -> Iterator[list[int]]:
    """The same of samples shuffled anew in every epoch, without end (stock Megatron-LM's `cyclic` order).

    The order depends on the number of the epoch and on the parallel layout. What is left of an epoch after the last
    full batch is left out. `has_shards`: each rank shuffles a contiguous part of its own, else all shuffle all and take
    turns.
    """
    size, num_steps = dealt.micro_batch_size, total_samples // dealt.step
    epoch, first_step = divmod(consumed_samples // dealt.step, max(1, num_steps))
    while num_steps:
        generator = torch.Generator().manual_seed(epoch)
        if has_shards:
            part = num_steps * size
            indices = dealt.rank * part + torch.randperm(part, generator=generator)
        else:
            indices = torch.randperm(total_samples // size * size, generator=generator)[dealt.rank :: dealt.num_ranks]
        for step in range(first_step, num_steps):
            yield indices[step * size : (step + 1) * size].tolist()
        epoch, first_step = epoch + 1, 0


def _collate(samples: Sequence[dict[str, Any]]) -> Batch:
    return {name: torch.stack([torch.as_tensor(sample[name]) for sample in samples]) for name in samples[0]}


def batches(
    dataset: Any, config: RunConfig, *, consumed_samples: int, share: GroupShare = GroupShare()
) -> Iterator[Batch]:
    """Microbatches of this data-parallel rank, on its device, from sample `consumed_samples` on, without end: after the
    last sample the first one follows. A resumed run with other flags may have consumed more than there is. `tokens`
    are where the embedding is.

    `tokens`, `labels`, `position_ids` int64 [B, S], `loss_mask` float32 [B, S], and with --reset-attention-mask
    `attention_mask` bool [B, 1, S, S], True = masked. Of S this context-parallel rank's part; of masks, of their rows.
    """
    dealt, total = Dealt.of_run(config, share), len(dataset)
    if config.data.dataloader_type == "cyclic":
        has_shards = config.data.data_sharding
        order = reshuffled(dealt, total_samples=total, consumed_samples=consumed_samples, has_shards=has_shards)
        yield from _loaded(dataset, order, config)
        return
    for start in itertools.chain([consumed_samples % total], itertools.repeat(0)):
        if start == 0 and total < dealt.step:
            return
        yield from _loaded(dataset, consecutive(dealt, total_samples=total, consumed_samples=start), config)


class _WithIndices(torch.utils.data.Dataset[dict[str, Any]]):
    """A dataset whose samples carry their index, so that a batch can be compared with a prefix cache's entries."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self._dataset[index], INDICES: index}


class _FilledUp(torch.utils.data.Dataset[dict[str, Any]]):
    """A dataset followed by its first sample without a loss, as often as is asked for."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < len(self._dataset):
            return self._dataset[index]
        sample = self._dataset[0]
        return {**sample, "loss_mask": torch.zeros_like(torch.as_tensor(sample["loss_mask"]))}


def one_pass(dataset: Any, config: RunConfig) -> Iterator[Batch]:
    """As `batches`, every sample once. The last global batch is filled up with samples whose `loss_mask` is 0, so that
    the mean per token depends on no batch size."""
    global_batch = global_batch_size(config)
    total = math.ceil(len(dataset) / global_batch) * global_batch
    order = consecutive(Dealt.of_run(config), total_samples=total, consumed_samples=0)
    return _loaded(_FilledUp(dataset), order, config)


def subset_batches(
    dataset: Any,
    config: RunConfig,
    *,
    subset: PhaseSubset,
    phase: int,
    position: int,
    share: GroupShare = GroupShare(),
) -> Iterator[Batch]:
    """As `batches`, of the subset that `phase` trains on, from `position` on, without end. Each batch has `indices`
    too, int64 [B] in host memory."""
    order = of_subset(Dealt.of_run(config, share), subset=subset, phase=phase, position=position)
    return _loaded(_WithIndices(dataset), order, config)


def batch_of(dataset: Any, indices: Sequence[int], config: RunConfig) -> Batch:
    """The samples `indices` as one microbatch, read at once; see `batches`."""
    return _on_this_rank(config, _collate([dataset[index] for index in indices]))


def _loaded(dataset: Any, indices: Iterable[list[int]], config: RunConfig) -> Iterator[Batch]:
    workers = config.data.num_workers
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=indices,
        collate_fn=_collate,
        num_workers=workers,
        pin_memory=device.has_cuda(),
        persistent_workers=workers > 0,
        worker_init_fn=_leave_signals_to_the_rank,
        generator=torch.Generator().manual_seed(config.training.seed),
    )  # else the loader would draw from the model's generator
    return map(functools.partial(_on_this_rank, config), loader)


def _leave_signals_to_the_rank(worker: int) -> None:
    """Slurm and terminals signal every process of a job: a reader that died of it would end the rank before it saves.

    A SIGTERM from its own rank still ends a reader: Python sends one when a rank fails, and then waits without limit.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=_end_with_the_rank, name="signals", daemon=True).start()


def _end_with_the_rank() -> None:
    while signal.sigwaitinfo(SIGNALS).si_pid != os.getppid():
        pass
    os._exit(0)


def _on_this_rank(config: RunConfig, batch: Batch) -> Batch:
    """On its device, and of each sequence the part that this context-parallel rank works on."""
    stays, target = {"tokens"} if config.has_embedding_on_host else (), device.current()
    indices = {INDICES: batch.pop(INDICES)} if INDICES in batch else {}
    moved = {name: tensor if name in stays else tensor.to(target, non_blocking=True) for name, tensor in batch.items()}
    if "segment_ids" in moved:
        moved["attention_mask"] = between_segments(moved.pop("segment_ids"))
    return get_batch_on_this_cp_rank(moved) | indices


def between_segments(segment_ids: torch.Tensor) -> torch.Tensor:
    """The causal mask of sequences of several segments, bool [B, 1, S, S], True = masked, from the number of each
    token's segment, [B, S]."""
    length = segment_ids.size(1)
    is_later = torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).triu(1)
    return ((segment_ids[:, :, None] != segment_ids[:, None, :]) | is_later)[:, None]


def part_of_sequences(hidden_states: torch.Tensor) -> torch.Tensor:
    """Of [S, B, H], what this context-parallel rank works on."""
    by_sample = {"": hidden_states.transpose(0, 1)}
    return get_batch_on_this_cp_rank(by_sample)[""].transpose(0, 1).contiguous()


def no_batches() -> Iterator[Batch]:
    """Empty batches without end, for a stage in the middle of the pipeline."""
    return itertools.repeat({})
