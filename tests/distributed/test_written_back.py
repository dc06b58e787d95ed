"""Layers in host memory that are loaded, updated and written back piece by piece (`FrozenWeights` in explicit mode)."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from support import streamed_layers, worlds
from support.dist import World

from megatron.bcd.runtime import device

CASES: dict[str, dict[str, Any]] = {
    "layers": {},
    "pieces": {"num_layers": 9, "piece_layers": 2},
    "few": {"num_layers": 2},
    "fp32": {"dtype": torch.float32},
    "resident": {"num_resident": 2},
    "frozen": {"num_frozen": 3},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [1, 2])
def test_equals_layers_on_the_device(world1: World, world2: World, size: int, case: str) -> None:
    """A layer that computes with another one's weights; an update, or its low bits, that is not written back or that a
    later copy overwrites; a buffer with the weights before an update."""
    world, arguments = (world1, world2)[size - 1], {"num_layers": 8} | CASES[case]
    on_device = world.run(streamed_layers.state_at_end, is_on_host=False, **arguments)
    assert world.run(streamed_layers.state_at_end, **arguments) == on_device


def copies(**arguments: Any) -> list[tuple[int, int]]:
    """Return the numbers of layers copied to the device and back after each step."""
    with worlds.parallel(worlds.run_config(mock_data=True, split=None)):
        run, result = streamed_layers.Run(**arguments), [(0, 0)]
        for number in range(3):
            run.step(number)
            result.append((run.frozen.num_copies, run.frozen.num_write_backs))
        return result


@pytest.mark.parametrize(("case", "buffers"), [("layers", 3), ("resident", 5), ("pieces", 6)])
def test_copies_of_a_step(world1: World, case: str, buffers: int) -> None:
    """A layer that is copied twice in a pass, or though it is still in a buffer where the passes turn."""
    arguments = {"num_layers": 8} | CASES[case]
    num_layers = arguments["num_layers"]
    [seen] = world1.run(copies, **arguments)
    first, last = ([b - a for a, b in zip(*pair, strict=True)] for pair in (seen[:2], seen[2:]))
    assert first == [num_layers + num_layers - buffers, num_layers]
    assert last == [2 * (num_layers - buffers), num_layers]


def failures() -> list[str]:
    """Return the errors of copies that fail."""
    with worlds.parallel(worlds.run_config(mock_data=True, split=None)):
        run, errors = streamed_layers.Run(num_layers=4), []
        run.frozen.load([1], with_low_bits=True)
        for act in (functools.partial(run.frozen.write_back, [1]), functools.partial(run.frozen.load, [2])):
            with mock.patch.object(device.CopyStream, "copy", side_effect=RuntimeError("CUDA error")):
                try:
                    act()
                except RuntimeError as error:
                    errors.append(str(error))
        return errors


def test_a_failed_copy_names_the_layer(world1: World) -> None:
    """An error without the layer."""
    [[write_back, load]] = world1.run(failures)
    assert load.endswith("layer 2 can't be copied to the device: CUDA error")
    assert write_back.endswith("layer 1 can't be copied to host memory: CUDA error")
