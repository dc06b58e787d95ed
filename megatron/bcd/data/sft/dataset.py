"""Datasets for supervised fine-tuning: divide samples into splits and pack them into sequences.

The same on every rank. S sequence length, R samples.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import numpy.typing
import torch

from megatron.bcd.blocks.subsets import Indices, PhaseSubset
from megatron.bcd.config import RunConfig
from megatron.bcd.data.lengths import num_samples
from megatron.bcd.data.sft.permutation import Permutation
from megatron.bcd.data.sft.store import Files, Samples, collect, files_of, tokenize_files, tokenized_samples
from megatron.bcd.data.splits import DataPlan, Splits, stage_needs_data
from megatron.bcd.tokenizer import Tokenizer


def divide(num_samples: int, shares: Sequence[float]) -> list[Indices]:
    """Return the indices of each split in a random order that is the same in every run.

    The order does not depend on the seed, so all runs have the same validation samples. `shares` need not sum to 1.
    """
    order = Permutation(max(1, num_samples), "splits of fine-tuning samples").at(numpy.arange(num_samples))
    bounds = numpy.rint(numpy.cumsum([0.0, *shares]) / sum(shares) * num_samples).astype(int).tolist()
    return [order[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


def divide_by_record(records: Indices, shares: Sequence[float]) -> list[Indices]:
    """Divide samples as `divide` does, but keep those of one record adjacent and in one split.

    `records` [R, k] identifies the record of each sample. Samples of one record are consecutive.
    """
    is_first = numpy.any(records[1:] != records[:-1], axis=1)
    numbers = numpy.cumsum([0, *is_first])[: len(records)]
    num_records = int(numbers[-1]) + 1 if len(numbers) else 0
    splits = []
    for split in divide(num_records, shares):
        places = numpy.full(num_records, -1)
        places[split] = numpy.arange(len(split))
        members = numpy.flatnonzero(places[numbers] >= 0)
        splits.append(members[numpy.argsort(places[numbers[members]], kind="stable")])
    return splits


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Samples arranged into sequences."""

    samples: Indices
    """The samples of the first sequence, then of the second, ..."""
    bounds: Indices
    """[number of sequences + 1]; start of each sequence in `samples`, and the end of the last one."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def sequence_samples(self, index: int) -> Indices:
        return self.samples[self.bounds[index] : self.bounds[index + 1]]


def pack(samples: Indices, lengths: numpy.typing.NDArray[numpy.integer], capacity: int) -> Packed:
    """Put each sample, in the given order, into the fullest sequence that still has room for it (online best fit).

    `lengths` are those of the samples, each at most `capacity`. Sequences are numbered by their first samples.
    """
    sequences: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit r of this integer is set if some sequence has room for r more tokens. Shifting it right by a sample's length
    # drops the sequences that are too full; the lowest remaining bit is then the one with the least sufficient room.
    rooms = 0
    for sample, length in zip(samples.tolist(), lengths.tolist(), strict=True):
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            number = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
            sequences[number].append(sample)
        else:
            room, number = capacity, len(sequences)
            sequences.append([sample])
        by_room[room - length].append(number)
        rooms |= 1 << (room - length)
    counts = [len(sequence) for sequence in sequences]
    flat = [sample for sequence in sequences for sample in sequence]
    return Packed(samples=numpy.array(flat, dtype=numpy.int64), bounds=numpy.cumsum([0, *counts]))


class FineTuningDataset(torch.utils.data.Dataset[Mapping[str, Any]]):
    """The sequences of a split over all epochs. Each epoch has a different order."""

    def __init__(
        self, samples: Samples, packed: Packed, config: RunConfig, *, num_sequences: int, end_token: int
    ) -> None:
        """
        Args:
            num_sequences: total over all epochs.
            end_token: pads sequences; padding has no loss.
        """
        self._samples, self._packed = samples, packed
        self._num_sequences, self._end_token = num_sequences, end_token
        self._seq_length, self._seed = config.model.seq_length, config.training.seed
        self._has_segments = config.data.reset_attention_mask  # attention between samples is masked
        described = f"{samples.digest} {self._seq_length} {self._seed} {self._has_segments} {end_token}".encode()
        content = packed.samples.tobytes() + packed.bounds.tobytes()
        self.unique_description_hash = hashlib.sha256(described + content).hexdigest()

    def __len__(self) -> int:
        return self._num_sequences

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Return `tokens`, `labels`, `position_ids` int64 [S], `loss_mask` float32 [S], and maybe `segment_ids`.

        A sample of N tokens takes N - 1 positions, which start from 0 in each sample. `segment_ids` int64 [S] number
        the samples, if the model masks attention between them.
        """
        epoch, place = divmod(index, len(self._packed))
        order = Permutation(len(self._packed), f"{self._seed} fine-tuning epoch {epoch}")
        samples = self._packed.sequence_samples(int(order.at(numpy.array([place]))[0]))
        length = self._seq_length
        tokens, labels = (numpy.full(length, self._end_token, dtype=numpy.int64) for _ in range(2))
        position_ids, segment_ids = (numpy.zeros(length, dtype=numpy.int64) for _ in range(2))
        loss_mask = numpy.zeros(length, dtype=numpy.float32)
        start = 0
        for number, sample in enumerate(samples.tolist()):
            first, last = self._samples.bounds[sample : sample + 2].tolist()
            last = min(last, first + length + 1)
            end = start + last - first - 1
            tokens[start:end] = self._samples.ids[first : last - 1]
            labels[start:end] = self._samples.ids[first + 1 : last]
            loss_mask[start:end] = self._samples.learned[first + 1 : last]
            position_ids[start:end] = numpy.arange(end - start)
            segment_ids[start:end] = number
            start = end
        position_ids[start:] = numpy.arange(length - start)
        segment_ids[start:] = len(samples)
        sequence = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}
        return sequence | {"segment_ids": segment_ids} if self._has_segments else sequence


