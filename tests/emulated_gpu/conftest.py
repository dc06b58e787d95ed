"""These tests run on emulated GPUs only: bash tests/emulated_gpu.sh."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.gpu_worlds import Worlds

collect_ignore_glob = [] if "BCD_EMULATED_GPU" in os.environ else ["test_*.py"]


@pytest.fixture(scope="module")
def late() -> Iterator[Worlds]:
    """Worlds of GPUs that do everything as late as possible."""
    worlds = Worlds("nccl", EMU_LATE="1")
    yield worlds
    worlds.close()
