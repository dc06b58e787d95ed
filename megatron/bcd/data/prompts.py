"""Files of prompts, one on every line."""

from __future__ import annotations

from pathlib import Path


def read_prompts(path: str, *, flag: str) -> list[str]:
    """The lines of a file that are not empty.

    Raises:
        ValueError: it can't be read, or has none; the message names `flag`.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {path} can't be read ({error})") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"{flag} {path} is empty: write a prompt on every line")
    return prompts
