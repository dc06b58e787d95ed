"""The files of the prefix cache: what counts as there, whose folders are touched, what fits."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from megatron.bcd.prefix_cache import controller, folders, store
from megatron.bcd.prefix_cache.key import CacheKey
from megatron.bcd.prefix_cache.store import RecordStore

NUM_RECORDS, SHAPE = 10, (4, 96)
KEY = CacheKey(
    prefix=("embedding", "layer 0", "layer 1"),
    samples=folders.samples_digest(numpy.arange(NUM_RECORDS)),
    num_records=NUM_RECORDS,
    record_shape=SHAPE,
    dtype="fp32",
    data="data",
    network={"hidden_size": "96"},
)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four records each, so that the last shard is a short one."""
    monkeypatch.setattr(store, "SHARD_BYTES", 4 * KEY.record_bytes + 5)


def record(slot: int) -> Any:
    return numpy.random.default_rng(slot).integers(0, 255, KEY.record_bytes, dtype=numpy.uint8)


def prepared(root: str, key: CacheKey, samples: Any) -> folders.Cache:
    cache = folders.prepare(root, key, samples)
    cache.store.reserve()
    return cache


def filled(root: Path, key: CacheKey = KEY, samples: Any = None) -> folders.Cache:
    cache = prepared(str(root), key, numpy.arange(key.num_records) if samples is None else samples)
    for slot in range(key.num_records):
        cache.store.write(slot, record(slot)[: key.record_bytes])
    cache.store.close()
    return cache


def there(cache: folders.Cache) -> list[int]:
    return numpy.flatnonzero(cache.store.are_there(range(cache.key.num_records))).tolist()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """A record at another place of a shard, or of another shard; bytes that are not those of the plan."""
    cache = filled(tmp_path)
    for slot in range(NUM_RECORDS):
        assert (cache.store.read(slot) == record(slot)).all()  # type: ignore[attr-defined]
    sizes = [os.path.getsize(path) for path in Path(cache.folder).glob("shard_*")]
    assert sum(sizes) == cache.store.num_bytes and len(sizes) == 6
    assert folders.bytes_on_disk(str(tmp_path)) == cache.store.num_bytes + sum(
        os.path.getsize(os.path.join(cache.folder, name)) for name in ("manifest.json", "samples.bin")
    )


def flip(folder: Path, name: str, place: int) -> None:
    with open(folder / name, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))


def swap(folder: Path) -> None:
    """Records 0 and 1 in each other's place, with their checksums."""
    for kind, size in (("bin", KEY.record_bytes), ("crc", 4)):
        path = folder / f"shard_000000.{kind}"
        content = path.read_bytes()
        path.write_bytes(content[size : 2 * size] + content[:size] + content[2 * size :])


def other_shard(folder: Path) -> None:
    for kind in ("bin", "crc"):
        (folder / f"shard_000001.{kind}").write_bytes((folder / f"shard_000000.{kind}").read_bytes())


DAMAGES: dict[str, tuple[Callable[[Path], Any], list[int]]] = {
    "flipped bit": (lambda folder: flip(folder, "shard_000000.bin", 2 * KEY.record_bytes + 7), [2]),
    "flipped checksum": (lambda folder: flip(folder, "shard_000002.crc", 1), [8]),
    "shard cut off": (lambda folder: os.truncate(folder / "shard_000001.bin", KEY.record_bytes + 1), [5, 6, 7]),
    "checksums cut off": (lambda folder: os.truncate(folder / "shard_000001.crc", 6), [5, 6, 7]),
    "shard absent": (lambda folder: os.unlink(folder / "shard_000002.bin"), [8, 9]),
    "checksums absent": (lambda folder: os.unlink(folder / "shard_000002.crc"), [8, 9]),
    "records exchanged": (swap, [0, 1]),
    "shard of other slots": (other_shard, [4, 5, 6, 7]),
    "manifest damaged": (lambda folder: flip(folder, "manifest.json", 40), list(range(10))),
    "manifest absent": (lambda folder: os.unlink(folder / "manifest.json"), list(range(10))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_not_there(tmp_path: Path, damage: str) -> None:
    """A damaged record that counts; an intact one that is thrown away with it; room that is not taken again."""
    do, lost = DAMAGES[damage]
    do(Path(filled(tmp_path).folder))
    cache = prepared(str(tmp_path), KEY, numpy.arange(NUM_RECORDS))
    assert there(cache) == [slot for slot in range(NUM_RECORDS) if slot not in lost]
    for slot in lost:
        cache.store.write(slot, record(slot))
    cache.store.close()
    assert there(cache) == list(range(NUM_RECORDS))


def test_records_of_another_cache(tmp_path: Path) -> None:
    """Files of a cache of other weights, copied over this one's, that count because their checksums fit them."""
    other = filled(tmp_path, dataclasses.replace(KEY, prefix=("embedding", "layer 0", "other")))
    cache = filled(tmp_path)
    assert other.folder != cache.folder
    for path in Path(other.folder).glob("shard_*"):
        (Path(cache.folder) / path.name).write_bytes(path.read_bytes())
    assert there(cache) == []


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CacheKey)])
def test_every_part_of_the_key_counts(field: str) -> None:
    """A cache that is taken for another run's though weights, data, precision or network are not the same."""
    other: dict[str, Any] = {
        "prefix": ("embedding", "layer 1", "layer 0"),
        "record_shape": (96, 4),
        "num_records": 11,
        "network": {"hidden_size": "97"},
        "format": 0,
        "dtype": "bf16",
    }
    changed = dataclasses.replace(KEY, **{field: other.get(field, "other")})
    assert changed.name != KEY.name
    assert CacheKey.from_json(changed.to_json()) == changed
    assert KEY.can_start_from(changed) == (field in ("samples", "num_records"))


