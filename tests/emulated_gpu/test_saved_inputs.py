"""Inputs that wait in host memory (--bcd-saved-inputs host), with copies as late as possible in both directions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from support import worlds
from support.dist import RankError
from support.gpu_worlds import Worlds

from megatron.bcd.pipeline.saved_inputs import SavedInputs

CHUNKS, MICROBATCHES, STEPS = 3, 2, 2


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


MUTANTS: dict[str, Callable[[SavedInputs], Any]] = {
    "saves before the values are computed": lambda saved: mock.patch.object(
        saved._out._stream, "wait_stream", _nothing
    ),
    "frees what is still leaving": lambda saved: mock.patch.object(saved._out, "wait", _nothing),
    "returns before they are back": lambda saved: mock.patch.object(saved._back, "wait", _nothing),
}


def sums(*, on_host: bool, mutant: str | None = None) -> list[float]:
    """Return the sums of all saved tensors, in the order of a backward pass."""
    with worlds.parallel(worlds.run_config(mock_data=True, split=None)):
        saved = SavedInputs(on_host=on_host)
        places = [(chunk, microbatch) for chunk in range(CHUNKS) for microbatch in range(MICROBATCHES)]
        results = []
        with MUTANTS[mutant](saved) if mutant else contextlib.nullcontext():
            for step in range(STEPS):
                for number, place in enumerate(places):
                    saved.save(place, torch.full((64, 64), step + number / 8, device="cuda") + 1)
                order = places[::-1]
                for place, coming in zip(order, [*order[1:], None], strict=True):
                    tensor = saved.take(place)
                    if coming is not None:
                        saved.prefetch(coming)
                    results.append(tensor.sum())
        return torch.stack(results).tolist()


def test_late_is_the_same(late: Worlds, gpus: Worlds) -> None:
    """Inputs come back from host memory as they were saved, though all copies are late."""
    assert late(1).run(sums, on_host=True) == gpus(1).run(sums, on_host=False)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_fails(late: Worlds, gpus: Worlds, mutant: str) -> None:
    """The late mode reports a race or has other results if one wait is missing."""
    right = gpus(1).run(sums, on_host=False)
    try:
        results = late(1).run(sums, on_host=True, mutant=mutant)
    except RankError as error:
        assert "[emulated] RACE" in str(error)
    else:
        assert results != right
