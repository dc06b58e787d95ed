"""Threads of a process that computes on the CPU: the node's cores divided by its processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_NAME = "OMP_NUM_THREADS"
_QUOTA_V2 = Path("/sys/fs/cgroup/cpu.max")
_QUOTA_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


_SPINS = "GOMP_SPINCOUNT"


def wait_briefly() -> None:
    """Let threads that wait for each other sleep after some 50 microseconds of spinning, unless the user has said how
    they wait. To be called before torch is imported.

    OpenMP's own 300,000 rounds are for threads that have a core each. Where another program has it, each wait costs a
    turn of the scheduler, and a step ten times as long.
    """
    if not {"OMP_WAIT_POLICY", _SPINS} & set(os.environ):
        os.environ[_SPINS] = "10000"


def usable_cores() -> int:
    """Cores that this process may use: those that it may run on, and no more than its container's share of time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def _quota() -> float | None:
    """Of the container, in cores; None without one."""
    try:
        if _QUOTA_V2.exists():
            quota, period = _QUOTA_V2.read_text().split()
        else:
            quota, period = (path.read_text().strip() for path in _QUOTA_V1)
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def set_threads() -> str:
    """Give PyTorch its share of the cores, unless the user has set OMP_NUM_THREADS; a line of the run summary."""
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
    """Whether torchrun has set OMP_NUM_THREADS: to 1 for several processes, where its own environment has none."""
    if processes < 2 or environment.get(_NAME) != "1" or "TORCHELASTIC_RUN_ID" not in environment:
        return False
    try:
        started_with = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return not any(entry.startswith(_NAME.encode() + b"=") for entry in started_with)
