"""Weights in and out, in Megatron Core's distributed checkpoint format, independent of the parallel layout.

A checkpoint is a folder ``iter_0000007`` below --save, written aside and renamed when complete;
``latest_checkpointed_iteration.txt`` names the newest and moves last. Only the weights are kept yet: phase, optimizer
state and data position are not, so a run can start from a checkpoint (--load --finetune) but not go on with it.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron.bcd.active_set import ActiveSet
from megatron.bcd.config import RunConfig
from megatron.bcd.models import gpt_of
from megatron.bcd.report import Reporter

TRACKER = "latest_checkpointed_iteration.txt"


def latest_iteration(folder: str) -> int | None:
    """Iteration of the newest checkpoint below `folder`; None where there is none.

    Raises:
        ValueError: the tracker file is damaged, or names a checkpoint that is not there.
    """
    tracker = os.path.join(folder, TRACKER)
    if not os.path.isfile(tracker):
        return None
    with open(tracker, encoding="utf-8", errors="backslashreplace") as file:
        text = file.read().strip()
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"--load {folder}: {TRACKER} holds {text[:40]!r}, and should hold an iteration number")
    if not os.path.isdir(iteration_folder(folder, int(text))):
        raise ValueError(
            f"--load {folder}: {TRACKER} names iteration {text}, and {iteration_folder(folder, int(text))} does not "
            "exist"
        )
    return int(text)


def iteration_folder(folder: str, iteration: int) -> str:
    return os.path.join(folder, f"iter_{iteration:07d}")


def load_weights_if_asked(config: RunConfig, model: torch.nn.Module, reporter: Reporter) -> None:
    """With --load: take the newest checkpoint's weights; an empty or absent folder starts afresh and says so.

    Raises:
        ValueError: the checkpoint is unreadable or of another model, or --finetune is missing.
    """
    folder = config.checkpoint.load
    if folder is None:
        return
    iteration = latest_iteration(folder)
    if iteration is None:
        reporter.note(f"--load {folder} holds no checkpoint ({TRACKER} is absent): starting from random weights")
        return
    if not (config.checkpoint.finetune or config.training.skip_train):
        raise ValueError(
            f"--load {folder}: a checkpoint's iteration, phase and optimizer state can't be taken up yet; add "
            "--finetune to start at iteration 0 with its weights"
        )
    gpt = gpt_of(model)
    sharded = gpt.sharded_state_dict()
    path = iteration_folder(folder, iteration)
    _check_same_model(sharded, path, folder)
    try:
        gpt.load_state_dict(dist_checkpointing.load({"model": sharded}, path)["model"], strict=True)
    except (Exception, CheckpointException) as error:  # the readers below raise many kinds
        raise _unreadable(folder, path, error) from error
    reporter.note(f"weights of {iteration_folder(folder, iteration)} loaded")


def _check_same_model(sharded: dict[str, Any], path: str, folder: str) -> None:
    """Compare names and whole shapes of this rank's weights with what the checkpoint says it holds, reading no weight.

    Raises:
        ValueError: one is absent or of another shape, or the checkpoint can't be read.
    """
    try:
        saved = dist_checkpointing.load_tensors_metadata(path)
    except (Exception, CheckpointException) as error:
        raise _unreadable(folder, path, error) from error
    for tensor in sharded.values():
        if not isinstance(tensor, ShardedTensor):
            continue
        there, here = saved.get(tensor.key), list(tensor.global_shape)
        if there is None:
            found = "is not in it"
        elif list(there.global_shape) == here or tensor.allow_shape_mismatch:  # the padded vocabulary may differ
            continue
        else:
            found = f"is {list(there.global_shape)} in it"
        raise ValueError(
            f"--load {folder}: {path} is of another model: {tensor.key} {found} and {here} here; give the flags of the "
            "run that saved it"
        )


def _unreadable(folder: str, path: str, error: BaseException) -> ValueError:
    if isinstance(error, CheckpointException) and error.failures:  # its own text is every rank's traceback
        error = next(iter(error.failures.values()))[0]
    reason = " ".join([type(error).__name__, *str(error).split()])[:200]
    return ValueError(f"--load {folder}: {path} can't be read ({reason}); give a checkpoint that is complete")


def is_due(config: RunConfig, *, iteration: int, is_last: bool) -> bool:
    """Whether a checkpoint is written after `iteration`: every --save-interval steps and at the end."""
    interval = config.checkpoint.save_interval
    return config.checkpoint.save is not None and (is_last or bool(interval and iteration % interval == 0))


def save_if_due(
    config: RunConfig, model: torch.nn.Module, active: ActiveSet, *, iteration: int, is_last: bool, reporter: Reporter
) -> None:
    """With --save: write the weights where `is_due`. A collective."""
    if not is_due(config, iteration=iteration, is_last=is_last):
        return
    assert config.checkpoint.save is not None
    active.pause_parameter_gather()
    save_weights(model, config.checkpoint.save, iteration=iteration)
    active.resume_parameter_gather()
    reporter.note(f"weights saved to {iteration_folder(config.checkpoint.save, iteration)}")


def save_weights(model: torch.nn.Module, folder: str, *, iteration: int) -> None:
    """Write the weights as checkpoint `iteration` below `folder`, replacing one of the same number."""
    target = iteration_folder(folder, iteration)
    aside = target + ".incomplete"
    is_first = torch.distributed.get_rank() == 0
    if is_first:
        shutil.rmtree(aside, ignore_errors=True)
        os.makedirs(aside)
    torch.distributed.barrier()
    state: dict[str, Any] = {
        "model": gpt_of(model).sharded_state_dict(),
        "iteration": iteration,
        "checkpoint_version": 3.0,
    }
    dist_checkpointing.save(state, aside)
    torch.distributed.barrier()
    if is_first:
        shutil.rmtree(target, ignore_errors=True)
        os.rename(aside, target)
        with open(os.path.join(folder, TRACKER + ".new"), "w") as file:
            file.write(str(iteration))
        os.replace(file.name, os.path.join(folder, TRACKER))
    torch.distributed.barrier()
