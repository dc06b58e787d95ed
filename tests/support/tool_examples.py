"""The tools, and the examples in their help."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = sorted(
    path.stem for path in (ROOT / "tools").glob("[a-z]*.py") if "leave_with" in path.read_text(encoding="utf-8")
)
RUN_AS_TYPED = ("plan", "preprocess_data", "recipe", "report", "show_schedule")
"""Tools whose examples take seconds. Others train, or take minutes."""


def commands(tool: str) -> list[list[str]]:
    """The words of each example in the tool's help."""
    text = str(importlib.import_module(tool).__doc__).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("    ") and f"tools/{tool}.py" in line]
    return [shlex.split(line, comments=True) for line in lines]


def examples(tool: str) -> list[list[str]]:
    """The words after the tool's name, of each example in its help."""
    return [words[words.index(f"tools/{tool}.py") + 1 :] for words in commands(tool)]
