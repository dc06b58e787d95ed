"""What every rule uses: the fields of a RunConfig by name, flag names, and the refusal."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from megatron.bcd.arguments.flags import CORE_SECTIONS, dashed
from megatron.bcd.config import RunConfig

FLAG_NAMES = {row.field: row.name or dashed(row.field) for _, rows in CORE_SECTIONS.values() for row in rows}


def flag_name(field: str) -> str:
    return FLAG_NAMES.get(field, dashed(field))


class Run(SimpleNamespace):
    """Every field of a RunConfig in one namespace; None where Megatron Core's default applies."""

    def __getattr__(self, field: str) -> Any:
        if field in FLAG_NAMES:
            return None
        raise AttributeError(field)


def flattened(config: RunConfig) -> Run:
    run = Run()
    for section in asdict(config).values():
        run.__dict__.update(section)
    return run


def refuse_unless(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)
