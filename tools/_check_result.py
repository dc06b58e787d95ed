"""What tools/check_machine.py found about one part, and the table of all parts."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One part of the machine or of the self-test."""

    part: str
    verdict: str
    """PASS, FAIL or SKIP."""
    detail: str
    """What was found; of SKIP the reason."""
    remedy: str = ""
    """Of FAIL: what to do."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """For programs."""


def passed(part: str, detail: str, **figures: Any) -> Check:
    return Check(part=part, verdict=PASS, detail=detail, figures=figures)


def failed(part: str, detail: str, *, remedy: str, **figures: Any) -> Check:
    return Check(part=part, verdict=FAIL, detail=detail, remedy=remedy, figures=figures)


def skipped(part: str, reason: str, **figures: Any) -> Check:
    return Check(part=part, verdict=SKIP, detail=reason, figures=figures)


def exit_code(checks: Sequence[Check]) -> int:
    """1 if any part failed, or none was checked."""
    return int(not checks or any(check.verdict == FAIL for check in checks))


def as_list(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Plain values."""
    return [dataclasses.asdict(check) for check in checks]


def show(checks: Sequence[Check]) -> None:
    """Print the table; plain lines where rich is what the machine lacks."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        for check in checks:
            print(textwrap.indent(_sentence(check), "    ").replace("    ", f"{check.verdict}  {check.part}: ", 1))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("part", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found")
    colors = {PASS: "green", FAIL: "bold red", SKIP: "yellow"}
    for check in checks:
        table.add_row(check.part, Text(check.verdict, colors[check.verdict]), Text(_sentence(check)))
    Console(highlight=False).print(table)


def _sentence(check: Check) -> str:
    return f"{check.detail}\nremedy: {check.remedy}" if check.remedy else check.detail
