"""What tools/check_machine.py found about one part."""

from __future__ import annotations

from collections.abc import Mapping
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
