"""Choose the backend of the tests' process groups: --backend, passed to the ranks in environment variables."""

from __future__ import annotations

import os

NAMES = ("gloo", "strict", "strict-one-queue", "nccl")
"""`strict_backend` describes the last two."""
_BACKEND, _HANG_SECONDS = "BCD_TEST_BACKEND", "BCD_TEST_HANG_SECONDS"


def environment(backend: str, *, hang_seconds: float = 100.0) -> dict[str, str]:
    """Return the variables that choose a rank's backend and its time limit for a hang."""
    assert backend in NAMES, backend
    return {_BACKEND: backend, _HANG_SECONDS: str(hang_seconds)}


def chosen() -> str:
    """Return the backend of this process's groups."""
    return os.environ.get(_BACKEND, "gloo")


def is_strict() -> bool:
    return chosen().startswith("strict")


def hang_seconds() -> float:
    return float(os.environ[_HANG_SECONDS])
