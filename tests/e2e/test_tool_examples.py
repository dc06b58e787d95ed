"""Examples in the help of tools that train, as typed; unit/test_tool_language.py runs those that take seconds."""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = (("train_tokenizer", 0),)
"""Tool and place in its help. Not the measurements, which take up to hours: tests of their own run them in short
forms."""


def example(tool: str, place: int) -> list[str]:
    """Its words, of the line in the tool's help."""
    lines = str(importlib.import_module(tool).__doc__).splitlines()
    return shlex.split([line for line in lines if line.startswith("    ") and f"tools/{tool}.py" in line][place])


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tool, place", EXAMPLES)
def test_example_as_typed(repo_root: Path, tmp_path: Path, shared_data: Path, tool: str, place: int) -> None:
    """An example that ends in an error."""
    (tmp_path / "tools").symlink_to(repo_root / "tools")
    (tmp_path / "corpus.txt").symlink_to(shared_data / "wikitext-2" / "valid.txt")
    (tmp_path / "out").mkdir()
    launcher = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    first, *rest = example(tool, place)
    done = subprocess.run(
        [*launcher[first], *rest],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
