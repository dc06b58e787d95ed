"""Claims of folders that a job writes to: one job at a time, on a disk that all nodes share."""

from __future__ import annotations

import errno
import json
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
    """The right of this job to write below a folder."""

    lock: UnixFileLock | None = None
    """On rank 0."""
    warnings: tuple[str, ...] = ()

    def release(self) -> None:
        """Let other jobs write there. Not a collective."""
        if self.lock is not None:
            self.lock.release()


def claim(root: str | None, *, flag: str, contents: str, clean: Callable[[str], Any] | None = None) -> DirClaim:
    """Lock `root` for this job, `clean` it up after a killed one, and check that every node sees it. A collective.

    `flag` and `contents` (what is written there, a plural) are for messages. Without a root there is nothing to claim.

    Raises:
        ValueError: another job writes there, the folder can't be written, or a node does not see it.
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
        raise ValueError(f"{flag} {root} can't be written ({error.strerror}): give a folder that can") from None
    hosts = collectives.gather_objects((socket.gethostname(), becomes_visible(root, probe)))
    if torch.distributed.get_rank() == 0:
        os.unlink(os.path.join(root, probe))
    blind = sorted({host for host, sees_probe in hosts if not sees_probe})
    if blind:
        raise ValueError(
            f"{flag} {root}: {', '.join(blind)} can't see what {hosts[0][0]} writes there; give a folder on a disk "
            "that all nodes share (NFS, Lustre, ...)"
        )
    return DirClaim(lock=lock, warnings=(warning,) if warning else ())


def lock_folder(root: str, *, flag: str, contents: str) -> tuple[UnixFileLock, str | None]:
    """A lock on the file ``.lock`` of a folder, which is created if it is missing; a warning if the disk has no locks.

    The kernel releases it when this process ends, however it ends. Child processes do not inherit it.

    Raises:
        ValueError: another job holds it.
    """
    path = os.path.join(root, ".lock")
    os.makedirs(root, exist_ok=True)
    lock = UnixFileLock(path, thread_local=False, fallback_to_soft=False, on_acquired=_write_holder)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(
            f"{flag} {root}: another job ({_read_holder(path)}) is writing {contents} there; give another folder or "
            "stop that job"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise
        return lock, (
            f"{flag} {root}: its file system can't lock files ({error.strerror}); two jobs that write there would "
            f"destroy each other's {contents}"
        )
    return lock, None


def _write_holder(file: int) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode(), 0)


def _read_holder(path: str) -> str:
    try:
        with open(path, "rb") as file:
            holder = json.loads(file.read(1000))
        text = f"pid {holder['pid']} on host {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "unknown"
    return text if text.isprintable() else "unknown"


def becomes_visible(root: str, name: str, timeout: float = 5.0) -> bool:
    """Whether this process sees the file within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        # an NFS client may answer a look-up by name from its cache; a listing comes from the server
        if os.path.isdir(root) and name in os.listdir(root):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