def _prepare(config: RunConfig, tokenizer: Tokenizer) -> tuple[Samples, list[Packed], tuple[str, ...]]:
    """Collective. Tokenize the files, unless an earlier run has, and pack the samples into sequences.

    Returns:
        All samples; the sequences of the training, validation and test split; lines for the run summary.

    Raises:
        ValueError: as `tokenized_samples`; or a record is bad, or a split that is needed has none.
    """
    files = files_of(config)
    samples = tokenized_samples(config, tokenizer, files, check=lambda samples: _members(samples, config, files))
    members, num_omitted = _members(samples, config, files)
    lengths = numpy.minimum(samples.lengths - 1, config.model.seq_length)
    if config.data.sft_packing:
        splits = [pack(split, lengths[split], config.model.seq_length) for split in members]
    else:
        splits = [Packed(samples=split, bounds=numpy.arange(len(split) + 1)) for split in members]
    return samples, splits, _notes(config, samples, splits, num_omitted=num_omitted, files=files)


def _members(samples: Samples, config: RunConfig, files: Files) -> tuple[list[Indices], int]:
    """Return the samples of each split, and the number of omitted samples. Raises ValueError like `_prepare`."""
    if samples.num_bad and not config.data.sft_skip_bad_records:
        raise ValueError(
            f"{samples.describe_bad(files)}. Correct {'it' if samples.num_bad == 1 else 'them'}, or give "
            "--sft-skip-bad-records."
        )
    keeps = _which_fit(samples, config)
    shares = config.data.split_shares
    if config.data.data_path:
        assert shares is not None  # fine-tuning has a default
        members = [split[keeps[split]] for split in divide_by_record(samples.records, shares)]
    else:
        flags = numpy.array([flag for flag, _ in files])[samples.records[:, 0]]
        in_files = [numpy.flatnonzero(keeps & (flags == f"--{name}-data-path")) for name in ("train", "valid", "test")]
        members = [kept[divide(len(kept), (1.0,))[0]] for kept in in_files]  # shuffle, because files are often sorted
    num_omitted = int((~keeps).sum())
    needed = (not config.training.skip_train, config.training.eval_iters > 0, False)
    for name, split, is_needed in zip(("training", "validation", "test"), members, needed, strict=True):
        if is_needed and not len(split):
            where = f"--split {config.data.split}: " if config.data.data_path else ""
            cause = f", and --seq-length is too short for {num_omitted} of {len(samples)}" if num_omitted else ""
            raise ValueError(
                f"{where}the {name} split has no record{cause}. Give it more"
                + (", or --eval-iters 0" * (name != "training"))
                + "."
            )
    return members, num_omitted


def _which_fit(samples: Samples, config: RunConfig) -> Any:
    """Return whether each sample is used, bool [R].

    An answer does not fit if it is longer than a sequence or starts beyond its end. Without --sft-drop-long, a sample
    is used if any part of an answer is inside the sequence.
    """
    length = config.model.seq_length
    keeps = numpy.ones(len(samples), dtype=bool)
    for sample in numpy.flatnonzero(samples.lengths > length + 1).tolist():
        first, last = samples.bounds[sample : sample + 2].tolist()
        learned = numpy.flatnonzero(samples.learned[first:last])
        longest = max(len(run) for run in numpy.split(learned, numpy.flatnonzero(numpy.diff(learned) > 1) + 1))
        begins = bool(longest) and learned[0] <= length
        keeps[sample] = begins and longest <= length if config.data.sft_drop_long else begins
    return keeps


