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
    "flipped": (_flip, "weights.distcp is damaged"),
    "truncated": (lambda at: os.truncate(at / "weights.distcp", 9), "weights.distcp is truncated: 9 bytes, 10 were"),
    "empty": (lambda at: os.truncate(at / "weights.distcp", 0), "weights.distcp is truncated: 0 bytes"),
    "longer": (lambda at: os.truncate(at / "weights.distcp", 11), "weights.distcp is too long: 11 bytes"),
    "missing": (lambda at: (at / "weights.distcp").unlink(), "weights.distcp is missing"),
    "missing_folder": (lambda at: shutil.rmtree(at / "objects"), "objects/state.pt is missing"),
    "no_file": (lambda at: [(at / "weights.distcp").unlink(), (at / "weights.distcp").mkdir()], "p is not a file"),
    "no_checksums": (lambda at: (at / layout.CHECKSUMS).unlink(), "checksums.json is missing"),
    "no_checkpoint": (lambda at: shutil.rmtree(at), "checksums.json is missing"),
    "half_json": (lambda at: os.truncate(at / layout.CHECKSUMS, 20), "checksums.json is damaged"),
    "binary": (lambda at: (at / layout.CHECKSUMS).write_bytes(b"\xff\xfe\0"), "checksums.json is damaged"),
    "deep": (lambda at: (at / layout.CHECKSUMS).write_text("[" * 10**5), "checksums.json is damaged"),
    "list": (_set_checksums([]), "checksums.json is damaged (no table of files)"),
    "no_files": (_set_checksums({}), "checksums.json is damaged (no table of files)"),
    "no_record": (_set_checksums({"files": {"a": 1}}), "'a' has no size and checksum"),
    "no_size": (_set_checksums({"files": {"a": {"bytes": "1", "sha256": "0"}}}), "'a' has no size and checksum"),
    "outside": (_name_file("../x"), "'../x' is not a file inside"),
    "far_outside": (_name_file("/x"), "'/x' is not a file inside"),
    "null": (_name_file("a\0"), "is not a file inside"),
    "surrogate": (_name_file("\ud800"), "checksums.json is damaged"),
}
