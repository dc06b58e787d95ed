"""From the flags of supervised fine-tuning to datasets: prepare, check, divide, pack."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
from megatron.core import parallel_state
from rich.console import Console
from rich.progress import Progress

from megatron.bcd.blocks.subsets import PhaseSubset
from megatron.bcd.config import RunConfig
from megatron.bcd.data.lengths import num_samples
from megatron.bcd.data.sft import store
from megatron.bcd.data.sft.dataset import FineTuningDataset
from megatron.bcd.data.sft.packing import Packed, divide, one_each, pack
from megatron.bcd.data.sft.records import name_of, read_records
from megatron.bcd.data.sft.render import Renderer
from megatron.bcd.data.sft.store import Samples
from megatron.bcd.data.sft.tokens import Tokens, tokens_of
from megatron.bcd.data.splits import Splits
from megatron.bcd.runtime import collectives
from megatron.bcd.tokenizer import Tokenizer

_SPLITS = ("train", "valid", "test")
_ROUND_SECONDS = 5.0
"""Between collectives while rank 0 prepares: the other ranks must not wait longer than their timeout."""


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
        ValueError: a file can't be read, a record is none or does not fit, a split that is needed has no sample, or
            the samples can't be kept; one line. Nothing is left on the disk then.
    """
    data = config.data
    per_split = [data.train_data_path, data.valid_data_path, data.test_data_path]
    flags = ["--data-path"] if data.data_path else [f"--{name}-data-path" for name in _SPLITS]
    paths = [data.data_path or ()] if data.data_path else [files or () for files in per_split]
    files = [(flag, path) for flag, of_flag in zip(flags, paths, strict=True) for path in of_flag]
    samples = _samples(config, tokenizer, files)
    keeps = _that_fit(samples, config, files)
    if data.data_path:
        shares = [float(share) for share in str(data.split).strip("'\"").replace("/", ",").split(",")]
        kept = numpy.flatnonzero(keeps)
        members = [kept[indices] for indices in divide(len(kept), shares)]
    else:
        ends = numpy.cumsum([0, *(len(of_flag) for of_flag in paths)])
        numbers = samples.places[:, 0]
        members = [
            numpy.flatnonzero(keeps & (numbers >= a) & (numbers < b)) for a, b in zip(ends, ends[1:], strict=False)
        ]
    _check_splits(config, members)
    lengths = numpy.minimum(samples.lengths - 1, config.model.seq_length)
    train, valid, test = (
        pack(one, lengths[one], config.model.seq_length) if data.sft_packing else one_each(one) for one in members
    )
    splits = (train, valid, test)
    return FineTuningData(samples=samples, splits=splits, notes=_notes(config, samples, splits, keeps))


def _check_splits(config: RunConfig, members: Sequence[Any]) -> None:
    needed = (not config.training.skip_train, config.training.eval_iters > 0, False)
    for name, of_split, is_needed in zip(("training", "validation", "test"), members, needed, strict=True):
        if is_needed and not len(of_split):
            where = f"--split {config.data.split}: " if config.data.data_path else ""
            raise ValueError(
                f"{where}the {name} split has no record; give it more" + (", or --eval-iters 0" * (name != "training"))
            )


def _samples(config: RunConfig, tokenizer: Tokenizer, files: Sequence[tuple[str, str]]) -> Samples:
    for flag, path in files:
        _check_readable(flag, path)
    prompt_format = config.data.sft_prompt_format
    digest = collectives.on_rank_0(lambda: store.digest_of([path for _, path in files], tokenizer, prompt_format))
    beside = os.path.join(os.path.dirname(os.path.abspath(files[0][1])), "cache")
    roots = [config.data.data_cache_path or beside]
    if config.data.data_cache_path is None:  # data are often read-only
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        roots.append(os.path.join(cache, "megatron-bcd"))
    roots = [os.path.join(root, "sft") for root in roots]
    for root in roots:
        if collectives.on_rank_0(lambda: store.open_samples(root, digest) is not None):  # noqa: B023
            return _open_everywhere(root, digest)
    errors = []
    for root in roots:
        try:
            _in_rounds(lambda: _build(root, digest, config, tokenizer, files))  # noqa: B023
            return _open_everywhere(root, digest)
        except OSError as error:
            errors.append(f"{root}: {error.strerror}")
    raise ValueError(
        f"--data-cache-path: the tokenized records can't be written ({', '.join(errors)}); give a folder that can"
    )


