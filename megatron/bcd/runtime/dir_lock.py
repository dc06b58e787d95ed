"""Who else uses a folder that a job writes in: another job, and nodes that do not see it. No collectives."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import socket
import time

_POLL_SECONDS = 0.1
_NO_LOCKS_HERE = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class DirLock:
    """Exclusive use of a root by one job, held by one of its processes.

    The kernel releases it when that process ends, however it ends; no child process takes it over.
    """

    def __init__(self, root: str, *, flag: str = "--save", contents: str = "checkpoints") -> None:
        self._root, self._flag, self._contents = root, flag, contents
        self._file: int | None = None

    def acquire(self) -> str | None:
        """Take the lock, making the root where it is missing. None, or a warning where files can't be locked here.

        Raises:
            ValueError: another job holds it.
        """
        assert self._file is None
        os.makedirs(self._root, exist_ok=True)
        file = os.open(os.path.join(self._root, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_holder(file)
        except BlockingIOError:
            holder = _read_holder(file)
            os.close(file)
            raise ValueError(
                f"{self._flag} {self._root}: another job ({holder}) is writing {self._contents} there; give another "
                "folder or stop that job"
            ) from None
        except OSError as error:
            os.close(file)
            if error.errno not in _NO_LOCKS_HERE:
                raise
            return (
                f"{self._flag} {self._root}: its file system can't lock files ({error.strerror}); two jobs that write "
                f"there would destroy each other's {self._contents}"
            )
        self._file = file
        # O_CLOEXEC ends at exec; a forked child shares the lock, and would keep it after this process was killed
        os.register_at_fork(after_in_child=self._close)
        return None

    def release(self) -> None:
        """Give the lock back; nothing where it is not held."""
        if self._file is not None:
            os.ftruncate(self._file, 0)
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedFolderProbe:
    """Finds nodes that do not see the root: one rank announces, the others look. `token` is new for every job."""

    root: str
    token: str

    @property
    def _name(self) -> str:
        return f".shared_probe_{self.token}"

    def announce(self) -> None:
        """Make the probe file, and the root where it is missing."""
        os.makedirs(self.root, exist_ok=True)
        with open(os.path.join(self.root, self._name), "w"):
            pass

    def is_visible(self, timeout: float = 5.0) -> bool:
        """Whether the announced file is seen here, within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            # listing asks an NFS server, looking for a name may be answered from this machine's cache
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if self._name in os.listdir(self.root):
                    return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)

    def withdraw(self) -> None:
        """Delete the probe file."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.root, self._name))


def _write_holder(file: int) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode(), 0)


def _read_holder(file: int) -> str:
    try:
        holder = json.loads(os.pread(file, 1000, 0))
        text = f"pid {holder['pid']} on host {holder['host']} since {holder['since']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "unknown"
    return text if text.isprintable() else "unknown"
