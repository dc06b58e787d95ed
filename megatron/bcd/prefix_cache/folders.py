"""The caches below --bcd-prefix-cache: found, created, and deleted to free space for others. No collectives."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass

import numpy

from megatron.bcd.prefix_cache.key import CacheKey, digest_of
from megatron.bcd.prefix_cache.store import FILE_NAME, RecordStore, Slots
from megatron.bcd.runtime import atomic_io

_FOLDER_NAME = re.compile(r"prefix_[0-9a-f]{32}(\.incomplete)?")
_MANIFEST = "manifest.json"
_SAMPLES = "samples.bin"


class Cache:
    """One cache: its key, which samples it holds, and their records. Slots are in the order of the samples."""

    def __init__(self, root: str, key: CacheKey, samples: Slots) -> None:
        """`samples`: dataset indices, ascending."""
        self.key, self.samples = key, samples
        self.folder = os.path.join(root, key.name)
        self.store = RecordStore(self.folder, name=key.name, num_records=key.num_records, record_bytes=key.record_bytes)

    def slots_of(self, samples: Slots) -> Slots:
        """Where the records of these dataset indices are; -1 for those that the cache does not hold."""
        places = numpy.searchsorted(self.samples, samples)
        places[places == len(self.samples)] = 0
        return numpy.where(self.samples[places] == samples, places, -1)


def samples_digest(samples: Slots) -> str:
    """The part of a key that stands for the dataset indices `samples`, ascending."""
    return digest_of([numpy.ascontiguousarray(samples, dtype="<i8").tobytes()])


def prepare(root: str, key: CacheKey, samples: Slots) -> Cache:
    """The cache of `key`, whose disk space is still to be reserved; existing records are kept. Raises OSError."""
    cache = Cache(root, key, samples)
    if _read_key(cache.folder) != key:
        delete(cache.folder)
        aside = cache.folder + ".incomplete"
        delete(aside)
        os.makedirs(aside)
        atomic_io.write(os.path.join(aside, _SAMPLES), numpy.ascontiguousarray(samples, dtype="<i8").tobytes())
        atomic_io.write(os.path.join(aside, _MANIFEST), key.to_json().encode())
        os.rename(aside, cache.folder)
        atomic_io.sync(root)
    return cache


def shorter(root: str, key: CacheKey) -> list[Cache]:
    """Caches whose records are the input of a layer of the prefix of `key`, or its outputs for other samples; the
    longest prefix first. Records are not checked for damage."""
    found = []
    for folder in _own_folders(root):
        other = _read_key(folder)
        if other is None or other == key or not key.can_start_from(other):
            continue
        with contextlib.suppress(OSError, ValueError):
            samples = numpy.fromfile(os.path.join(folder, _SAMPLES), dtype="<i8").astype(numpy.int64)
            if len(samples) == other.num_records and samples_digest(samples) == other.samples:
                found.append(Cache(root, other, samples))
    return sorted(found, key=lambda cache: -cache.key.num_layers)


def bytes_on_disk(root: str) -> int:
    """Of all caches below `root`."""
    return sum(_size(folder) for folder in _own_folders(root))


@dataclass(frozen=True, kw_only=True)
class SpaceCheck:
    """Whether a new cache fits on the disk."""

    is_enough: bool
    reason: str = ""
    """Why not."""
    to_delete: tuple[str, ...] = ()
    """Folders to delete first."""


def check_space(root: str, key: CacheKey, num_bytes: int, *, limit: int | None) -> SpaceCheck:
    """Whether a cache of `num_bytes` fits below `root`: within `limit`, for all caches together, and on the disk.

    The default limit is half of the disk space that is free or used by caches: each phase creates another cache, and
    checkpoints need space too. Older caches to delete are named: first those that this prefix can't start from, oldest
    first. Raises OSError.
    """
    present = {folder: _size(folder) for folder in _own_folders(root)}
    mine = present.pop(os.path.join(root, key.name), 0)
    free = shutil.disk_usage(root).free + mine
    described = (
        f"--bcd-prefix-cache-max-gib {limit / 2**30:g}" if limit is not None else "half of what is free on the disk"
    )
    if limit is None:
        limit = (free + sum(present.values())) // 2
    if num_bytes > limit:
        return SpaceCheck(is_enough=False, reason=f"more than {described}")
    useful = {cache.folder for cache in shorter(root, key)}
    to_delete: list[str] = []
    for folder in sorted(present, key=lambda folder: (folder in useful, os.stat(folder).st_mtime_ns)):
        if sum(present.values()) + num_bytes <= limit and num_bytes <= free:
            break
        to_delete.append(folder)
        free += present.pop(folder)
    if num_bytes > free:
        return SpaceCheck(is_enough=False, reason=f"the disk has room for {free / 2**30:,.2f} GiB")
    return SpaceCheck(is_enough=True, to_delete=tuple(to_delete))


def clean_leftovers(root: str) -> None:
    """Remove half-created caches of a killed run. Raises OSError."""
    for folder in _own_folders(root):
        if folder.endswith(".incomplete"):
            delete(folder)


def delete(folder: str) -> None:
    """Remove a cache. A folder that holds anything else is left untouched, with a FileExistsError."""
    if not os.path.lexists(folder):
        return
    if not _is_own(folder):
        raise FileExistsError(17, "is no prefix cache, and in the way of one", folder)
    for name in sorted(os.listdir(folder)):  # the manifest goes before the shards: what is left is no cache
        os.unlink(os.path.join(folder, name))
    os.rmdir(folder)


def _own_folders(root: str) -> list[str]:
    try:
        names = sorted(os.listdir(root))
    except FileNotFoundError:
        return []
    folders = (os.path.join(root, name) for name in names if _FOLDER_NAME.fullmatch(name))
    return [folder for folder in folders if _is_own(folder)]


def _is_own(folder: str) -> bool:
    """Whether the folder holds nothing but files of this module."""
    if os.path.islink(folder) or not os.path.isdir(folder):
        return False
    return all(name in (_MANIFEST, _SAMPLES) or FILE_NAME.fullmatch(name) for name in os.listdir(folder))


def _read_key(folder: str) -> CacheKey | None:
    with contextlib.suppress(OSError, ValueError):
        with open(os.path.join(folder, _MANIFEST), encoding="utf-8") as file:
            key = CacheKey.from_json(file.read())
        return key if os.path.basename(folder) == key.name else None
    return None


def _size(folder: str) -> int:
    total = 0
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            total += os.stat(os.path.join(folder, name)).st_size
    return total
