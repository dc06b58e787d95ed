"""Who else uses a checkpoint folder: other jobs, and nodes that do not see it."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from megatron.bcd.runtime.dir_claim import SharedDiskProbe
from megatron.bcd.runtime.dir_lock import DirLock


def save_lock(root: Path) -> DirLock:
    return DirLock(str(root), flag="--save", contents="checkpoints")


@pytest.mark.parametrize("content", [b"", b"\xff", b"{}", b"[1]", b'{"pid": "\\u001b", "host": 1, "since": 2}'])
def test_lock_of_an_unknown_job(tmp_path: Path, content: bytes) -> None:
    """A damaged lock file would end the refusal with a traceback, or write to the terminal what it likes."""
    with open(tmp_path / ".lock", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(content)
        file.flush()
        with pytest.raises(ValueError, match="unknown"):
            save_lock(tmp_path).acquire()


def test_no_locks_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system without locks would stop every job, and a broken one none."""
    code = errno.ENOLCK

    def flock(file: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = save_lock(tmp_path)
    warning = lock.acquire()
    assert warning is not None and f"--save {tmp_path}" in warning
    lock.release()
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        lock.acquire()


def test_shared_folder(tmp_path: Path) -> None:
    """Nodes that write to disks of their own would be noticed by the first load; a slow disk is no reason to stop."""
    root = tmp_path / "root"
    probe = SharedDiskProbe(root=str(root), token="a1")
    assert not probe.is_visible(timeout=0)
    late = threading.Timer(0.3, probe.create)
    late.start()
    assert probe.is_visible(timeout=60)
    late.join()
    assert not SharedDiskProbe(root=str(root), token="b2").is_visible(timeout=0.2)
    probe.remove()
    probe.remove()
    assert not probe.is_visible(timeout=0) and list(root.iterdir()) == []
