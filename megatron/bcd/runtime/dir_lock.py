"""A lock on a folder, so that two jobs do not write to it at the same time. No collectives."""

from __future__ import annotations

import errno
import json
import os
import socket
import time

from filelock import Timeout, UnixFileLock

_NO_LOCKS_HERE = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class DirLock:
    """Exclusive use of a folder by one job, held by one of its processes: ``flock`` on the file ``.lock`` in it.

    The kernel releases it when that process ends, however it ends. Child processes do not inherit it.
    """

    def __init__(self, root: str, *, flag: str, contents: str) -> None:
        """`flag` and `contents` (what is written there, a plural) are for messages."""
        self._root, self._flag, self._contents = root, flag, contents
        self._path = os.path.join(root, ".lock")
        self._lock = UnixFileLock(self._path, thread_local=False, fallback_to_soft=False, on_acquired=_write_holder)

    def acquire(self) -> str | None:
        """Take the lock and create the folder if it is missing. None, or a warning if the disk has no file locks.

        Raises:
            ValueError: another job holds it.
        """
        assert not self._lock.is_locked
        os.makedirs(self._root, exist_ok=True)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise ValueError(
                f"{self._flag} {self._root}: another job ({_read_holder(self._path)}) is writing {self._contents} "
                "there; give another folder or stop that job"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                raise
            return (
                f"{self._flag} {self._root}: its file system can't lock files ({error.strerror}); two jobs that write "
                f"there would destroy each other's {self._contents}"
            )
        return None

    def release(self) -> None:
        """Release the lock; does nothing if it is not held."""
        self._lock.release()


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
