"""From the flags of supervised fine-tuning to datasets: prepare, check, divide, pack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
from megatron.core import parallel_state

from megatron.bcd.blocks.subsets import PhaseSubset
from megatron.bcd.config import RunConfig
from megatron.bcd.data.lengths import num_samples
from megatron.bcd.data.sft.dataset import FineTuningDataset
from megatron.bcd.data.sft.packing import Indices, Packed, divide, divide_by_record, one_each, pack
from megatron.bcd.data.sft.prepare import Files, tokenized_samples
from megatron.bcd.data.sft.records import name_of
from megatron.bcd.data.sft.store import Samples
from megatron.bcd.data.splits import Splits
from megatron.bcd.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class FineTuningData:
    """Samples of all files, and the sequences of the training, validation and test split; the same on every rank."""

    samples: Samples
    splits: tuple[Packed, Packed, Packed]
    notes: tuple[str, ...]
    """Lines of the banner."""

    def dataset(self, split: int, config: RunConfig, tokenizer: Tokenizer, *, num_sequences: int) -> FineTuningDataset:
        """Of the split with that number, with so many sequences over all its epochs."""
        return FineTuningDataset(
            self.samples,
            self.splits[split],
            num_sequences=num_sequences,
            seq_length=config.model.seq_length,
            end_token=tokenizer.eod,
            seed=config.training.seed,
            has_segments=config.data.reset_attention_mask,
        )


def prepare(config: RunConfig, tokenizer: Tokenizer) -> FineTuningData:
    """Tokenize the files, unless that has been done before, and pack the samples into sequences. A collective.

    Raises:
        ValueError: as `tokenized_samples`; or a sample does not fit, or a split that is needed has none.
    """
    data = config.data
    of_splits = {
        "--train-data-path": data.train_data_path,
        "--valid-data-path": data.valid_data_path,
        "--test-data-path": data.test_data_path,
    }
    paths = {"--data-path": data.data_path} if data.data_path else of_splits
    files = [(flag, path) for flag, of_flag in paths.items() for path in of_flag or ()]
    samples = tokenized_samples(config, tokenizer, files, check=lambda made: _members(made, config, files))
    members, num_left_out = _members(samples, config, files)
    lengths = numpy.minimum(samples.lengths - 1, config.model.seq_length)
    train, valid, test = (
        pack(one, lengths[one], config.model.seq_length) if data.sft_packing else one_each(one) for one in members
    )
    splits = (train, valid, test)
    return FineTuningData(samples=samples, splits=splits, notes=_notes(config, samples, splits, num_left_out))


def _members(samples: Samples, config: RunConfig, files: Files) -> tuple[list[Indices], int]:
    """Samples of each split, and the number of those that are left out. Raises ValueError as `prepare`."""
    keeps = _that_fit(samples, config, files)
    if config.data.data_path:
        shares = [float(share) for share in str(config.data.split).strip("'\"").replace("/", ",").split(",")]
        members = [of_split[keeps[of_split]] for of_split in divide_by_record(samples.places[:, :2], shares)]
    else:
        flags = numpy.array([flag for flag, _ in files])[samples.places[:, 0]]
        in_files = [numpy.flatnonzero(keeps & (flags == f"--{name}-data-path")) for name in ("train", "valid", "test")]
        members = [kept[divide(len(kept), (1.0,))[0]] for kept in in_files]  # files are often sorted
    _check_splits(config, members)
    return members, int((~keeps).sum())


def _check_splits(config: RunConfig, members: Sequence[Any]) -> None:
    needed = (not config.training.skip_train, config.training.eval_iters > 0, False)
    for name, of_split, is_needed in zip(("training", "validation", "test"), members, needed, strict=True):
        if is_needed and not len(of_split):
            where = f"--split {config.data.split}: " if config.data.data_path else ""
            raise ValueError(
                f"{where}the {name} split has no record; give it more" + (", or --eval-iters 0" * (name != "training"))
            )


def _that_fit(samples: Samples, config: RunConfig, files: Files) -> Any:
    """Whether each sample can be learned from, bool [R]. An answer that is longer than a sequence can't, nor one that
    begins behind its end.

    Raises:
        ValueError: one can't, and --sft-drop-long does not say to leave it out.
    """
    length = config.model.seq_length
    keeps = numpy.ones(len(samples), dtype=bool)
    for sample in numpy.flatnonzero(samples.lengths > length + 1).tolist():
        first, last = samples.bounds[sample : sample + 2].tolist()
        learned = numpy.flatnonzero(samples.learned[first:last])
        longest = max(len(run) for run in numpy.split(learned, numpy.flatnonzero(numpy.diff(learned) > 1) + 1))
        keeps[sample] = longest and longest <= length and learned[0] <= length
        if keeps[sample] or config.data.sft_drop_long:
            continue
        number, place, is_line = samples.places[sample].tolist()
        flag, path = files[number]
        before = int(learned[0]) if longest else last - first
        what = (
            f"has an answer of {longest:,} tokens, longer than --seq-length {length}"
            if longest > length
            else f"has a prompt of {before:,} tokens, which leaves none of --seq-length {length} to its answer"
        )
        raise ValueError(
            f"{flag} {path}, {name_of(place, is_line=bool(is_line))} {what}: give longer sequences, or --sft-drop-long"
        )
    return keeps


def _notes(config: RunConfig, samples: Samples, splits: Sequence[Packed], num_left_out: int) -> tuple[str, ...]:
    length = config.model.seq_length
    parts = []
    for name, split in zip(("training", "validation", "test"), splits, strict=True):
        if len(split):
            tokens = int(numpy.minimum(samples.lengths[split.samples] - 1, length).sum())
            share = tokens / (len(split) * length)
            parts.append(f"{name} {len(split.samples):,} samples in {len(split):,} sequences, {share:.1%} full")
    lines = [f"fine-tuning: {'; '.join(parts)}"]
    num_long = sum(int((samples.lengths[split.samples] > length + 1).sum()) for split in splits)
    if num_long:
        lines.append(
            f"fine-tuning: {num_long:,} samples are longer than --seq-length {length} and were cut at their end"
        )
    if num_left_out:
        lines.append(f"fine-tuning: {num_left_out:,} samples are left out, their answers do not fit")
    return tuple(lines)


def with_epochs(config: RunConfig, tokenizer: Tokenizer, *, global_batch_size: int) -> RunConfig:
    """`config` with --num-epochs as --train-iters, rounded up. A collective. Raises ValueError as `prepare`."""
    epochs, training = config.training.num_epochs, config.training
    if epochs is None or training.skip_train or training.train_iters is not None:
        return config
    sequences = len(prepare(config, tokenizer).splits[0])
    train_iters = max(1, math.ceil(sequences * epochs / global_batch_size))
    decay = config.schedule.lr_decay_iters or train_iters
    return replace(
        config,
        training=replace(training, train_iters=train_iters),
        schedule=replace(config.schedule, lr_decay_iters=decay),
    )


@dataclass(frozen=True, kw_only=True)
class FineTuningPlan:
    """The datasets of a run; see `SplitPlan` for those of pretraining."""

    splits: Splits
    epoch_samples: int
    """Sequences of one epoch of the training split."""
    notes: tuple[str, ...]
    """As `FineTuningData.notes`."""


def plan_fine_tuning(
    config: RunConfig, tokenizer: Tokenizer, train_iters: int, *, least_steps_per_cycle: int
) -> FineTuningPlan:
    """As `plan_splits` and `build_splits`. A collective. Raises ValueError as `prepare`."""
    prepared = prepare(config, tokenizer)
    sizes = num_samples(config, train_iters, least_steps_per_cycle=least_steps_per_cycle)
    epoch_samples, num_validation, num_test = (len(split) for split in prepared.splits)
    if config.bcd.bcd_sample_ratio is not None and not config.training.skip_train:
        sizes = (epoch_samples, *sizes[1:])
        PhaseSubset(num_samples=epoch_samples, ratio=config.bcd.bcd_sample_ratio, seed=config.training.seed)
    if sizes[1] is not None:
        num_validation = sizes[1]
    has_data = (
        parallel_state.is_pipeline_first_stage()
        or parallel_state.is_pipeline_last_stage()
        or config.data.reset_attention_mask
    )
    datasets = [
        prepared.dataset(number, config, tokenizer, num_sequences=size) if has_data and size and len(split) else None
        for number, (size, split) in enumerate(zip((sizes[0], num_validation, sizes[2]), prepared.splits, strict=True))
    ]
    splits = Splits(
        train=datasets[0],
        validation=datasets[1],
        test=datasets[2],
        has_test=num_test > 0 and sizes[2] > 0,
        num_validation=num_validation,
    )
    return FineTuningPlan(splits=splits, epoch_samples=epoch_samples, notes=prepared.notes)
