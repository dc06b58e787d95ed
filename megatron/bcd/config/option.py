"""A dataclass field that a command-line flag sets."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] | None = None,
    nargs: str | int | None = None,
    type: Any = None,
    metavar: str | tuple[str, ...] | None = None,
) -> Any:
    """A dataclass field with the help, choices, nargs, type and metavar of its command-line flag."""
    metadata = {"help": help, "choices": choices, "nargs": nargs, "type": type, "metavar": metavar}
    return field(default=default, metadata=metadata)
