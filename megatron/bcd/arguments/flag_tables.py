"""The end of docs/flags.md, about Megatron-LM's flags: python -m megatron.bcd.arguments.flag_tables prints it."""

from __future__ import annotations

from megatron.bcd.arguments.flags import generate_flags
from megatron.bcd.arguments.stock import UNSUPPORTED, stock_flags


def flag_tables() -> str:
    """Markdown: which of stock's flags are supported, and which are not."""
    ours = {name for flag in generate_flags() for name in (*flag.names, *flag.off_names)}
    unsupported = (
        f"| {', '.join(f'`{start}*`' if start.endswith('-') else f'`{start}`' for start in starts.split())} | {why} |"
        for why, starts in UNSUPPORTED.items()
    )
    return "\n".join(
        (
            "### Supported\n",
            ", ".join(f"`{name}`" for name in sorted(ours & stock_flags())),
            "\n### Unsupported\n",
            "A name stands for every flag of Megatron-LM that begins with it and is not in the list above.\n",
            "| flag | why, and what to do instead |",
            "|---|---|",
            *unsupported,
        )
    )


if __name__ == "__main__":
    print(flag_tables())
