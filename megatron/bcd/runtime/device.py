"""The device of this process: its own GPU, or the CPU."""

from __future__ import annotations

import torch


def has_cuda() -> bool:
    return torch.cuda.is_available()


def num_gpus() -> int:
    """That this process sees; asks the driver and leaves no context on any of them."""
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
    """Raises ValueError where there is no GPU that --optimizer-cpu-offload could take something off."""
    if not has_cuda():
        raise ValueError(
            "--optimizer-cpu-offload needs a CUDA GPU, and none is visible here: leave it out (without a GPU all is in "
            "host memory anyway)"
        )


def synchronize() -> None:
    if has_cuda():
        torch.cuda.synchronize()
