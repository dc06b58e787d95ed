"""CPU threads: the node's cores divided by the number of its processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_NAME = "OMP_NUM_THREADS"
_QUOTA_V2 = Path("/sys/fs/cgroup/cpu.max")
_QUOTA_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def _quota() -> float | None:
    """Return the container's CPU quota in cores, or None without one."""
    try:
        if _QUOTA_V2.exists():
            quota, period = _QUOTA_V2.read_text().split()
        else:
            quota, period = (path.read_text().strip() for path in _QUOTA_V1)
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def set_threads() -> str:
    """Give PyTorch its share of the cores, unless the user has set OMP_NUM_THREADS. Return a line for the summary."""
    import torch

    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1")
    if _NAME in os.environ and not is_from_torchrun(os.environ, processes):
        return f"{torch.get_num_threads()} CPU thread(s) per process: {_NAME}"
    cores = usable_cores()
    torch.set_num_threads(max(1, cores // processes))
    line = f"{torch.get_num_threads()} CPU thread(s) per process: {cores} core(s), {processes} process(es) on this node"
    load = os.getloadavg()[0]
    if torch.get_num_threads() > 1 and load > cores / 2:
        line += f"; other programs use them too (load {load:.1f}), so {_NAME}=1 may be faster"
    return line


def is_from_torchrun(environment: Mapping[str, str], processes: int) -> bool:
    """Return whether torchrun has set OMP_NUM_THREADS: it sets 1 for several processes if its environment has none."""
    if processes < 2 or environment.get(_NAME) != "1" or "TORCHELASTIC_RUN_ID" not in environment:
        return False
    try:
        started_with = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return not any(entry.startswith(_NAME.encode() + b"=") for entry in started_with)
