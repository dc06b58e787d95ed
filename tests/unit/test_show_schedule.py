"""tools/show_schedule.py."""

from __future__ import annotations

import re

import pytest
import show_schedule

EXAMPLE = ("--stages", "4", "--microbatches", "8", "--pivot", "2")


def output(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert show_schedule.main(flags) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def iteration_times(text: str) -> list[str]:
    """Return the iteration time of every schedule."""
    return re.findall(r"^iteration time(.*)$", text, re.MULTILINE)[0].split()


INTERLEAVED = ("--stages", "4", "--microbatches", "8", "--layout", "interleaved", "--num-blocks", "3", "--block", "1")


def test_interleaved(capsys: pytest.CaptureFixture[str]) -> None:
    """Interleaved schedules have the known times, and --chunks draws more chunks."""
    assert iteration_times(output(capsys, *INTERLEAVED)) == ["81", "59"]
    assert "stage 0 pAssAs " in output(capsys, *INTERLEAVED, "--schedule", "bcd", "--chunks", "6")


def test_flags_are_followed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every flag changes the times, and costs of passes that do not happen change nothing."""

    def figures(*flags: str) -> list[str]:
        return iteration_times(output(capsys, *EXAMPLE, *flags))

    assert figures() == ["28", "25"]
    assert figures("--schedule", "stock") == ["28"]
    assert figures("--schedule", "bcd") == ["25"]
    assert figures("--active", "2", "3") == ["30", "27"]
    breadth_first = ("--stages", "2", "--chunks", "2", "--microbatches", "3", "--schedule", "breadth-first")
    assert iteration_times(output(capsys, *breadth_first)) == ["24"]
    for flag, without_use, with_use in (
        ("--forward", "1 1 1 1", "1 1 1.5 1"),
        ("--backward", "9 9 2 9", "2 2 3 2"),
        ("--backward-input", "9 1 9 1", "1 1 1 2"),
        ("--message", "0", "1"),
    ):
        assert figures(flag, *without_use.split()) == figures() != figures(flag, *with_use.split())
