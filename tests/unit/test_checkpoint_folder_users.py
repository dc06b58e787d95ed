"""Who else uses a checkpoint folder: other jobs, and nodes that do not see it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.bcd.runtime.dir_claim import SharedDiskProbe
from megatron.bcd.runtime.dir_lock import DirLock

HOLDER = textwrap.dedent("""
    import os, subprocess, sys
    from megatron.bcd.runtime.dir_lock import DirLock
    lock = DirLock(sys.argv[1], flag="--save", contents="checkpoints")
    assert lock.acquire() is None
    if os.fork() == 0:  # both children outlive their parent, until the test closes its end of standard input
        sys.stdin.read()
        os._exit(0)
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], close_fds=False)
    print("locked", flush=True)
    sys.stdin.read()
""")


@contextlib.contextmanager
def lock_holder(repo_root: Path, root: Path) -> Iterator[subprocess.Popen[str]]:
    """A job that has locked `root` and started children."""
    command = [sys.executable, "-c", HOLDER, str(root)]
    with subprocess.Popen(command, cwd=repo_root, stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        yield holder
        assert holder.stdin is not None
        holder.stdin.close()


def save_lock(root: Path) -> DirLock:
    return DirLock(str(root), flag="--save", contents="checkpoints")


def acquired_soon(lock: DirLock) -> str | None:
    """A child that was forked just before the job died gives the lock back when it comes to run."""
    for _ in range(100):
        try:
            return lock.acquire()
        except ValueError:
            time.sleep(0.1)
    return lock.acquire()


def test_lock_of_another_job(tmp_path: Path, repo_root: Path) -> None:
    """Two jobs that write into one folder; or a folder that stays locked after its job was killed."""
    root = tmp_path / "new" / "root"
    lock = save_lock(root)
    with lock_holder(repo_root, root) as holder:
        expected = rf"--save {root}: .*pid {holder.pid} "
        for _ in range(2):
            with pytest.raises(ValueError, match=expected):
                lock.acquire()
        os.kill(holder.pid, signal.SIGKILL)
        os.waitpid(holder.pid, 0)
        assert acquired_soon(lock) is None  # though the children of that job are alive
    with pytest.raises(ValueError, match=rf"pid {os.getpid()} "):
        save_lock(root).acquire()
    lock.release()
    lock.release()
    again = save_lock(root)
    assert again.acquire() is None
    again.release()


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
