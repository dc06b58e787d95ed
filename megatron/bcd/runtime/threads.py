"""CPU threads: how many, and how they wait."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_SPINS = "GOMP_SPINCOUNT"


def limit_openmp_spin() -> None:
    """Make waiting OpenMP threads sleep after about 50 microseconds, unless the user has set how they wait.

    Call this before importing torch. By default they spin for 300,000 rounds, which suits threads with a core each.
    If another program uses the cores, spinning costs a time slice per wait and makes a step ten times as long.
    """
    if not {"OMP_WAIT_POLICY", _SPINS} & set(os.environ):
        os.environ[_SPINS] = "10000"


def usable_cores() -> int:
    """Return the number of cores this process may use, within its affinity mask and its container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _QUOTA.read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no control group, or no quota ("max")
        return cores


def set_threads() -> str:
    """Give PyTorch the usable cores, unless the user or torchrun has set OMP_NUM_THREADS. Return a summary line.

    torchrun sets 1 for several processes.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_cores())
    return f"{torch.get_num_threads()} CPU thread(s) per process (OMP_NUM_THREADS)"
