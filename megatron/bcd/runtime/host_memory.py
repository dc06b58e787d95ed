"""Host memory that the ranks of a node share, page-locked where there is a GPU."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import weakref
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.bcd.runtime import collectives, device

_CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", ""),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Versions 2 and 1: folder, limit, use, and what the names in memory.stat begin with."""


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """Memory of this rank's group on this node."""

    data: torch.Tensor
    """Bytes, zero at first."""
    is_owner: bool
    """Whether this rank is the one of its group on this node that writes."""
    has_whole_group: bool
    """Whether all ranks of the group are on this node."""


def allocate(num_bytes: int, *, group: torch.distributed.ProcessGroup, what: str) -> SharedMemory:
    """`num_bytes` that the ranks of `group` on one node share, page-locked in each of their processes if there is a
    GPU. A collective over all ranks, whose groups may need different sizes.

    The memory has no name in a file system: it is no part of /dev/shm, whose size containers limit, and it is free
    again when the last process ends, however that ends.

    Raises:
        ValueError: the ranks of a node need more than there is, or it can't be page-locked; `what` it is for is told.
    """
    rank, node = torch.distributed.get_rank(), _node()
    sharing = [one for one, its_node in collectives.gather_objects((rank, node), group) if its_node == node]
    first = min(sharing)
    is_owner = rank == first
    ranks = collectives.gather_objects((node, num_bytes if is_owner else 0, available_bytes()))
    needed: dict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    for its_node, one, its_free in ranks:
        needed[its_node] += one
        free[its_node] = min(free.get(its_node, its_free), its_free)
    for its_node, total in needed.items():
        if total > free[its_node]:
            raise ValueError(
                f"{what}: a node needs {total / 2**30:.1f} GiB of host memory, and {free[its_node] / 2**30:.1f} GiB "
                "are available (MemAvailable, and the limit of the control group): spread the layers over more nodes "
                "(--pipeline-model-parallel-size), or take --bcd-frozen-weights device"
            )
    try:
        handle = os.memfd_create("megatron-bcd") if is_owner else -1
        if is_owner:
            os.truncate(handle, num_bytes)
        places = dict(collectives.gather_objects((rank, (os.getpid(), handle)), group))
        if not is_owner:
            handle = os.open("/proc/{}/fd/{}".format(*places[first]), os.O_RDWR)
        mapping = mmap.mmap(handle, num_bytes)
    except OSError as error:
        raise ValueError(
            f"{what}: rank {rank} can't map {num_bytes / 2**30:.1f} GiB of memory that rank {first} shares ({error}): "
            "start the ranks of a node as one user, without limits of file size and address space (ulimit -f and -v "
            "unlimited), or take --bcd-frozen-weights device"
        ) from error
    collectives.gather_objects(None, group)  # the owner's handle is open until all have opened theirs
    os.close(handle)
    data = torch.frombuffer(mapping, dtype=torch.uint8)
    if device.has_cuda():
        _lock_pages(mapping, data, what)
    return SharedMemory(data=data, is_owner=is_owner, has_whole_group=len(sharing) == group.size())


def available_bytes() -> int:
    """Host memory that is free for this process: of the machine, and within the limit of its control group."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    found = int(fields["MemAvailable"].split()[0]) * 1024
    for folder, limit, used, prefix in _CONTROL_GROUPS:
        with contextlib.suppress(OSError, ValueError):  # another version, or no limit ("max")
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            # files that were read count as used, and are dropped where memory is short
            cached = sum(int(statistics[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
            found = min(found, int((folder / limit).read_text()) - int((folder / used).read_text()) + cached)
    return found


def _node() -> str:
    """The same on all ranks that can open each other's files below /proc."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


def _lock_pages(mapping: mmap.mmap, data: torch.Tensor, what: str) -> None:
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(data.data_ptr(), data.nbytes, 0)
    if int(error) != 0:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit // 1024} KiB"
        raise ValueError(
            f"{what}: CUDA can't page-lock {data.nbytes / 2**30:.1f} GiB of host memory (error {int(error)}; ulimit -l "
            f"is {allowed}): start the container with more memory and no limit of locked memory (ulimit -l unlimited), "
            "or take --bcd-frozen-weights device"
        )
    # not at the interpreter's exit, when CUDA may be gone
    weakref.finalize(mapping, runtime.cudaHostUnregister, data.data_ptr()).atexit = False
