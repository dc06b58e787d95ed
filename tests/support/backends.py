"""Which backend the process groups of tests have: --backend, carried to the ranks in environment variables."""

from __future__ import annotations

import os

NAMES = ("gloo", "strict", "strict-one-queue", "nccl")
"""See `strict_backend` for the latter two."""
_BACKEND, _HANG_SECONDS = "BCD_TEST_BACKEND", "BCD_TEST_HANG_SECONDS"


def environment(backend: str, *, hang_seconds: float = 100.0) -> dict[str, str]:
    """Variables of a rank's process that choose the backend of its groups, and how long nothing may move in strict
    ones."""
    assert backend in NAMES, backend
    return {_BACKEND: backend, _HANG_SECONDS: str(hang_seconds)}


def chosen() -> str:
    """The backend of this process's groups."""
    return os.environ.get(_BACKEND, "gloo")


def is_strict() -> bool:
    return chosen().startswith("strict")


def hang_seconds() -> float:
    return float(os.environ[_HANG_SECONDS])
