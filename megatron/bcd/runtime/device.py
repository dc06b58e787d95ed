"""The device of this process: its own GPU, or the CPU."""

from __future__ import annotations

import torch


def has_cuda() -> bool:
    return torch.cuda.is_available()


def num_gpus() -> int:
    """GPUs visible to this process; creates no CUDA context."""
    return torch.cuda.device_count() if has_cuda() else 0


def current() -> torch.device:
    """The device of this process: its own GPU, or the CPU."""
    if has_cuda():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def name() -> str:
    """The GPU's model, or "cpu"."""
    return torch.cuda.get_device_name() if has_cuda() else "cpu"


def check_can_offload() -> None:
    """Raises ValueError without a GPU: --optimizer-cpu-offload has nothing to offload."""
    if not has_cuda():
        raise ValueError(
            "--optimizer-cpu-offload needs a CUDA GPU, and none is visible here: leave it out (without a GPU all is in "
            "host memory anyway)"
        )


def synchronize() -> None:
    if has_cuda():
        torch.cuda.synchronize()
