"""Layers that are loaded and written back chunk by chunk, and inputs that wait in host memory (--bcd-saved-inputs
host), with copies as late as possible in both directions."""

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

from megatron.bcd.model.host_layers import HostLayers, _Buffer, _Layer
from megatron.bcd.pipeline.saved_tensors import SavedTensors

CASES: dict[str, dict[str, Any]] = {
    "layers": {},
    "chunks": {"num_layers": 9, "chunk_layers": 2},
    "fp32": {"dtype": torch.float32},
    "resident": {"num_resident": 2, "num_frozen": 1},
    "kept": {"num_frozen": 3, "keeps": True},
    "kept in buffers": {"num_layers": 3, "keeps": True},
}


@pytest.mark.parametrize("case", CASES)
def test_late_is_the_same(late: Worlds, gpus: Worlds, case: str) -> None:
    """Layers that are loaded and written back late have the state of layers on the device, bit for bit."""
    arguments = {"num_layers": 8} | CASES[case]
    on_device = gpus(2).run(streamed_layers.state_at_end, is_on_host=False, **arguments)
    assert late(2).run(streamed_layers.state_at_end, **arguments) == on_device


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _waits_for_nothing(streams: str) -> Callable[[HostLayers], Any]:
    """Return a function that lets copies of these streams begin before the work that uses their buffers."""
    return lambda frozen: mock.patch.object(getattr(frozen, streams)._stream, "wait_stream", _nothing)


def _without_waits_for_write_backs(frozen: HostLayers) -> Any:
    """Let kernels begin before write-backs are done."""
    return mock.patch.object(frozen._back, "wait", _nothing)


def _without_event_of_state(frozen: HostLayers) -> Any:
    """Let a step wait for the weights of a layer only."""
    copy = frozen._copy

    def copy_unnoticed(layer: _Layer, source: torch.Tensor, *, to: torch.Tensor, buffer: _Buffer) -> None:
        before = buffer.copied
        copy(layer, source, to=to, buffer=buffer)
        if source is not layer.on_host:
            buffer.copied = before

    return mock.patch.object(frozen, "_copy", copy_unnoticed)


def _without(kind: type, name: str) -> Callable[[HostLayers], Any]:
    """Return a function that makes copies wait for no event of this name."""
    return lambda _: mock.patch.object(kind, name, property(lambda self: None, _nothing), create=True)


MUTATED = {"num_layers": 8, "num_frozen": 3}
"""The first layers push those that were updated last out of the buffers, so the next step soon loads these again."""
KEPT = MUTATED | {"keeps": True}
ALL_STAY = {"num_layers": 3}
ONE_STAYS = {"num_layers": 6, "num_frozen": 3, "num_resident": 1}
"""Layers that are still in buffers at their next update: no copy to the device orders it behind their write-back."""
MUTANTS: dict[str, tuple[int, dict[str, Any], Callable[[HostLayers], Any]]] = {
    "computes before the load": (1, MUTATED, lambda frozen: mock.patch.object(frozen._stream, "wait", _nothing)),
    "loads over a layer that is read": (1, MUTATED, _waits_for_nothing("_stream")),
    "loads over a layer that is written back": (1, MUTATED, _without(_Buffer, "written")),
    "writes back before the update": (1, MUTATED, _waits_for_nothing("_back")),
    "updates layers that are written back": (1, ALL_STAY, _without_waits_for_write_backs),
    "updates one that is written back": (1, ONE_STAYS, _without_waits_for_write_backs),
    "steps before the state is loaded": (1, MUTATED, _without_event_of_state),
    "keeps a gradient before it is computed": (1, KEPT, _waits_for_nothing("_back")),
    "loads a gradient before it is kept": (1, KEPT, _without(_Layer, "kept")),
    "steps before the gradient is loaded": (1, KEPT, _without_event_of_state),
    "finishes no step": (2, MUTATED, lambda frozen: mock.patch.object(frozen, "finish_step", frozen._unfinished.clear)),
    "finishes a step before its copies": (2, MUTATED, _without_waits_for_write_backs),
}


def mutated(mutant: str | None, folder: Path, **arguments: Any) -> list[list[int]]:
    """Return the state after steps with one wait less. In step 1 rank 1 is ahead of rank 0."""
    with worlds.parallel(worlds.run_config(mock_data=True, split=None)):
        run = streamed_layers.Run(**arguments)
        with MUTANTS[mutant][2](run.frozen) if mutant else contextlib.nullcontext():
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
    """The late mode reports a race or has other results if one wait is missing."""
    size, arguments, _ = MUTANTS[mutant]
    right = gpus(size).run(streamed_layers.state_at_end, is_on_host=False, **arguments)
    (tmp_path / "right").mkdir()
    assert late(size).run(mutated, None, tmp_path / "right", **arguments) == right
    try:
        state = late(size).run(mutated, mutant, tmp_path, **arguments)
    except RankError as error:
        assert "[emulated] RACE" in str(error)
    else:
        assert state != right


CHUNKS, MICROBATCHES, STEPS = 3, 2, 2


INPUT_MUTANTS: dict[str, Callable[[SavedTensors], Any]] = {
    "saves before the values are computed": lambda saved: mock.patch.object(
        saved._out._stream, "wait_stream", _nothing
    ),
    "frees what is still leaving": lambda saved: mock.patch.object(saved._out, "wait", _nothing),
    "returns before they are back": lambda saved: mock.patch.object(saved._back, "wait", _nothing),
}


def sums(*, on_host: bool, mutant: str | None = None) -> list[float]:
    """Return the sums of all saved tensors, in the order of a backward pass."""
    with worlds.parallel(worlds.run_config(mock_data=True, split=None)):
        saved, stays = SavedTensors(), dict[Any, Any]()
        places = [(chunk, microbatch) for chunk in range(CHUNKS) for microbatch in range(MICROBATCHES)]
        results = []
        with INPUT_MUTANTS[mutant](saved) if mutant else contextlib.nullcontext():
            for step in range(STEPS):
                for number, place in enumerate(places):
                    stays[place] = torch.full((64, 64), step + number / 8, device="cuda") + 1
                    if on_host:
                        stays[place] = saved.pack(place, (), stays[place])
                        saved.save(place)
                order = places[::-1]
                for place, coming in zip(order, [*order[1:], order[0]], strict=True):
                    if on_host:
                        saved.load(place)
                        saved.prefetch(coming)
                        results.append(stays[place]().sum())
                        saved.drop(place)
                    else:
                        results.append(stays[place].sum())
        return torch.stack(results).tolist()


def test_late_inputs_are_the_same(late: Worlds, gpus: Worlds) -> None:
    """Inputs come back from host memory as they were saved, though all copies are late."""
    assert late(1).run(sums, on_host=True) == gpus(1).run(sums, on_host=False)


@pytest.mark.parametrize("mutant", INPUT_MUTANTS)
def test_a_mutant_of_saved_inputs_fails(late: Worlds, gpus: Worlds, mutant: str) -> None:
    """The late mode reports a race or has other results if one wait is missing."""
    right = gpus(1).run(sums, on_host=False)
    try:
        results = late(1).run(sums, on_host=True, mutant=mutant)
    except RankError as error:
        assert "[emulated] RACE" in str(error)
    else:
        assert results != right
