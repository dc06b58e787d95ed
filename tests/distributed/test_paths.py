"""Files that a reader opens to follow a flag, a microbatch or a switch: those on the call stack where it arrives."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from support import worlds
from support.dist import World

import megatron.bcd
from megatron.bcd.blocks import partition, stages
from megatron.bcd.config import RunConfig
from megatron.bcd.optim import phase_optimizer
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.pipeline.schedule import PipelineSchedule
from megatron.bcd.training import loop
from megatron.bcd.training.forward_backward import ForwardBackward

ROOT = Path(megatron.bcd.__file__).parent
PATHS = {
    # --bcd-num-blocks: its field, the cut of the model, the weights that get gradients, DDP's buffers for them
    "flag": {
        "config/bcd.py",
        "blocks/stages.py",
        "blocks/partition.py",
        "optim/active_block.py",
        "optim/owned_parameters.py",
        "optim/phase_optimizer.py",
    },
    # to Megatron Core's layers. pipeline/iteration.py holds what the executors of both kinds of plan share
    "microbatch": {
        "training/forward_backward.py",
        "pipeline/schedule.py",
        "pipeline/executor.py",
        "pipeline/iteration.py",
        "model/transformer_block.py",
    },
    # to the phase's buffers and optimizer, and to its pipeline plan
    "switch": {
        "training/loop.py",
        "training/phase.py",
        "optim/active_block.py",
        "optim/phase_optimizer.py",
        "pipeline/schedule.py",
    },
}


def files_above(first: Any) -> set[str]:
    """Files of the package with a frame on the stack, from the function `first` on; none if it is not there."""
    files, frame = set(), sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            files.add(path.relative_to(ROOT).as_posix())
        if frame.f_code is first.__code__:
            return files
        frame = frame.f_back  # type: ignore[assignment]
    return set()


def own_file(function: Any) -> set[str]:
    path = Path(function.__code__.co_filename) if hasattr(function, "__code__") else Path()
    return {path.relative_to(ROOT).as_posix()} if path.is_relative_to(ROOT) else set()


@contextlib.contextmanager
def noting(found: set[str], owner: Any, name: str, *, first: Any) -> Iterator[None]:
    """Inside, each call of the function adds `files_above`, and the function's own file if it is one of the package."""
    original = getattr(owner, name)
    own = own_file(original)

    def noted(*args: Any, **kwargs: Any) -> Any:
        files = files_above(first)
        found.update(files | own if files else ())
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, noted):
        yield


def followed(config: RunConfig) -> dict[str, list[str]]:
    """The files by what is followed: to Megatron Core's layers, and to a phase's buffers, optimizer and plan."""
    found: dict[str, set[str]] = {name: set() for name in PATHS}
    found["flag"].add(Path(inspect.getfile(type(config.bcd))).relative_to(ROOT).as_posix())  # the field
    with contextlib.ExitStack() as stack:
        for owner, name, what, first in (
            (TransformerLayer, "forward", "microbatch", ForwardBackward.__call__),
            (phase_optimizer, "DistributedDataParallel", "switch", loop.train),
            (phase_optimizer, "get_megatron_optimizer", "switch", loop.train),
            (PipelineSchedule, "begin_phase", "switch", loop.train),
            (phase_optimizer, "DistributedDataParallel", "flag", ActiveBlock.build),
            (torch.nn.Parameter, "requires_grad_", "flag", ActiveBlock.build),
            (partition, "_submodels_per_stage", "flag", stages.partition_from_config),
        ):
            stack.enter_context(noting(found[what], owner, name, first=first))
        with worlds.started(config) as one:
            one.run()
    return {name: sorted(files) for name, files in found.items()}


def test_files_on_the_way(world2: World, text_data: str) -> None:
    """A detour through one more file, which a reader has to open, or a number in docs/architecture.md that is old."""
    flags = {"data_path": text_data, "world_size": 2, "pipeline_model_parallel_size": 2, "bcd_layout": "submodel"}
    for found in world2.run(followed, worlds.run_config(**flags, train_iters=3)):
        assert {name: set(files) for name, files in found.items()} == PATHS
