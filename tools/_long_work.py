"""What tools that work for long with a model check first, and how they name what stops them (generate, evaluate)."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _parser import STDOUT

_NO_MEMORY = re.compile("out of memory|(can't|cannot) allocate memory|not enough memory|ALLOC_FAILED", re.IGNORECASE)


def check_json_file(path: str | None) -> None:
    """Try to write --json FILE before hours are spent; its content stays. Raises ValueError."""
    if path is None or path == STDOUT:
        return
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise ValueError(f"--json {path}: there is no folder {folder}")
    if os.path.isdir(path):
        raise ValueError(f"--json {path}: is a folder; give a file")
    try:
        if not os.path.lexists(path):
            with tempfile.TemporaryFile(dir=folder):
                pass
        elif os.path.isfile(path):  # another kind, such as a pipe, may wait for its reader
            with open(path, "ab"):
                pass
    except OSError as error:
        raise _unwritable(path, error) from None


def write_json_file(path: str, text: str) -> None:
    """Raises ValueError, which names the flag."""
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: str, error: OSError) -> ValueError:
    return ValueError(f"--json {path} can't be written ({error.strerror or error}); give another file")


@contextlib.contextmanager
def naming_memory(remedy: str) -> Iterator[None]:
    """Raises ValueError with `remedy` where the GPU or the machine has too little memory for what is inside."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # of PyTorch: its OutOfMemoryError, a plain RuntimeError on a CPU
        if not isinstance(error, MemoryError) and not _NO_MEMORY.search(str(error)):
            raise
        raise ValueError(f"not enough memory for the model and its work: {remedy}") from None