def _check_readable(flag: str, path: str) -> None:
    if not os.path.isfile(path):
        what = "is a folder" if os.path.isdir(path) else "does not exist"
        raise ValueError(f"{flag} {path} {what}: with --sft give files of records, .jsonl or .json")


def _open_everywhere(root: str, digest: str) -> Samples:
    found = store.open_samples(root, digest)
    hosts = collectives.gather_objects(None if found is not None else os.uname().nodename)
    blind = sorted({host for host in hosts if host is not None})
    if blind:
        raise ValueError(
            f"--data-cache-path: {', '.join(blind)} can't see the tokenized records in {root}; give a folder on a disk "
            "that all nodes share"
        )
    assert found is not None
    return found


def _in_rounds(start: Callable[[], Iterator[None]]) -> None:
    """Run a generator on rank 0 to its end. A collective every few seconds."""
    steps: list[Iterator[None]] = []

    def go_on() -> bool:
        steps[:] = steps or [start()]
        deadline = time.monotonic() + _ROUND_SECONDS
        return not any(time.monotonic() > deadline for _ in steps[0])

    while not collectives.on_rank_0(go_on):
        pass


def _build(
    root: str, digest: str, config: RunConfig, tokenizer: Tokenizer, files: Sequence[tuple[str, str]]
) -> Iterator[None]:
    """Tokenize into a new folder below `root`, with a progress bar on a terminal."""
    renderer = Renderer(tokenizer, config.data.sft_prompt_format)
    with (
        store.new_folder(root, digest) as folder,
        Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress,
    ):
        yield from store.write(folder, _tokenized(files, renderer, tokenizer, progress))
        written = store.open_samples(root, os.path.basename(folder))
        assert written is not None
        _that_fit(written, config, files)


def _tokenized(
    files: Sequence[tuple[str, str]], renderer: Renderer, tokenizer: Tokenizer, progress: Progress
) -> Iterator[tuple[tuple[int, int, int], Tokens]]:
    for number, (flag, path) in enumerate(files):
        task = progress.add_task(f"tokenizing {os.path.basename(path)}", total=os.path.getsize(path))
        try:
            for place in read_records(path):
                try:
                    samples = tokens_of(place.record, renderer, tokenizer)
                except ValueError as error:
                    raise ValueError(f"{place.name} {error}") from error
                for tokens in samples:
                    yield (number, place.number, int(place.is_line)), tokens
                progress.update(task, completed=place.bytes_read)
        except ValueError as error:
            separator = "" if str(error).startswith(("is ", "can't ")) else ","
            raise ValueError(f"{flag} {path}{separator} {error}") from error


def _that_fit(samples: Samples, config: RunConfig, files: Sequence[tuple[str, str]]) -> Any:
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


def _notes(config: RunConfig, samples: Samples, splits: Sequence[Packed], keeps: Any) -> tuple[str, ...]:
    length = config.model.seq_length
    parts = []
    for name, split in zip(("training", "validation", "test"), splits, strict=True):
        if len(split):
            tokens = int(numpy.minimum(samples.lengths[split.samples] - 1, length).sum())
            share = tokens / (len(split) * length)
            parts.append(f"{name} {len(split.samples):,} samples in {len(split):,} sequences, {share:.1%} full")
    lines = [f"fine-tuning: {'; '.join(parts)}"]
    num_long = int((keeps & (samples.lengths > length + 1)).sum())
    if num_long:
        lines.append(
            f"fine-tuning: {num_long:,} samples are longer than --seq-length {length} and were cut at their end"
        )
    if not keeps.all():
        lines.append(f"fine-tuning: {int((~keeps).sum()):,} samples are left out, their answers do not fit")
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
