"""The command line of the tools."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

STDOUT = "-"
"""Of --json without a file: JSON on stdout, and nothing else there."""


class Parser(argparse.ArgumentParser):
    """Raises ValueError, where argparse would leave the process. No flag has a short form; a description keeps its
    lines."""

    def __init__(self, **options: Any) -> None:
        settled = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**settled | options)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def bad_input(prog: str, error: Exception | str) -> int:
    """Print the error as one line of `prog`; its exit code."""
    print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def leave_with(main: Callable[[], int | None]) -> NoReturn:
    """End the process with the code of `main`; without a traceback after Ctrl-C, or where the reader of stdout (head,
    less) has left. SIGTERM and Ctrl-C unwind the stack: no process that the tool started outlives it, and no partial
    file stays."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
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
