"""Writes the Python standard library's source as JSON lines ``{"text": source}``: real text without a download.

One document per ``*.py`` file in the order of their paths, test code left out, up to ``--megabytes`` of text:
the same bytes each time for one Python version.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Tests and generated tables are poor reading, site-packages is not the standard library.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}


def documents(stdlib: Path, max_bytes: int) -> Iterator[str]:
    """The sources under ``stdlib``, whole files only, at most ``max_bytes`` of UTF-8 together."""
    used = 0
    for path in sorted(stdlib.rglob("*.py")):
        if SKIPPED_FOLDERS.intersection(path.relative_to(stdlib).parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        size = len(text.encode())
        if used + size > max_bytes:
            return
        if text.strip():
            used += size
            yield text


def fail(prog: str, message: str) -> int:
    print(f"{prog}: error: {message}", file=sys.stderr)
    return 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="file to write (.jsonl)")
    parser.add_argument("--megabytes", type=float, default=4.0, help="at most this much text (default 4)")
    args = parser.parse_args()

    texts = list(documents(Path(sysconfig.get_path("stdlib")), int(args.megabytes * 1e6)))
    if not texts:
        return fail(parser.prog, f"--megabytes {args.megabytes:g} is too small for one file; give more")
    unfinished = args.output.with_name(args.output.name + ".new")
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("w", encoding="utf-8") as lines:
            lines.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        os.replace(unfinished, args.output)
    except OSError as error:
        return fail(parser.prog, f"--output {args.output} cannot be written: {error.strerror}")
    size = sum(len(text.encode()) for text in texts)
    print(f"{args.output}: {len(texts)} documents, {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
