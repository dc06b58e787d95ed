"""The folders of --save and --bcd-prefix-cache at the start of a run: one job at a time, on a disk that all nodes
see."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.bcd.checkpoint import layout
from megatron.bcd.runtime import collectives
from megatron.bcd.runtime.dir_lock import DirLock, SharedFolderProbe


@dataclass
class Claim:
    """The right to write below a folder; the operating system takes it back when the process ends."""

    lock: DirLock | None = None
    warnings: tuple[str, ...] = ()

    def release(self) -> None:
        if self.lock is not None:
            self.lock.release()


def claim(
    root: str | None,
    *,
    flag: str = "--save",
    contents: str = "checkpoints",
    clean: Callable[[str], Any] = layout.clean_leftovers,
) -> Claim:
    """Lock `root` for this job, see that every node has it, remove what a killed run left. A collective.

    Raises:
        ValueError: another job writes there, the folder can't be written, or nodes see different disks.
    """
    if root is None:
        return Claim()
    one = Claim()

    def take() -> str:
        one.lock = DirLock(root, flag=flag, contents=contents)
        warning = one.lock.acquire()
        one.warnings = (warning,) if warning else ()
        clean(root)
        token = uuid.uuid4().hex
        SharedFolderProbe(root=root, token=token).announce()
        return token

    try:
        token = collectives.on_rank_0(take)
    except OSError as failed:
        raise ValueError(f"{flag} {root} can't be written ({failed.strerror}): give a folder that can") from None
    probe = SharedFolderProbe(root=root, token=token)
    hosts = collectives.gather_objects((socket.gethostname(), probe.is_visible()))
    if torch.distributed.get_rank() == 0:
        probe.withdraw()
    blind = sorted({host for host, sees in hosts if not sees})
    if blind:
        raise ValueError(
            f"{flag} {root}: {', '.join(blind)} can't see what {hosts[0][0]} writes there; give a folder on a disk "
            "that all nodes share (NFS, Lustre, ...)"
        )
    return one


def exists(root: str | None) -> bool:
    """Whether rank 0 sees the folder; the same on every rank. A collective."""
    return collectives.on_rank_0(lambda: root is not None and os.path.isdir(root))


def has_checkpoint(root: str) -> bool:
    """Whether rank 0 sees a checkpoint below `root`; the same on every rank. A collective."""
    return collectives.on_rank_0(lambda: bool(layout.candidates(root)))
