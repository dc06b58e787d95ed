"""Runs of the entry scripts that cost no imports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forked_runs import ForkedRuns


@pytest.fixture(scope="session")
def runs(repo_root: Path) -> Iterator[ForkedRuns]:
    """The server that forks them."""
    with ForkedRuns(repo_root) as server:
        yield server