def _notes(
    config: RunConfig, samples: Samples, splits: Sequence[Packed], *, num_omitted: int, files: Files
) -> tuple[str, ...]:
    length = config.model.seq_length
    parts, num_long = [], 0
    for name, split in zip(("training", "validation", "test"), splits, strict=True):
        if len(split):
            lengths = samples.lengths[split.samples]
            share = int(numpy.minimum(lengths - 1, length).sum()) / (len(split) * length)
            parts.append(f"{name} {len(split.samples):,} samples in {len(split):,} sequences, {share:.1%} full")
            num_long += int((lengths > length + 1).sum())
    lines = ["; ".join(parts)]
    if num_long:
        lines.append(f"{num_long:,} samples are longer than --seq-length {length} and were cut at their end")
    if samples.num_bad:
        count = f"{samples.num_bad:,} bad records are" if samples.num_bad > 1 else "1 bad record is"
        lines.append(f"{count} left out: {samples.describe_bad(files)}")
    if num_omitted:
        lines.append(f"{num_omitted:,} samples are omitted, because their answers do not fit")
    return tuple(f"fine-tuning: {line}" for line in lines)


def resolve_epochs(config: RunConfig, tokenizer: Tokenizer, *, global_batch_size: int) -> RunConfig:
    """Collective. Return `config` with --num-epochs converted to --train-iters, rounded up.

    Raises:
        ValueError: as `plan_fine_tuning`.
    """
    epochs, training = config.training.num_epochs, config.training
    if epochs is None or training.skip_train or training.train_iters is not None:
        return config
    _, (train, *_), _ = _prepare(config, tokenizer)
    train_iters = max(1, math.ceil(len(train) * epochs / (global_batch_size * config.groups.replica_groups)))
    decay = config.schedule.lr_decay_iters or train_iters
    return config.replace_section("training", train_iters=train_iters).replace_section("schedule", lr_decay_iters=decay)


def plan_fine_tuning(config: RunConfig, tokenizer: Tokenizer, train_iters: int) -> DataPlan:
    """Collective. Check the data and plan the splits, like `plan_splits`.

    Raises:
        ValueError: as `tokenized_samples`; or a split that is needed has none.
    """
    samples, packed, notes = _prepare(config, tokenizer)
    sizes = num_samples(config, train_iters)
    epoch_samples, num_validation, num_test = map(len, packed)
    if config.bcd.bcd_sample_ratio is not None and not config.training.skip_train:
        sizes = (epoch_samples, *sizes[1:])
        PhaseSubset(num_samples=epoch_samples, ratio=config.bcd.bcd_sample_ratio, seed=config.training.seed)
    if sizes[1] is not None:
        num_validation = sizes[1]
    datasets = [
        FineTuningDataset(samples, split, config, num_sequences=size, end_token=tokenizer.eod)
        if stage_needs_data(config) and size and len(split)
        else None
        for size, split in zip((sizes[0], num_validation, sizes[2]), packed, strict=True)
    ]
    splits = Splits(
        train=datasets[0],
        validation=datasets[1],
        test=datasets[2],
        has_test=num_test > 0 and sizes[2] > 0,
        num_validation=num_validation,
    )
    return DataPlan(epoch_samples=epoch_samples, build=lambda: splits, notes=notes)


@dataclass(frozen=True, kw_only=True)
class RecordCounts:
    """What the records of --dry-run and tools/plan.py --data contain."""

    sequences: int
    num_bad: int
    report: str
    """Places and reasons of the first bad records."""
    text: str


def count_records(
    files: Files,
    tokenizer: Tokenizer,
    *,
    seq_length: int,
    prompt_format: str = "auto",
    ignored: tuple[str, ...] = (),
    is_packed: bool = True,
) -> RecordCounts:
    """Tokenize all files and count, without writing anything. Raises ValueError like `tokenize_files`."""
    samples = collect(tokenize_files(files, tokenizer, prompt_format, ignored))
    lengths, every = numpy.minimum(samples.lengths - 1, seq_length), numpy.arange(len(samples))
    sequences = len(pack(every, lengths, seq_length)) if is_packed else len(samples)
    text = (
        f"{len(numpy.unique(samples.records, axis=0)):,} examples, {int(samples.lengths.sum()):,} tokens in "
        f"{sequences:,} sequences of {seq_length:,}; longest {int(samples.lengths.max(initial=0)):,}, "
        f"{int((samples.lengths > seq_length + 1).sum()):,} longer than a sequence, {samples.num_bad:,} bad"
    )
    return RecordCounts(sequences=sequences, num_bad=samples.num_bad, report=samples.describe_bad(files), text=text)