def test_a_fill_that_was_killed_keeps_what_it_wrote(tmp_path: Path, repo_root: Path) -> None:
    """A half-written record that counts, or whole ones that do not, after SIGKILL."""
    prepared(str(tmp_path), KEY, numpy.arange(NUM_RECORDS))
    program = textwrap.dedent("""
        import os, signal, sys, numpy
        from megatron.bcd.prefix_cache import store
        store.SHARD_BYTES = int(sys.argv[3])
        one = store.RecordStore(sys.argv[1], name=sys.argv[2], num_records=10, record_bytes=int(sys.argv[4]))
        for slot in range(5):
            one.write(slot, numpy.random.default_rng(slot).integers(0, 255, one.record_bytes, dtype=numpy.uint8))
        write_all = store._write_all
        def killed(file, content, offset):
            write_all(file, content[:100], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        store._write_all = killed
        one.write(5, numpy.ones(one.record_bytes, dtype=numpy.uint8))
    """)
    folder = str(tmp_path / KEY.name)
    command = [sys.executable, "-c", program, folder, KEY.name, str(store.SHARD_BYTES), str(KEY.record_bytes)]
    assert subprocess.run(command, cwd=repo_root).returncode == -9
    assert there(prepared(str(tmp_path), KEY, numpy.arange(NUM_RECORDS))) == [0, 1, 2, 3, 4]


def test_shorter_prefixes_are_found(tmp_path: Path) -> None:
    """A cache of other weights or another network that is extended, or the shorter of two that is."""
    one = filled(tmp_path, dataclasses.replace(KEY, prefix=KEY.prefix[:2]))
    same_length = numpy.array([3, 5, 20])
    two = filled(
        tmp_path,
        dataclasses.replace(KEY, samples=folders.samples_digest(same_length), num_records=3),
        samples=same_length,
    )
    filled(tmp_path, dataclasses.replace(KEY, prefix=("embedding", "other")))
    filled(tmp_path, dataclasses.replace(KEY, prefix=KEY.prefix[:2], dtype="bf16"))
    filled(tmp_path, dataclasses.replace(KEY, prefix=(*KEY.prefix, "layer 2")))
    filled(tmp_path)
    assert [cache.folder for cache in folders.shorter(str(tmp_path), KEY)] == [two.folder, one.folder]
    assert two.slots_of(numpy.array([0, 3, 4, 20, 21])).tolist() == [-1, 0, -1, 2, -1]


def test_a_list_of_samples_that_is_damaged(tmp_path: Path) -> None:
    """An older cache whose records are taken for other samples'."""
    cache = filled(tmp_path, dataclasses.replace(KEY, prefix=KEY.prefix[:2]))
    flip(Path(cache.folder), "samples.bin", 8)
    assert folders.shorter(str(tmp_path), KEY) == []


def test_room(tmp_path: Path) -> None:
    """A cache above the limit; one that could be extended deleted before one that could not, or more than needed."""
    useless = filled(tmp_path, dataclasses.replace(KEY, prefix=("embedding", "other")))
    useful = filled(tmp_path, dataclasses.replace(KEY, prefix=KEY.prefix[:2]))
    present, mine = folders.bytes_on_disk(str(tmp_path)), RecordStore("", name="", num_records=10, record_bytes=1536)
    need = mine.num_bytes

    def asked(limit: int | None) -> tuple[bool, tuple[str, ...]]:
        room = folders.check_space(str(tmp_path), KEY, need, limit=limit)
        assert bool(room.reason) == (not room.is_enough)
        return room.is_enough, room.to_delete

    assert asked(None) == asked(need + present) == (True, ())
    assert asked(need + present - 1) == (True, (useless.folder,))
    assert asked(need) == (True, (useless.folder, useful.folder))
    assert asked(need - 1) == (False, ())
    assert not folders.check_space(str(tmp_path), KEY, 2**60, limit=None).is_enough


def test_only_caches_are_deleted(tmp_path: Path) -> None:
    """A user's own file that is lost, because it lies in the folder."""
    (tmp_path / "prefix_notes").mkdir()
    mixed = Path(filled(tmp_path).folder)
    (mixed / "thesis.txt").write_text("years of work")
    assert folders.bytes_on_disk(str(tmp_path)) == 0
    with pytest.raises(FileExistsError):
        folders.delete(str(mixed))
    assert (mixed / "thesis.txt").exists() and (mixed / "manifest.json").exists()
    (tmp_path / f"{KEY.name}.incomplete").mkdir()
    folders.clean_leftovers(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["prefix_notes", KEY.name])


def test_space_is_reserved_in_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective that all ranks but one wait in, until its timeout, while a large cache is reserved."""
    calls: list[tuple[int, int]] = []
    reserve = store.RecordStore.reserve

    def noting(one: store.RecordStore, first_shard: int = 0, num_shards: int | None = None) -> None:
        calls.append((first_shard, num_shards or one.num_shards))
        reserve(one, first_shard, num_shards)

    monkeypatch.setattr(store.RecordStore, "reserve", noting)
    monkeypatch.setattr(controller.collectives, "on_rank_0", lambda function: function())
    monkeypatch.setattr(controller, "_SHARDS_AT_ONCE", 2)
    cache = folders.prepare(str(tmp_path), KEY, numpy.arange(NUM_RECORDS))
    assert controller._reserve(cache) is None
    assert calls == [(0, 2), (2, 2)] and cache.store.num_shards == 3
    files = Path(cache.folder).glob("shard_*")
    assert sum(path.stat().st_size for path in files) == cache.store.num_bytes
    assert all(path.stat().st_blocks for path in Path(cache.folder).glob("shard_*"))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.RecordStore, "reserve", full)
    assert "No space left on device" in str(controller._reserve(cache))
