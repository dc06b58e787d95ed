"""Data next to the repository, in `../shared`."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared"


def shared(*parts: str) -> Path:
    """Return a path in `../shared`. Skips the test without that folder; fails if only the path is missing."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared beside the repository")
    path = SHARED.joinpath(*parts)
    assert path.exists(), f"{path} is missing, though {SHARED} is there"
    return path
