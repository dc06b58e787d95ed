"""Durable writes, and one-line descriptions of their errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

_NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def write(path: str, content: bytes) -> None:
    """Write a file and flush it to disk. Raises OSError."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace(path: str, content: bytes) -> None:
    """Replace a file: it has the old or the new content, also after a power cut. Raises OSError."""
    write(path + ".new", content)
    os.replace(path + ".new", path)


def sync(path: str) -> None:
    """Flush a file to disk, or the list of names in a folder. Raises OSError."""
    file = os.open(path or ".", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:  # some network file systems can't sync a folder
            raise
    finally:
        os.close(file)


def os_error(error: BaseException) -> BaseException:
    """Return the operating system's error that caused `error`, or `error` itself if there is none.

    PyTorch's file writer, for example, raises another error on top of that of a full disk.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ if cause.__suppress_context__ else cause.__context__
    return cause or error


def describe(error: BaseException) -> str:
    """Return the error as one line, without a trailing full stop."""
    error = os_error(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def capture_error(action: Callable[[], object]) -> str | None:
    """Run `action`. Return its error as one line, or None on success."""
    try:
        action()
    except (OSError, RuntimeError, ValueError) as error:  # PyTorch's file writer raises RuntimeError on a full disk
        return describe(error)
    return None
