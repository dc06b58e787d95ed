"""Processes that a test looks at from outside, and that may end at any moment."""

from __future__ import annotations

import psutil


def has_ended(process: psutil.Process) -> bool:
    """Also where nobody has asked for its exit code."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
