"""Rules of the batch, the length of the run, the learning rate, the data, and the files that are written."""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.bcd.arguments.rules import Run, flag_name, refuse_unless
from megatron.bcd.huggingface.folder import CONFIG, RUN


def check_batch(run: Run, world_size: int) -> None:
    model_ranks = run.tensor_model_parallel_size * run.pipeline_model_parallel_size * run.context_parallel_size
    ranks = world_size // model_ranks
    micro, total = run.micro_batch_size, run.global_batch_size
    step = micro * ranks
    product = f"--micro-batch-size {micro} x data parallel size {ranks}"
    refuse_unless(
        total % step == 0,
        f"--global-batch-size {total} is not divisible by {product}: give a multiple of {step}",
    )
    if run.rampup_batch_size is None:
        return
    start, increment, samples = run.rampup_batch_size
    name = f"--rampup-batch-size {start} {increment} {samples}"
    refuse_unless(
        start > 0 and increment > 0 and samples >= 0,
        f"{name}: start and increment must be greater than 0, samples at least 0",
    )
    refuse_unless(
        start % step == 0 and increment % step == 0,
        f"{name}: start and increment must be divisible by {product}, so by {step}",
    )
    refuse_unless(
        start <= total and (total - start) % increment == 0,
        f"{name}: whole increments must lead from {start} to --global-batch-size {total}",
    )


def check_length(run: Run, given: Mapping[str, Any]) -> None:
    refuse_unless(
        run.train_iters is None or run.train_samples is None,
        "--train-iters and --train-samples are both given: give one of them",
    )
    if run.train_iters is None and run.train_samples is None and run.num_epochs is None:
        return
    length, other = ("--train-iters", "samples") if run.train_samples is None else ("--train-samples", "iters")
    length = length if run.num_epochs is None else "--num-epochs"
    unit = "iters" if other == "samples" else "samples"
    for field in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        refuse_unless(
            not given.get(f"{field}_{other}"),
            f"{flag_name(f'{field}_{other}')} does not go with {length}: give {flag_name(f'{field}_{unit}')}",
        )


def check_evaluation(run: Run) -> None:
    """Rules of --full-validation."""
    if not run.full_validation:
        return
    refuse_unless(not run.mock_data, "--eval-iters -1 does not go with --mock-data, which has no end")
    for field in ("data_path", "valid_data_path"):
        refuse_unless(
            not _is_weighted(getattr(run, field)),
            f"--full-validation: {flag_name(field)} has weights, which choose samples without end; give datasets "
            "without weights, those of the validation with --valid-data-path",
        )


def check_learning_rate(run: Run, given: Mapping[str, Any]) -> None:
    for low, high in (("min_lr", "lr"), ("lr_warmup_init", "lr"), ("decoupled_min_lr", "decoupled_lr")):
        low_value, high_value = getattr(run, low), getattr(run, high)
        refuse_unless(
            low_value is None or high_value is None or low_value <= high_value,
            f"{flag_name(low)} {low_value}: must be at most {flag_name(high)} {high_value}",
        )
    unit = "iters" if run.train_samples is None else "samples"
    warmup, decay = getattr(run, f"lr_warmup_{unit}"), getattr(run, f"lr_decay_{unit}")
    if run.lr_warmup_fraction is not None:
        refuse_unless(not warmup, f"--lr-warmup-fraction and --lr-warmup-{unit} are both given: give one of them")
    if decay is None:
        return
    whole = f"--lr-decay-{unit}" if f"lr_decay_{unit}" in given else f"--train-{unit}"
    refuse_unless(
        warmup < decay,
        f"--lr-warmup-{unit} {warmup}: must be less than the length of the decay, {whole} {decay}",
    )
    if run.lr_decay_style == "WSD":
        last = getattr(run, f"lr_wsd_decay_{unit}")
        refuse_unless(last is not None, f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}")
        refuse_unless(
            last <= decay - warmup,
            f"--lr-wsd-decay-{unit} {last}: must be at most {decay - warmup}, "
            f"what the warm-up leaves of {whole} {decay}",
        )


def check_weight_decay(run: Run, given: Mapping[str, Any]) -> None:
    ends = [name for name in ("start_weight_decay", "end_weight_decay") if name in given]
    if run.weight_decay_incr_style == "constant":
        refuse_unless(
            not ends,
            f"{flag_name(ends[0]) if ends else ''} needs --weight-decay-incr-style linear or cosine; "
            "a constant one is --weight-decay",
        )
        return
    refuse_unless(
        len(ends) == 2,
        f"--weight-decay-incr-style {run.weight_decay_incr_style} needs --start-weight-decay and --end-weight-decay",
    )
    start, end = run.start_weight_decay, run.end_weight_decay
    refuse_unless(
        start <= end,
        f"--start-weight-decay {start} is larger than --end-weight-decay {end}: must be at most that",
    )


def check_data(run: Run) -> None:
    per_split = [
        flag_name(name) for name in ("train_data_path", "valid_data_path", "test_data_path") if getattr(run, name)
    ]
    sources = ["--mock-data"] * run.mock_data + ["--data-path"] * bool(run.data_path) + per_split[:1]
    refuse_unless(len(sources) < 2, f"{' and '.join(sources)} are both given: give one of them")
    if run.split is not None:
        refuse_unless(run.data_path or run.data_args_path or run.mock_data, f"--split {run.split} needs --data-path")
        _check_split(run.split)
    refuse_unless(
        run.dataloader_type == "single" or run.bcd_sample_ratio is None,
        "--dataloader-type cyclic does not go with --bcd-sample-ratio: each phase draws samples of its own; leave "
        "one of them out",
    )
    for field in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        _check_blend(flag_name(field), getattr(run, field))


