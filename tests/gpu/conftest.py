"""How many GPUs this machine has."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def num_gpus() -> int:
    """GPUs here; skips the test where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return torch.cuda.device_count()
