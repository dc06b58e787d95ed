"""Helpers that all tools share: command line, --json, tables and atomic writes. Needs no torch."""

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
"""The value of --json without a file: write JSON to stdout, and nothing else."""


class Parser(argparse.ArgumentParser):
    """A parser that raises ValueError where argparse would exit. Flags cannot be abbreviated."""

    def __init__(self, **options: Any) -> None:
        fixed = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**fixed | options)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def print_error(prog: str, error: Exception | str) -> int:
    """Print the error as one line of `prog` and return the exit code."""
    print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def command(prog: str) -> Callable[[Callable[[list[str]], int | None]], Callable[..., int]]:
    """Decorate `main`: pass it the command line's words, and report a user's mistake in one line with exit code 2."""

    def decorate(main: Callable[[list[str]], int | None]) -> Callable[..., int]:
        def wrapper(argv: Sequence[str] | None = None) -> int:
            try:
                return main(sys.argv[1:] if argv is None else list(argv)) or 0
            except BrokenPipeError:
                raise
            except (ValueError, OSError) as error:
                return print_error(prog, error)

        return wrapper

    return decorate


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` and exit with its code, without a traceback after Ctrl-C or a closed pipe (head, less).

    SIGTERM and Ctrl-C unwind the stack, so that child processes end and temporary files are removed.
    """
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


def add_json(group: Any) -> None:
    text = "write all figures as JSON to this file; without one to stdout, and nothing else there"
    group.add_argument("--json", nargs="?", const=STDOUT, metavar="FILE", help=text)


def write_figures(path: str | None, figures: Any, show: Callable[[], object]) -> None:
    """Write `figures` as JSON if --json was given, and call `show` unless the JSON goes to stdout."""
    text = json.dumps(figures, indent=1, ensure_ascii=False, default=str)
    if path == STDOUT:
        print(text)
        return
    show()
    if path is not None:
        write_atomically(
            path, lambda temporary: Path(temporary).write_text(f"{text}\n", encoding="utf-8"), flag="--json"
        )
        print(f"wrote {path}")


def check_positive(options: argparse.Namespace, *names: str) -> None:
    """Raise ValueError if one of these flags was given and is below 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")


def check_writable(path: str | None, *, flag: str) -> None:
    """Raise ValueError if this file cannot be written, or this folder (a path that ends in /). Creates nothing."""
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


def write_atomically(path: str, write: Callable[[str], object], *, flag: str) -> None:
    """Call `write` with a temporary name and rename the result to `path`. Raises ValueError that names `flag`."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        write(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise ValueError(f"{flag} {path}: can't be written ({error.strerror}); give another") from None
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int = 1) -> str:
    """Format aligned columns: the first `num_left` are left-aligned, the others are numbers."""
    lines, texts = [columns, *rows], []
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.ljust(width) if index < num_left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def cpu_model() -> str:
    """Return the CPU's name as Linux knows it, or else Python's."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
