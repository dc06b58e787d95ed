"""A row of the tables of supported Megatron-LM flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FIELD = object()
"""Stands for the default of the dataclass field."""


@dataclass(frozen=True, kw_only=True)
class CoreFlag:
    """A field of a Megatron Core dataclass that a flag sets, and how stock's flag differs from the field."""

    field: str
    group: str
    name: str | None = None
    """Stock's flag; None: the field's name, ``--no-`` before it where the default is on."""
    default: Any = FIELD
    help: str | None = None
    choices: tuple[str, ...] | None = None
    type: type | None = None
    also: tuple[str, ...] = ()
    """Further sections of RunConfig whose field of the same name takes the same value."""
