"""Worlds of ranks with one GPU each, and of ranks that see no GPU."""

from __future__ import annotations

import pytest
import torch

from support.dist import World


class Worlds:
    """Worlds by number of ranks, started on demand; `environment` is the ranks' environment."""

    def __init__(self, backend: str, **environment: str) -> None:
        self._backend, self._environment, self._worlds = backend, environment, dict[int, World]()

    def __call__(self, size: int) -> World:
        """Return the world of this size. Skips the test if there are fewer GPUs."""
        if self._backend == "nccl" and size > torch.cuda.device_count():
            pytest.skip(f"needs {size} CUDA GPUs, here are {torch.cuda.device_count()}")
        if size not in self._worlds:
            self._worlds[size] = World(size, backend=self._backend, **self._environment)
        return self._worlds[size]

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()
