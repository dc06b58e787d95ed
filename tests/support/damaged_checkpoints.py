"""Ways to damage the checkpoint of tests/unit/test_checkpoint_files.py, and what the message about each contains."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron.bcd.checkpoint import layout


def _flip(checkpoint: Path) -> None:
    content = bytearray((checkpoint / "weights.distcp").read_bytes())
    content[3] ^= 1
    (checkpoint / "weights.distcp").write_bytes(content)


def _set_checksums(content: object) -> Callable[[Path], None]:
    return lambda checkpoint: (checkpoint / layout.CHECKSUMS).write_text(json.dumps(content)) and None


def _name_file(name: str) -> Callable[[Path], None]:
    return _set_checksums({"files": {name: {"bytes": 1, "sha256": "0"}}})


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (_flip, "weights.distcp"),
    "truncated": (lambda at: os.truncate(at / "weights.distcp", 9), "weights.distcp"),
    "missing": (lambda at: (at / "weights.distcp").unlink(), "weights.distcp"),
    "missing_folder": (lambda at: shutil.rmtree(at / "objects"), "objects/state.pt"),
    "no_file": (lambda at: [(at / "weights.distcp").unlink(), (at / "weights.distcp").mkdir()], "weights.distcp"),
    "no_checksums": (lambda at: (at / layout.CHECKSUMS).unlink(), "checksums.json"),
    "half_json": (lambda at: os.truncate(at / layout.CHECKSUMS, 20), "checksums.json"),
    "deep": (lambda at: (at / layout.CHECKSUMS).write_text("[" * 10**5), "checksums.json"),
    "list": (_set_checksums([]), "checksums.json"),
    "no_record": (_set_checksums({"files": {"a": 1}}), "checksums.json"),
    "null": (_name_file("a\0"), layout.CHECKSUMS),
    "surrogate": (_name_file("\ud800"), "checksums.json"),
}
