"""Locks on folders: one job at a time writes to a folder, on a disk that all nodes share."""

from __future__ import annotations

import errno
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from filelock import Timeout, UnixFileLock

from megatron.bcd.runtime import collectives

_POLL_SECONDS = 0.1
_NO_LOCKS_HERE = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@dataclass(frozen=True, kw_only=True)
class DirClaim:
    """The exclusive right of this job to write to a folder."""

    lock: UnixFileLock | None = None
    """The lock on rank 0; None elsewhere."""
    warnings: tuple[str, ...] = ()

    def release(self) -> None:
        """Release the lock. Not a collective."""
        if self.lock is not None:
            self.lock.release()


def claim(root: str | None, *, flag: str, contents: str, clean: Callable[[str], Any] | None = None) -> DirClaim:
    """Collective. Lock `root` for this job, `clean` up after a killed job, and check that every node sees the folder.

    `flag` and `contents` (a plural: what is written there) are for messages. Without a root, do nothing.

    Raises:
        ValueError: another job has the lock, the folder is not writable, or a node does not see it.
    """
    if root is None:
        return DirClaim()
    lock: UnixFileLock | None = None

    def prepare() -> tuple[str, str | None]:
        nonlocal lock
        lock, warning = lock_folder(root, flag=flag, contents=contents)
        if clean is not None:
            clean(root)
        probe = f".shared_probe_{uuid.uuid4().hex}"
        with open(os.path.join(root, probe), "w"):
            return probe, warning

    try:
        probe, warning = collectives.on_rank_0(prepare)
    except OSError as error:
        raise ValueError(f"{flag} {root}: can't be written ({error.strerror}). Give a writable folder.") from None
    hosts = collectives.gather_objects((socket.gethostname(), becomes_visible(root, probe)))
    if torch.distributed.get_rank() == 0:
        os.unlink(os.path.join(root, probe))
    blind = sorted({host for host, sees_probe in hosts if not sees_probe})
    if blind:
        raise ValueError(
            f"{flag} {root}: {', '.join(blind)} can't see what {hosts[0][0]} writes there. Give a folder on a disk "
            "that all nodes share (NFS, Lustre, ...)."
        )
    return DirClaim(lock=lock, warnings=(warning,) if warning else ())


def lock_folder(root: str, *, flag: str, contents: str) -> tuple[UnixFileLock, str | None]:
    """Lock the file ``.lock`` of a folder, which is created if necessary. Return a warning if the disk has no locks.

    The kernel releases the lock when this process ends, even if it is killed. Child processes do not inherit it.

    Raises:
        ValueError: another job has the lock.
    """
    path = os.path.join(root, ".lock")
    os.makedirs(root, exist_ok=True)
    lock = UnixFileLock(path, thread_local=False, fallback_to_soft=False, on_acquired=_write_holder)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        with open(path, errors="replace") as file:
            holder = file.read(200)
        raise ValueError(
            f"{flag} {root}: another job ({holder}) is writing {contents} there. Give another folder, or stop that job."
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise
        return lock, (
            f"{flag} {root}: its file system can't lock files ({error.strerror}). Two jobs that write there would "
            f"destroy each other's {contents}."
        )
    return lock, None


def _write_holder(file: int) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    os.ftruncate(file, 0)
    os.pwrite(file, f"pid {os.getpid()} on host {socket.gethostname()} since {since}".encode(), 0)


def becomes_visible(root: str, name: str, timeout: float = 5.0) -> bool:
    """Return whether this process sees the file within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        # an NFS client may answer a look-up by name from its cache, but a listing comes from the server
        if os.path.isdir(root) and name in os.listdir(root):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
