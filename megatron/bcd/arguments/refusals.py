"""Why a flag is refused, and what to give instead."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.resources
import re
from collections.abc import Sequence

from megatron.bcd.arguments import unsupported_flags
from megatron.bcd.arguments.flags import CORE_SECTIONS, dashed
from megatron.bcd.arguments.synonyms import SYNONYMS

_LISTED = 3
"""Problems that the one line of a normal run lists."""
_SIMILAR = 0.85
"""Similarity (difflib) from which another flag's name is worth suggesting."""


class RefusedFlags(ValueError):
    """What is wrong with a command line; as text one line, also for several problems."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self._line())

    def _line(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        listed = " ".join(f"({number}) {text}" for number, text in enumerate(self.problems[:_LISTED], start=1))
        more = len(self.problems) - _LISTED
        return f"{len(self.problems)} problems: {listed}" + (f" and {more} more: --dry-run lists all" * (more > 0))


@functools.cache
def stock_flags() -> frozenset[str]:
    """Every flag of stock Megatron-LM, supported or not."""
    core_fields = [field for core, _ in CORE_SECTIONS.values() for field in dataclasses.fields(core)]
    names = {dashed(field.name) for field in core_fields if not field.name.startswith("_")}
    for field in core_fields:
        names.update(field.metadata.get("argparse_meta", {}).get("arg_names", ()))
    file = importlib.resources.files("megatron.bcd.arguments") / "megatron_flag_names.txt"
    listed = file.read_text(encoding="utf-8")
    names.update(name for line in listed.splitlines() if (name := line.split("#")[0].strip()))
    return frozenset(names)


def _positive(name: str) -> str:
    return re.sub(r"^--(?:no|disable)-", "--", name)


@functools.cache
def _stock_switches(known: frozenset[str]) -> frozenset[str]:
    """Both spellings of a switch are stock's, unless the switch itself is supported: then the other one is a typo."""
    return frozenset(_positive(name) for name in stock_flags()) - {_positive(name) for name in known}


def reason_of(name: str) -> str | None:
    """Why a flag of stock Megatron-LM is refused; None where no table says."""
    starts = (name, _positive(name))
    rows = unsupported_flags.REFUSAL_REASONS
    return next((why for start, why in rows if any(one.startswith(start) for one in starts)), None)


def refusal(name: str, known: frozenset[str]) -> str:
    """Why the flag is refused: it is not one of `known`."""
    instead = SYNONYMS.get(name)
    if instead is not None:
        return f"unknown flag {name}; give {instead}"
    if name in stock_flags() or _positive(name) in _stock_switches(known):
        reason = reason_of(name) or "--help lists those it does"
        return f"{name} is a Megatron-LM flag that Megatron-BCD does not support ({reason})"
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=_SIMILAR)
    return f"unknown flag {name}; " + (f"did you mean {near[0]}?" if near else "--help lists all flags")