def _check_split(split: str) -> None:
    try:
        shares = [float(share) for share in re.split(r"[,/]", split.strip("'\""))]
    except ValueError:
        shares = []
    refuse_unless(
        len(shares) == 3 and all(0 <= share < math.inf for share in shares) and sum(shares) > 0,
        f"--split {split!r}: must be three numbers of at least 0, not all of them 0: the shares of training, "
        "validation and test, e.g. 95,5,0",
    )


def _check_blend(flag: str, words: tuple[str, ...] | None) -> None:
    """Megatron's two forms: prefixes alone, or weight prefix weight prefix ..."""
    weights = _are_weights(words)
    if not words or not weights:
        return
    for word in words[::2]:
        refuse_unless(
            not _is_not_finite(word),
            f"{flag} {' '.join(words)}: {word} would be a weight, and a weight is a finite number; where it is the "
            f"name of a file, give ./{word}",
        )
    refuse_unless(
        all(weights) or not any(weights),
        f"{flag} {' '.join(words)}: give a weight before every prefix, or before none",
    )
    refuse_unless(
        not all(weights) or all(float(word) > 0 for word in words[::2]),
        f"{flag} {' '.join(words)}: every weight must be greater than 0; leave a prefix out instead",
    )


def _are_weights(words: tuple[str, ...] | None) -> list[bool]:
    """Of every other word whether it is a number; none for an odd number of words, which are all prefixes."""
    if not words or len(words) % 2:
        return []
    return [_is_number(word) for word in words[::2]]


def _is_number(word: str) -> bool:
    """As Megatron Core reads a weight."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def _is_not_finite(word: str) -> bool:
    return _is_number(word) and not math.isfinite(float(word))


def _is_weighted(words: tuple[str, ...] | None) -> bool:
    return any(_are_weights(words))


def check_checkpoints(run: Run) -> None:
    retained, interval = run.save_retain_interval, run.save_interval
    refuse_unless(
        retained is None or (interval is not None and retained % interval == 0),
        f"--save-retain-interval {retained}: must be a multiple of --save-interval {interval or '(not given)'}",
    )
    refuse_unless(
        run.save_hf is None or run.save is None or Path(run.save_hf).resolve() != Path(run.save).resolve(),
        f"--save-hf {run.save_hf} is the folder of --save: give another one",
    )
    refuse_unless(
        run.save is None or not any((Path(run.save) / name).exists() for name in (CONFIG, RUN)),
        f"--save {run.save} holds a model in Hugging Face's format: give another folder",
    )
    refuse_unless(
        not (run.save_hf and run.skip_train),
        "--save-hf writes what was trained, and --skip-train trains nothing: leave one of them out "
        "(tools/convert_checkpoint.py converts a checkpoint)",
    )
    refuse_unless(
        run.load is None or not Path(run.load).exists() or Path(run.load).is_dir(),
        f"--load {run.load} is a file: give a folder",
    )


def check_report(run: Run) -> None:
    if not run.profile:
        return
    refuse_unless(
        not run.use_pytorch_profiler or run.tensorboard_dir,
        "--use-pytorch-profiler needs --tensorboard-dir: its trace is written there",
    )
    refuse_unless(
        run.profile_step_end > run.profile_step_start,
        f"--profile-step-end {run.profile_step_end}: must be more than --profile-step-start {run.profile_step_start}",
    )


def check_outputs(run: Run) -> None:
    for field in ("save", "save_hf", "tensorboard_dir", "wandb_save_dir"):
        folder = getattr(run, field)
        if folder is not None:
            _check_can_write(flag_name(field), folder, Path(folder).absolute())
    if run.metrics_file is not None:
        file = Path(run.metrics_file).absolute()
        refuse_unless(not file.is_dir(), f"--metrics-file {run.metrics_file} is a folder: give a file")
        refuse_unless(
            not file.exists() or os.access(file, os.W_OK),
            f"--metrics-file {run.metrics_file} can't be written: give a file that can",
        )
        _check_can_write("--metrics-file", run.metrics_file, file.parent)
    # data workers send samples through sockets below it, as pymp-XXXXXXXX/listener-XXXXXXXX
    folder = tempfile.gettempdir()
    refuse_unless(
        not run.num_workers or len(os.fsencode(folder)) <= _LONGEST_TEMPORARY_FOLDER,
        f"TMPDIR {folder} is too long for the sockets of --num-workers {run.num_workers}: give a folder with at most "
        f"{_LONGEST_TEMPORARY_FOLDER} characters, or --num-workers 0",
    )


_LONGEST_TEMPORARY_FOLDER = 107 - len("/pymp-XXXXXXXX/listener-XXXXXXXX")
"""A socket's path has at most 107 characters."""


def _check_can_write(flag: str, asked: str, folder: Path) -> None:
    """Create and remove a file in the folder, or in its nearest existing parent.

    Root passes every permission check, and a read-only mount shows only when something is written.
    """
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        refuse_unless(folder.is_dir(), f"{flag} {asked} can't be written: {folder} is a file, not a folder")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{flag} {asked} can't be written ({error.strerror}: {folder}): give a folder that can"
        ) from error
