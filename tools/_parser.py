"""What the tools share: the command line, --json, tables, files that are whole or as they were. Without torch."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
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


def command(prog: str) -> Callable[[Callable[[list[str]], int | None]], Callable[..., int]]:
    """Decorates `main`: it gets the words of the command line, and a user's mistake is one line and exit code 2."""

    def decorate(main: Callable[[list[str]], int | None]) -> Callable[..., int]:
        def guarded(argv: Sequence[str] | None = None) -> int:
            try:
                return main(sys.argv[1:] if argv is None else list(argv)) or 0
            except BrokenPipeError:
                raise
            except (ValueError, OSError) as error:
                return bad_input(prog, error)

        return guarded

    return decorate


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


def tell(path: str | None, figures: Any, show: Callable[[], object]) -> None:
    """`figures` as JSON where --json asks for them; `show` prints them for people, but not into JSON on stdout."""
    text = json.dumps(figures, indent=1, ensure_ascii=False, default=str)
    if path == STDOUT:
        print(text)
        return
    show()
    if path is not None:
        write_aside(path, lambda aside: Path(aside).write_text(f"{text}\n", encoding="utf-8"), flag="--json")
        print(f"wrote {path}")


def check_can_write(path: str | None, *, flag: str) -> None:
    """Before hours are spent: raises ValueError if the file, or the folder (a path that ends in /), can't be written.
    Nothing is created yet."""
    if path is None or path == STDOUT:
        return
    folder = os.path.dirname(os.path.abspath(path)) if not path.endswith("/") else os.path.abspath(path)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    try:
        if os.path.isdir(path) and not path.endswith("/"):
            raise IsADirectoryError(0, "is a folder")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{flag} {path}: can't be written ({error.strerror}); give another") from None


def write_aside(path: str, write: Callable[[str], object], *, flag: str) -> None:
    """`write` a temporary file and rename it: `path` is whole, or as it was. Raises ValueError naming `flag`."""
    aside = f"{path}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        write(aside)
        os.replace(aside, path)
    except OSError as error:
        raise ValueError(f"{flag} {path}: can't be written ({error.strerror}); give another") from None
    finally:
        with contextlib.suppress(OSError):
            os.remove(aside)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int = 1) -> str:
    """Aligned columns; the first `num_left` hold words, the others numbers."""
    lines, texts = [columns, *rows], []
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.ljust(width) if index < num_left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int = 1) -> None:
    """As `table` says."""
    print(table(columns, rows, num_left=num_left))


def cpu_model() -> str:
    """As Linux names it, else as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
