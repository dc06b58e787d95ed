"""Runs of the training script on this machine's GPUs. BCD_GPU_TESTS_ON_CPU=1 tries the tests themselves on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from _self_test import FLAGS, Runner

ON_CPU = "BCD_GPU_TESTS_ON_CPU"


@pytest.fixture(scope="session")
def num_gpus() -> int:
    """GPUs here, at least one; two made-up ones with BCD_GPU_TESTS_ON_CPU."""
    if os.environ.get(ON_CPU):
        return 2
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return torch.cuda.device_count()


@pytest.fixture(scope="session")
def runners(num_gpus: int, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Runner]:
    """A runner on so many GPUs, or a skip. All start from the weights that a CPU draws."""
    folder = tmp_path_factory.mktemp("gpu")
    on_gpu = not os.environ.get(ON_CPU)
    prepared: list[Runner] = []

    def runner(num_ranks: int) -> Runner:
        if num_ranks > num_gpus:
            pytest.skip(f"needs {num_ranks} CUDA GPUs, here are {num_gpus}")
        one = Runner(folder=folder, num_ranks=num_ranks, on_gpu=on_gpu, flags=FLAGS)
        if not prepared:
            one.prepare()
            prepared.append(one)
        return one

    return runner
