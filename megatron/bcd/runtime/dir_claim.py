"""Claims of folders that a job writes to: one job at a time, on a disk that all nodes share."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.bcd.runtime import collectives
from megatron.bcd.runtime.dir_lock import DirLock

_POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class DirClaim:
    """The right of this job to write below a folder. The kernel takes it back when the process ends."""

    lock: DirLock | None = None
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
    lock = DirLock(root, flag=flag, contents=contents)

    def prepare() -> tuple[str, str | None]:
        warning = lock.acquire()
        if clean is not None:
            clean(root)
        token = uuid.uuid4().hex
        SharedDiskProbe(root=root, token=token).create()
        return token, warning

    try:
        token, warning = collectives.on_rank_0(prepare)
    except OSError as error:
        raise ValueError(f"{flag} {root} can't be written ({error.strerror}): give a folder that can") from None
    probe = SharedDiskProbe(root=root, token=token)
    hosts = collectives.gather_objects((socket.gethostname(), probe.is_visible()))
    if torch.distributed.get_rank() == 0:
        probe.remove()
    blind = sorted({host for host, sees_probe in hosts if not sees_probe})
    if blind:
        raise ValueError(
            f"{flag} {root}: {', '.join(blind)} can't see what {hosts[0][0]} writes there; give a folder on a disk "
            "that all nodes share (NFS, Lustre, ...)"
        )
    return DirClaim(lock=lock, warnings=(warning,) if warning else ())


def exists(root: str | None) -> bool:
    """Whether rank 0 sees the folder, on every rank. A collective."""
    return collectives.on_rank_0(lambda: root is not None and os.path.isdir(root))


@dataclass(frozen=True, kw_only=True)
class SharedDiskProbe:
    """A file that one rank creates and the others look for. `token` differs from job to job. No collectives."""

    root: str
    token: str

    @property
    def _name(self) -> str:
        return f".shared_probe_{self.token}"

    def create(self) -> None:
        """Create the file, and the folder if it is missing."""
        os.makedirs(self.root, exist_ok=True)
        with open(os.path.join(self.root, self._name), "w"):
            pass

    def is_visible(self, timeout: float = 5.0) -> bool:
        """Whether the file becomes visible to this process within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            # an NFS client may answer a look-up by name from its cache; a listing comes from the server
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if self._name in os.listdir(self.root):
                    return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)

    def remove(self) -> None:
        """Delete the file."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.root, self._name))
