"""Host memory that the ranks of a node share, page-locked if there is a GPU."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import warnings
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
"""Versions 2 and 1 of control groups: folder, limit, usage, prefix of the names in memory.stat."""


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """Host memory shared by ranks of a group on this node."""

    data: torch.Tensor
    """uint8, initially zero."""
    is_owner: bool
    """Whether this rank is the one that writes."""
    has_whole_group: bool
    """Whether all ranks of the group share it."""


def allocate(
    num_bytes: int, *, group: torch.distributed.ProcessGroup, what: str, part: tuple[int, ...] = ()
) -> SharedMemory:
    """Collective over all ranks. Allocate `num_bytes` shared by the ranks of `group` on each node with the same `part`.

    The sizes may differ between groups. The memory is page-locked in each process if there is a GPU.

    It is an anonymous file (memfd), so /dev/shm, which containers limit, is not needed. The kernel frees it with the
    last process, even one that is killed.

    Raises:
        ValueError: a node has too little memory, or it cannot be shared or page-locked. `what` names the purpose.
    """
    rank, node = torch.distributed.get_rank(), _node()
    members = collectives.gather_objects((rank, node, part), group)
    sharing = [member for member, *place in members if place == [node, part]]
    first = min(sharing)
    is_owner = rank == first
    ranks = collectives.gather_objects((node, num_bytes if is_owner else 0, available_bytes()))
    needed: dict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    for its_node, its_bytes, its_free in ranks:
        needed[its_node] += its_bytes
        free[its_node] = min(free.get(its_node, its_free), its_free)
    for its_node, total in needed.items():
        if total > free[its_node]:
            raise ValueError(
                f"{what}: a node needs {total / 2**30:.1f} GiB of host memory, and {free[its_node] / 2**30:.1f} GiB "
                "are available (MemAvailable, and the limit of the control group). Spread the layers over more nodes "
                "(--pipeline-model-parallel-size), or give --bcd-layers-on device."
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
            f"{what}: rank {rank} can't map {num_bytes / 2**30:.1f} GiB of memory that rank {first} shares ({error}). "
            "Start the ranks of a node as one user, without limits of file size and address space (ulimit -f and -v "
            "unlimited), or give --bcd-layers-on device."
        ) from error
    collectives.gather_objects(None, group)  # keep the allocating rank's handle open until all ranks have opened it
    os.close(handle)
    return SharedMemory(data=_tensor(mapping, what), is_owner=is_owner, has_whole_group=len(sharing) == group.size())


def allocate_private(num_bytes: int, *, what: str) -> torch.Tensor:
    """Allocate memory of this rank: uint8, page-locked if there is a GPU. PyTorch would round to powers of two.

    Raises:
        ValueError: there is too little memory, or it cannot be page-locked.
    """
    if num_bytes > (free := available_bytes()):
        number = f"{num_bytes / 2**30:.2f} more GiB of host memory, and {free / 2**30:.2f} are available"
        raise ValueError(f"{what}: needs {number}. Leave it out.")
    return _tensor(mmap.mmap(-1, num_bytes), what)


def _tensor(mapping: mmap.mmap, what: str) -> torch.Tensor:
    view = memoryview(mapping)
    data = torch.frombuffer(view, dtype=torch.uint8)
    if device.has_cuda():
        _lock_pages(view, data, what)
    return data


def available_bytes() -> int:
    """Return the free host memory: of the machine, and within the limit of this process's control group."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    for folder, limit, used, prefix in _CONTROL_GROUPS:
        with contextlib.suppress(OSError, ValueError):  # the other version of control groups, or no limit ("max")
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            # the page cache counts as used, but the kernel drops it when memory is short
            cached = sum(int(statistics[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
            available = min(available, int((folder / limit).read_text()) - int((folder / used).read_text()) + cached)
    return available


def _node() -> str:
    """Return an identifier that is equal on ranks which can open each other's files in /proc."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


def _lock_pages(view: memoryview, data: torch.Tensor, what: str) -> None:
    """Page-lock `data` until `view`, which it holds, is freed. Raises ValueError."""
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(data.data_ptr(), data.nbytes, 0)
    if int(error) != 0:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit // 1024} KiB"
        raise ValueError(
            f"{what}: CUDA can't page-lock {data.nbytes / 2**30:.1f} GiB of host memory (error {int(error)}; ulimit -l "
            f"is {allowed}). Start the container with more memory and no limit of locked memory (ulimit -l unlimited), "
            f"or leave {what} out."
        )

    # `mapping` keeps the pages mapped during the call; a callback on the mapping itself would run after munmap
    def unlock(mapping: object, address: int) -> None:
        error = int(runtime.cudaHostUnregister(address))
        if error != 0:
            warnings.warn(
                f"{what}: CUDA can't unlock host memory (error {error}). Start the next run anew.", stacklevel=1
            )

    # but not at the interpreter's exit, when CUDA may already be gone
    weakref.finalize(view, unlock, view.obj, data.data_ptr()).atexit = False
