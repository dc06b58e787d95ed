"""Runs of the entry scripts that import nothing, and a folder to start them in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.bad_input_cases import good_documents, write_dataset
from support.forked_runs import ForkedRuns


@pytest.fixture(scope="session")
def runs(repo_root: Path) -> Iterator[ForkedRuns]:
    """The server that forks the runs."""
    with ForkedRuns(repo_root) as server:
        yield server


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder in which `bad_input_cases.BASE` runs."""
    write_dataset(tmp_path / "data" / "text_document", good_documents())
    (tmp_path / "a_file").write_text("not a folder\n")
    return tmp_path
