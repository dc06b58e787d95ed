"""tools/show_schedule.py: what it prints and draws."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import show_schedule

EXAMPLE = ("--stages", "4", "--microbatches", "8", "--pivot", "2")


def output(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert show_schedule.main(flags) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def iteration_times(text: str) -> list[str]:
    """Of every schedule."""
    return re.findall(r"^iteration time(.*)$", text, re.MULTILINE)[0].split()


def test_command_as_typed_without_torch(repo_root: Path, tmp_path: Path) -> None:
    """A tool that runs from the repository only, or that needs torch, or seconds, to print a table."""
    program = "import os, runpy, sys; sys.argv = sys.argv[1:]; sys.path[0] = os.path.dirname(sys.argv[0])\n"
    program += "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    program += "finally: assert not {'torch', 'megatron.core', 'matplotlib', 'rich'} & sys.modules.keys()"
    command = [sys.executable, "-c", program, repo_root / "tools" / "show_schedule.py", *EXAMPLE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


INTERLEAVED = ("--stages", "4", "--microbatches", "8", "--layout", "interleaved", "--num-blocks", "3", "--block", "1")


def test_interleaved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A layout that is read and ignored, a chunk that is not drawn, a picture that needs the other shape."""
    text = output(capsys, *INTERLEAVED, "--figure", str(tmp_path / "x.png"))
    assert iteration_times(text) == ["81", "59"]
    assert (tmp_path / "x.png").stat().st_size > 10_000
    assert "stage 0 pAssAs " in output(capsys, *INTERLEAVED, "--schedule", "bcd", "--chunks", "6")


def test_flags_are_followed(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that is read and ignored."""

    def figures(*flags: str) -> list[str]:
        return iteration_times(output(capsys, *EXAMPLE, *flags))

    assert figures() == ["28", "25"]
    assert figures("--run-ahead", "0") == ["28", "27"]
    assert figures("--schedule", "stock") == ["28"]
    assert figures("--schedule", "bcd") == ["25"]
    assert figures("--active", "2", "3") == ["30", "27"]
    for flag, without_use, with_use in (
        ("--forward", "1 1 1 1", "1 1 1.5 1"),
        ("--backward", "9 9 2 9", "2 2 3 2"),
        ("--backward-input", "9 1 9 1", "1 1 1 2"),
        ("--message", "0", "1"),
    ):
        assert figures(flag, *without_use.split()) == figures() != figures(flag, *with_use.split())
