"""The number of GPUs of this machine."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def num_gpus() -> int:
    """Number of GPUs; skips the test if there is none."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return torch.cuda.device_count()
