"""Worlds of one, two and four ranks that live for the session, and weights that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support import worlds
from support.dist import World


def _world(size: int) -> Iterator[World]:
    world = World(size)
    yield world
    world.close()


@pytest.fixture(scope="session")
def world1() -> Iterator[World]:
    """One rank in a separate process: the reference for the others."""
    yield from _world(1)


@pytest.fixture(scope="session")
def world2() -> Iterator[World]:
    """Two ranks."""
    yield from _world(2)


@pytest.fixture(scope="session")
def world4() -> Iterator[World]:
    """Four ranks."""
    yield from _world(4)


@pytest.fixture(scope="session")
def initial_weights(
    world1: World, text_data: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, object]]:
    """Flags that give every parallel layout the same initial weights, drawn once on one rank.

    Megatron Core seeds each stage and tensor slice differently, so runs that draw their weights differ from the start.
    """
    folders: dict[str, str] = {}

    def flags(**network: object) -> dict[str, object]:
        key = repr(sorted(network.items()))
        if key not in folders:
            folder = str(tmp_path_factory.mktemp("weights"))
            world1.run(worlds.save_initial_weights, worlds.run_config(data_path=text_data, **network), folder)
            folders[key] = folder
        return {"load": folders[key], "finetune": True, "data_path": text_data, **network}

    return flags
