"""The records of one cache: fixed size, in shards, each with a checksum of its own.

A record counts only where its checksum fits, and the checksum is written after it. So a fill that was killed, a file
that is truncated or missing, and a flipped bit are one case: records that are absent.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import re
import zlib
from collections.abc import Iterable, Iterator

import numpy
import numpy.typing

SHARD_BYTES = 256 * 2**20
"""A shard holds as many records as fit, and at least one."""
FILE_NAME = re.compile(r"shard_\d{6}\.(bin|crc)")
_CHECKSUM_BYTES = 4
_NEVER_WRITTEN = 0
"""In place of a checksum: the content of a file whose space was only reserved."""

Bytes = numpy.typing.NDArray[numpy.uint8]
Slots = numpy.typing.NDArray[numpy.int64]


class RecordStore:
    """Records by slot, 0 to `num_records`. Any process may write any slot; no two write the same one at once.

    Safe for several threads to read, and for one to write.
    """

    def __init__(self, folder: str, *, name: str, num_records: int, record_bytes: int) -> None:
        """`name` goes into every checksum: records of another cache fit no slot of this one."""
        self.folder = folder
        self.num_records, self.record_bytes = num_records, record_bytes
        self._records_per_shard = max(1, SHARD_BYTES // record_bytes)
        self._seed = zlib.crc32(name.encode())
        self._written: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Of all files, once written."""
        return self.num_records * (self.record_bytes + _CHECKSUM_BYTES)

    @property
    def num_shards(self) -> int:
        return -(-self.num_records // self._records_per_shard)

    def reserve(self, first_shard: int = 0, num_shards: int | None = None) -> None:
        """Reserve disk space for every record of some shards, by default of all, so that no later write finds the disk
        full. Where the file system can't, the C library writes zeros: that takes as long. Raises OSError."""
        for shard, count in itertools.islice(self._shards(), first_shard, num_shards and first_shard + num_shards):
            for path, size in ((self._path(shard, "bin"), self.record_bytes), (self._path(shard, "crc"), 4)):
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                try:
                    os.ftruncate(file, min(os.fstat(file).st_size, count * size))
                    os.posix_fallocate(file, 0, count * size)
                finally:
                    os.close(file)

    def write(self, slot: int, content: Bytes) -> None:
        """The record of `slot`, then its checksum. Raises OSError."""
        assert content.nbytes == self.record_bytes and 0 <= slot < self.num_records
        shard, place = divmod(slot, self._records_per_shard)
        view = content.reshape(-1).view(numpy.uint8).data
        _write_all(self._file(shard, "bin"), view, place * self.record_bytes)
        checksum = self._checksum(slot, view).to_bytes(_CHECKSUM_BYTES, "little")
        _write_all(self._file(shard, "crc"), memoryview(checksum), place * _CHECKSUM_BYTES)

    def close(self) -> None:
        """Make what was written visible to other processes. Raises OSError for a write error reported late."""
        while self._written:
            os.close(self._written.popitem()[1])

    def read(self, slot: int) -> Bytes | None:
        """The record of `slot`, mapped into memory and not copied; None where its checksum does not fit."""
        shard, place = divmod(slot, self._records_per_shard)
        with contextlib.suppress(OSError, ValueError):
            stored = _mapped(self._path(shard, "crc"), place * _CHECKSUM_BYTES, _CHECKSUM_BYTES)
            expected = int.from_bytes(stored.tobytes(), "little")
            if expected == _NEVER_WRITTEN:
                return None
            record = _mapped(self._path(shard, "bin"), place * self.record_bytes, self.record_bytes)
            if expected == self._checksum(slot, record.data):
                return record
        return None

    def are_there(self, slots: Iterable[int]) -> numpy.typing.NDArray[numpy.bool_]:
        """By slot, whether its record is there and undamaged. Reads all of them."""
        return numpy.array([self.read(slot) is not None for slot in slots], dtype=bool)

    def _checksum(self, slot: int, content: memoryview) -> int:
        return zlib.crc32(content, zlib.crc32(slot.to_bytes(8, "little"), self._seed)) or 1  # never _NEVER_WRITTEN

    def _shards(self) -> Iterator[tuple[int, int]]:
        """Numbers of the shards, and how many records each holds."""
        for shard, first in enumerate(range(0, self.num_records, self._records_per_shard)):
            yield shard, min(self._records_per_shard, self.num_records - first)

    def _path(self, shard: int, kind: str) -> str:
        return os.path.join(self.folder, f"shard_{shard:06d}.{kind}")

    def _file(self, shard: int, kind: str) -> int:
        path = self._path(shard, kind)
        if path not in self._written:
            if len(self._written) > 1:  # records arrive in slot order: earlier shards are complete
                self.close()
            self._written[path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        return self._written[path]


def _write_all(file: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(file, content, offset)
        content, offset = content[written:], offset + written


def _mapped(path: str, offset: int, size: int) -> Bytes:
    """Part of a file, mapped for as long as the array lives. Raises OSError or ValueError where the file is shorter.

    One mapping per record, not one per file: what was read long ago must not count as this process's memory.
    """
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        mapping = mmap.mmap(file, offset - start + size, prot=mmap.PROT_READ, offset=start)
    finally:
        os.close(file)
    return numpy.frombuffer(mapping, dtype=numpy.uint8, count=size, offset=offset - start)
