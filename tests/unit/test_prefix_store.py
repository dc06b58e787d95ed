"""The prefix cache: entries in another's place, and files of others.

What damage, limits and precisions do to a run: distributed/test_prefix_faults.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy
import torch

from megatron.bcd.prefix_cache.store import PrefixFile, cache_files

NUM, LENGTH, HIDDEN = 10, 4, 6
ENTRY_BYTES = LENGTH * HIDDEN * 4
ALL = numpy.arange(NUM)


def prepared(root: Path, key: str = "a" * 64) -> PrefixFile:
    file = PrefixFile(str(root), key=key, samples=3 * ALL, shape=(LENGTH, HIDDEN), dtype="fp32")
    assert file.prepare(max_bytes=None) == ""
    return file


def filled(root: Path, key: str = "a" * 64) -> PrefixFile:
    file = prepared(root, key)
    outputs = torch.randn(LENGTH, NUM, HIDDEN, generator=torch.Generator().manual_seed(1))
    file.write(ALL, file.to_entries(outputs))
    assert not len(file.missing(ALL))
    return file


def test_exchanged_entries_are_missing(tmp_path: Path) -> None:
    """An entry of another sample, with its checksum."""
    path = Path(filled(tmp_path).path)
    content = path.read_bytes()
    for start, size in ((0, ENTRY_BYTES), (NUM * ENTRY_BYTES, 4)):
        end = start + 2 * size
        content = content[:start] + content[start + size : end] + content[start : start + size] + content[end:]
    path.write_bytes(content)
    assert prepared(tmp_path).missing(ALL).tolist() == [0, 1]


def test_a_file_of_other_weights(tmp_path: Path) -> None:
    """A foreign file under this one's name whose checksums fit; files of earlier phases that fill the disk; a user's
    own file that is removed with them."""
    (tmp_path / "prefix_notes.bin").write_text("mine")
    content = Path(filled(tmp_path, key="b" * 64).path).read_bytes()
    file = prepared(tmp_path)
    assert cache_files(str(tmp_path)) == [file.path] and (tmp_path / "prefix_notes.bin").exists()
    Path(file.path).write_bytes(content)
    assert prepared(tmp_path).missing(ALL).tolist() == ALL.tolist()
