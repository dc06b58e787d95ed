"""The tables of docs/flags.md about Megatron-LM's flags: python -m megatron.bcd.arguments.flag_tables prints them."""

from __future__ import annotations

from collections.abc import Iterable

from megatron.bcd.arguments import unsupported_flags
from megatron.bcd.arguments.flags import generate_flags
from megatron.bcd.arguments.refusals import stock_flags


def _table(head: str, rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join((f"| {head} |", "|---|---|", *(f"| {names} | {why} |" for names, why in rows)))


def _by_reason(rows: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """One row for the names of a reason."""
    names: dict[str, list[str]] = {}
    for name, why in rows:
        names.setdefault(why, []).append(f"`{name}`")
    return [(", ".join(of_reason), why) for why, of_reason in names.items()]


def _with_value(row: unsupported_flags.CompatibleFlag) -> str:
    return f"{row.name} {'/'.join(row.values)}" if row.values else row.name


def flag_tables() -> str:
    """Markdown: which of stock's flags are supported, accepted without effect, and refused."""
    ours = {name for flag in generate_flags() for name in (*flag.names, *flag.off_names)}
    supported = ", ".join(f"`{name}`" for name in sorted(ours & stock_flags()))
    anyway = ((_with_value(row), row.why) for row in unsupported_flags.ANYWAY_FLAGS)
    dropped = ((_with_value(row), row.why) for row in unsupported_flags.DROPPED_FLAGS)
    refused = ((f"{start}*" if start.endswith("-") else start, why) for start, why in unsupported_flags.REFUSAL_REASONS)
    return "\n\n".join(
        (
            "### Supported",
            supported,
            "### Accepted: done here anyway",
            _table("flag | why", _by_reason(anyway)),
            "### Accepted without effect",
            "Only speed, a log or a file format is left out. The start banner names those that were given.",
            _table("flag | what happens instead", _by_reason(dropped)),
            "### Refused",
            "A name stands for every flag of Megatron-LM that begins with it and is not in a table above.",
            _table("flag | why, and what to do instead", _by_reason(refused)),
        )
    )


if __name__ == "__main__":
    print(flag_tables())
