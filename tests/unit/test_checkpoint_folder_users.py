"""Who else uses a checkpoint folder: other jobs, and nodes that do not see it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from megatron.bcd.runtime.dir_claim import lock_folder


@pytest.mark.parametrize("content", [b"", b"\xff", b"{}", b"[1]", b'{"pid": "\\u001b", "host": 1, "since": 2}'])
def test_lock_of_an_unknown_job(tmp_path: Path, content: bytes) -> None:
    """A damaged lock file would end the refusal with a traceback, or write to the terminal what it likes."""
    with open(tmp_path / ".lock", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(content)
        file.flush()
        with pytest.raises(ValueError, match="unknown"):
            lock_folder(str(tmp_path), flag="--save", contents="checkpoints")


def test_no_locks_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system without locks would stop every job, and a broken one none."""
    code = errno.ENOLCK

    def flock(file: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    _, warning = lock_folder(str(tmp_path), flag="--save", contents="checkpoints")
    assert warning is not None and f"--save {tmp_path}" in warning
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        lock_folder(str(tmp_path), flag="--save", contents="checkpoints")
