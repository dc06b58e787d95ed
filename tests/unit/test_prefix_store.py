"""Files of the prefix cache: incomplete files, and those of another phase, are not used. Runs:
`test_prefix_faults.py`."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch

from megatron.bcd.prefix_cache.store import PrefixFile, cache_files

NUM, LENGTH, HIDDEN = 10, 4, 6
ALL = numpy.arange(NUM)


def prepared(root: Path, key: str = "a" * 64) -> PrefixFile:
    file = PrefixFile(str(root), key=key, samples=3 * ALL, shape=(LENGTH, HIDDEN), dtype="fp32")
    file.prepare()
    return file


def test_one_whole_file(tmp_path: Path) -> None:
    """Only a whole file is used, it replaces those of other phases, and a user's own file stays."""
    (tmp_path / "prefix_notes.bin").write_text("mine")
    outputs = torch.randn(LENGTH, NUM, HIDDEN, generator=torch.Generator().manual_seed(1))
    prepared(tmp_path).write(ALL[:5], outputs[:, :5])  # and killed
    for key in ("b" * 64, "a" * 64):
        file = prepared(tmp_path, key)
        assert not file.is_complete()
        file.write(ALL, file.to_entries(outputs))
        file.sync()
        file.publish()
        assert prepared(tmp_path, key).is_complete() and cache_files(str(tmp_path)) == [file.path]
        assert torch.equal(file.read(3 * ALL[[7, 2]]), outputs[:, [7, 2]])
    assert (tmp_path / "prefix_notes.bin").exists()
