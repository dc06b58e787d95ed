"""Worlds of ranks that each have a GPU, and of ranks that see none."""

from __future__ import annotations

import pytest
import torch

from support.dist import World


class Worlds:
    """By number of ranks, started when they are asked for; `environment` is the ranks' own."""

    def __init__(self, backend: str, **environment: str) -> None:
        self._backend, self._environment, self._worlds = backend, environment, dict[int, World]()

    def __call__(self, size: int) -> World:
        """Skips the test where there are fewer GPUs."""
        if self._backend == "nccl" and size > torch.cuda.device_count():
            pytest.skip(f"needs {size} CUDA GPUs, here are {torch.cuda.device_count()}")
        if size not in self._worlds:
            self._worlds[size] = World(size, backend=self._backend, **self._environment)
        return self._worlds[size]

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()
