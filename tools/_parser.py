"""The command line of the tools."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

STDOUT = "-"
"""Of --json without a file: JSON on stdout, and nothing else there."""


class Parser(argparse.ArgumentParser):
    """Raises ValueError, where argparse would leave the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def leave_with(main: Callable[[], int | None]) -> NoReturn:
    """End the process with the code of `main`; without a traceback where the reader of stdout (head, less) has left."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        code = 1
    sys.exit(code)


def add_precision(group: Any, choices: Sequence[str], *, more: str = "") -> None:
    """--precision, and the scripts' --bf16 and --fp16; `more` of its default, for --help."""
    group.add_argument("--precision", choices=choices, default="fp32", help=f"(default: fp32{more})")
    for name in choices:
        if name != "fp32":
            group.add_argument(
                f"--{name}", dest="precision", action="store_const", const=name, help=f"the same as --precision {name}"
            )


def add_json(group: Any) -> None:
    """--json [FILE], as all tools have it."""
    group.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write all figures as JSON to this file; without one to stdout, and nothing else there",
    )
