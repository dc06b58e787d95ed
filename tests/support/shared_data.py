"""Data beside the repository, `../shared`."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared"


def shared(*parts: str) -> Path:
    """A path below `../shared`. Without that folder the test is skipped; where the folder lacks the path, it fails."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared beside the repository")
    path = SHARED.joinpath(*parts)
    assert path.exists(), f"{path} is missing, though {SHARED} is there"
    return path
