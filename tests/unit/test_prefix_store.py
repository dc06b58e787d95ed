"""The file of the prefix cache: which entries count as there, and what fits."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron.bcd.prefix_cache import controller
from megatron.bcd.prefix_cache.controller import bits_digest
from megatron.bcd.prefix_cache.store import PrefixFile, cache_files

NUM, LENGTH, HIDDEN = 10, 4, 6
ENTRY_BYTES = LENGTH * HIDDEN * 4
ALL = numpy.arange(NUM)
OUTPUTS = torch.randn(LENGTH, NUM, HIDDEN, generator=torch.Generator().manual_seed(1))


def prepared(root: Path, key: str = "a" * 64, dtype: str = "fp32", samples: Any = 3 * ALL) -> PrefixFile:
    file = PrefixFile(str(root), key=key, samples=samples, shape=(LENGTH, HIDDEN), dtype=dtype)
    assert file.prepare(max_bytes=None) == ""
    return file


def filled(root: Path, **others: Any) -> PrefixFile:
    file = prepared(root, **others)
    assert file.missing(ALL).tolist() == list(range(NUM))
    file.write(ALL[5:], file.to_entries(OUTPUTS[:, 5:]))
    file.write(ALL[:5], file.to_entries(torch.cat([OUTPUTS[:, :5], OUTPUTS[:, 4:5]], dim=1)))  # padded
    assert not len(file.missing(ALL))
    return file


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_was_written_is_read(tmp_path: Path, dtype: str) -> None:
    """An entry of another sample, or in another precision."""
    samples = numpy.array([27, 0, 3, 0])
    read = filled(tmp_path, dtype=dtype).read(samples, torch.float32)
    expected = OUTPUTS[:, samples // 3]
    assert torch.equal(read, expected if dtype == "fp32" else expected.bfloat16().float())


def flip(path: str, place: int) -> None:
    with open(path, "r+b") as file:
        content = bytearray(file.read())
        content[place] ^= 4
        file.seek(0)
        file.write(content)


def swap(path: str) -> None:
    """Entries 0 and 1 in each other's place, with their checksums."""
    content = Path(path).read_bytes()
    for start, size in ((0, ENTRY_BYTES), (NUM * ENTRY_BYTES, 4)):
        end = start + 2 * size
        content = content[:start] + content[start + size : end] + content[start : start + size] + content[end:]
    Path(path).write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[str], Any], list[int]]] = {
    "flipped bit": (lambda path: flip(path, 2 * ENTRY_BYTES + 7), [2]),
    "flipped checksum": (lambda path: flip(path, NUM * ENTRY_BYTES + 4 * 8), [8]),
    "cut off": (lambda path: os.truncate(path, NUM * ENTRY_BYTES + 7), ALL.tolist()),
    "entries exchanged": (swap, [0, 1]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_missing(tmp_path: Path, damage: str) -> None:
    """A damaged entry that counts, or an intact one that is thrown away with it."""
    do, lost = DAMAGES[damage]
    do(filled(tmp_path).path)
    assert prepared(tmp_path).missing(ALL).tolist() == lost


def test_a_file_of_other_weights(tmp_path: Path) -> None:
    """A foreign file under this one's name whose checksums fit; files of earlier phases that fill the disk; a user's
    own file that is removed with them."""
    (tmp_path / "prefix_notes.bin").write_text("mine")
    content = Path(filled(tmp_path, key="b" * 64).path).read_bytes()
    file = prepared(tmp_path)
    assert cache_files(str(tmp_path)) == [file.path] and (tmp_path / "prefix_notes.bin").exists()
    Path(file.path).write_bytes(content)
    assert prepared(tmp_path).missing(ALL).tolist() == ALL.tolist()


def test_room(tmp_path: Path) -> None:
    """A file above the limit, or on a disk that it would fill."""
    file = PrefixFile(str(tmp_path), key="a" * 64, samples=ALL, shape=(LENGTH, HIDDEN), dtype="fp32")
    assert file.prepare(max_bytes=file.num_bytes - 1) and not cache_files(str(tmp_path))
    assert not file.prepare(max_bytes=file.num_bytes) and cache_files(str(tmp_path))
    huge = PrefixFile(str(tmp_path), key="b" * 64, samples=ALL, shape=(2**30, 2**30), dtype="fp32")
    assert huge.prepare(max_bytes=None) and huge.prepare(max_bytes=2**70)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_bit_and_any_place_of_the_weights_count(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that moved, were exchanged or changed sign, and whose cache is used all the same."""
    weights = torch.randn(40, 30, generator=torch.Generator().manual_seed(1)).to(dtype)
    changes = [weights.clone() for _ in range(6)]
    changes[1][3, 4] *= -1
    changes[2] = weights.roll(1, 0)
    changes[3][0], changes[3][1] = weights[1], weights[0]
    changes[4] = weights.t().contiguous().reshape(40, 30)
    changes[5].view(torch.int16)[39, -1] ^= 1
    digests = [bits_digest(changed) for changed in changes]
    assert digests[0] == bits_digest(weights) and len(set(digests)) == 6
    monkeypatch.setattr(controller, "_DIGEST_CHUNK", 300)
    assert [bits_digest(changed) for changed in changes] == digests
