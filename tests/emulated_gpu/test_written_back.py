"""Layers that are loaded and written back piece by piece, with copies as late as possible in both directions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import streamed_layers, worlds
from support.dist import RankError
from support.gpu_worlds import Worlds
from torch import distributed

from megatron.bcd.model.frozen_weights import FrozenWeights, _Buffer

CASES: dict[str, dict[str, Any]] = {
    "layers": {},
    "pieces": {"num_layers": 9, "piece_layers": 2},
    "fp32": {"dtype": torch.float32},
    "resident": {"num_resident": 2, "num_frozen": 1},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [1, 2])
def test_late_is_the_same(late: Worlds, gpus: Worlds, size: int, case: str) -> None:
    """A layer that computes before its copy or after the next one's; a write-back that is read before it is done, also
    by another rank, or whose buffer is overwritten."""
    arguments = {"num_layers": 8} | CASES[case]
    on_device = gpus(size).run(streamed_layers.state_at_end, is_on_host=False, **arguments)
    assert late(size).run(streamed_layers.state_at_end, **arguments) == on_device


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _waits_for_nothing(streams: str) -> Callable[[FrozenWeights], Any]:
    """Return a function that lets copies of these streams begin before the work that uses their buffers."""
    return lambda frozen: mock.patch.object(getattr(frozen, streams)._stream, "wait_stream", _nothing)


MUTANTS: dict[str, tuple[int, Callable[[FrozenWeights], Any]]] = {
    "computes before the load": (1, lambda frozen: mock.patch.object(frozen._stream, "wait", _nothing)),
    "loads over a layer that is read": (1, _waits_for_nothing("_stream")),
    "loads over a layer that is written back": (
        1,
        lambda _: mock.patch.object(_Buffer, "written", property(lambda self: None, _nothing), create=True),
    ),
    "writes back before the update": (1, _waits_for_nothing("_back")),
    "finishes no step": (2, lambda frozen: mock.patch.object(frozen, "finish_step", frozen._unfinished.clear)),
    "finishes a step before its copies": (2, lambda frozen: mock.patch.object(frozen._back, "wait", _nothing)),
}


MUTATED = {"num_layers": 8, "num_frozen": 3}
"""The first layers push those that were updated last out of the buffers, so the next step soon loads these again."""


def mutated(mutant: str | None, folder: Path) -> list[list[int]]:
    """Return the state after steps with one wait less. In step 1 rank 1 is ahead of rank 0."""
    with worlds.parallel(worlds.run_config(mock_data=True, split=None)):
        run = streamed_layers.Run(**MUTATED)
        with MUTANTS[mutant][1](run.frozen) if mutant else contextlib.nullcontext():
            run.step(0)
            is_ahead, is_first = folder / "is_ahead", distributed.get_rank() == distributed.get_world_size() - 1
            while not (is_first or is_ahead.exists()):
                time.sleep(0.01)
            inputs = run.forward(1)
            torch.cuda.synchronize()
            is_ahead.touch()
            run.backward(inputs)
            run.step(2)
            return run.state()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_fails(late: Worlds, gpus: Worlds, tmp_path: Path, mutant: str) -> None:
    """The late mode passes although a wait is missing."""
    size = MUTANTS[mutant][0]
    right = gpus(size).run(streamed_layers.state_at_end, is_on_host=False, **MUTATED)
    (tmp_path / "right").mkdir()
    assert late(size).run(mutated, None, tmp_path / "right") == right
    try:
        state = late(size).run(mutated, mutant, tmp_path)
    except RankError as error:
        assert "[emulated] RACE" in str(error)
    else:
        assert state != right
