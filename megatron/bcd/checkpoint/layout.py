"""What a checkpoint is on disk. No collectives: the caller decides which rank calls what.

Below a root (--save, --load), as stock Megatron-LM lays it out::

    iter_0000007/                        complete
    iter_0000007/checksums.json          {"files": {name: {"bytes": n, "sha256": hex}}}, all other files in it
    latest_checkpointed_iteration.txt    the number of the newest; moves last
    .lock                                held by the job that writes here (`folder_users`)

and for a moment, or after a kill, until `clean_leftovers`::

    iter_0000007.incomplete/             under construction
    iter_0000007.replaced/               complete; another of that number takes its place
    iter_0000007.removed/                on its way out, perhaps half deleted

Nothing is ever changed inside a folder with a complete one's name: such a name appears and disappears by renaming. So
a kill, a full disk or a power cut leaves the checkpoint before the one at work. An OSError reaches the caller as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from typing import TypedDict

from megatron.bcd.runtime import atomic_io

TRACKER = "latest_checkpointed_iteration.txt"
CHECKSUMS = "checksums.json"

_INCOMPLETE, _REPLACED, _REMOVED = ".incomplete", ".replaced", ".removed"
_PIECE_BYTES = 8 * 2**20


class FileRecord(TypedDict):
    """Size in bytes and SHA-256 (64 hexadecimal digits) of one file."""

    bytes: int
    sha256: str


def iteration_folder(root: str, iteration: int) -> str:
    """Where checkpoint `iteration` lies when it is complete."""
    return os.path.join(root, f"iter_{iteration:07d}")


def aside_folder(root: str, iteration: int) -> str:
    """Where checkpoint `iteration` is written before `publish`."""
    return iteration_folder(root, iteration) + _INCOMPLETE


# --- writing


def file_record(path: str) -> FileRecord:
    """Size and checksum of a file. Reads 8 MiB at a time and hashes without the GIL: threads can share the work."""
    digest, size = hashlib.sha256(), 0
    piece = memoryview(bytearray(_PIECE_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
            size += count
    return {"bytes": size, "sha256": digest.hexdigest()}


def finish(aside: str, records: Mapping[str, FileRecord]) -> None:
    """Write ``checksums.json`` into `aside` and bring the folder to the disk. `records` by name relative to `aside`.

    Files written by other machines have to be synced by their writers; syncing them again here costs nothing.

    Raises:
        ValueError: a file has no record, or a record no file.
    """
    found = _files_in(aside)
    for name in sorted(found ^ records.keys()):
        fault = "has no checksum" if name in found else "has a checksum and is not there"
        raise ValueError(f"{os.path.join(aside, name)} {fault}")
    content = {"files": {name: records[name] for name in sorted(records)}}
    atomic_io.write(os.path.join(aside, CHECKSUMS), json.dumps(content, indent=1).encode())
    for name in records:
        atomic_io.sync(os.path.join(aside, name))
    for folder, _, _ in os.walk(aside):
        atomic_io.sync(folder)


def publish(root: str, iteration: int) -> None:
    """Make the finished `aside_folder` the complete checkpoint `iteration`, then let the tracker name it.

    A complete one of the same number is replaced; until the new one has its name, the old one is whole.

    Raises:
        FileNotFoundError: there is no finished `aside_folder`; nothing was changed.
    """
    aside, target = aside_folder(root, iteration), iteration_folder(root, iteration)
    replaced = target + _REPLACED
    os.stat(os.path.join(aside, CHECKSUMS))
    if os.path.lexists(target):
        _remove(replaced)
        os.rename(target, replaced)
    try:
        os.rename(aside, target)
    except OSError:
        if os.path.lexists(replaced):
            os.rename(replaced, target)
        raise
    atomic_io.sync(root)
    atomic_io.write(os.path.join(root, TRACKER + ".new"), str(iteration).encode())
    os.replace(os.path.join(root, TRACKER + ".new"), os.path.join(root, TRACKER))
    atomic_io.sync(root)
    _remove(replaced)


def prune(root: str, keep: int) -> list[int]:
    """Delete all but the newest `keep` complete checkpoints up to the one that the tracker names, and never that one.

    Folders without ``checksums.json`` are not ours: they do not count and stay. Returns the deleted iterations.

    Raises:
        ValueError: `keep` is below 1.
    """
    if keep < 1:
        raise ValueError(f"{keep} checkpoints to keep; keep at least 1")
    named = read_tracker(root)
    # what lies above the tracker's belongs to a run that was given up, and is no candidate any more
    usable = [iteration for iteration in _complete(root) if named is None or iteration <= named]
    old = [iteration for iteration in usable[:-keep] if iteration != named]
    for iteration in old:
        _remove(iteration_folder(root, iteration))
    return old


def clean_leftovers(root: str) -> list[str]:
    """Put right what a killed job left in `root`; only under its lock, and not while a checkpoint is written.

    An unfinished checkpoint is deleted. One that was to be replaced gets its name back where its successor never
    came. Returns one line for each.
    """
    done = []
    for iteration in _iterations(root, _REPLACED):
        target = iteration_folder(root, iteration)
        if os.path.lexists(target):
            _remove(target + _REPLACED)
            done.append(f"{target + _REPLACED} deleted")
        else:
            os.rename(target + _REPLACED, target)
            atomic_io.sync(root)
            done.append(f"{target} restored: the job that was to replace it was killed")
    for suffix in (_INCOMPLETE, _REMOVED):
        for iteration in _iterations(root, suffix):
            leftover = iteration_folder(root, iteration) + suffix
            _delete(leftover)
            done.append(f"{leftover} deleted")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(root, TRACKER + ".new"))
    return done


# --- reading


def read_tracker(root: str) -> int | None:
    """The iteration that the tracker names; None where it is missing or holds no number."""
    try:
        with open(os.path.join(root, TRACKER), "rb") as file:
            text = file.read(32).strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdigit() else None


def candidates(root: str) -> list[int]:
    """Iterations worth trying, best first; empty where there is no checkpoint.

    The one that the tracker names (ours or a stock Megatron-LM's), then complete ones of ours below it, newest first:
    what lies above it belongs to a run that was given up. Without a readable tracker all complete ones of ours.
    """
    newest_first = _complete(root)[::-1]
    named = read_tracker(root)
    if named is None:
        return newest_first
    first = [named] if os.path.isdir(iteration_folder(root, named)) else []
    return first + [iteration for iteration in newest_first if iteration < named]


def is_foreign(folder: str) -> bool:
    """Whether `folder` may be a stock Megatron-LM checkpoint: Megatron Core's format, and no ``checksums.json``."""
    has_checksums = os.path.lexists(os.path.join(folder, CHECKSUMS))
    return not has_checksums and os.path.isfile(os.path.join(folder, "metadata.json"))


def damage(folder: str, *, part: int = 0, num_parts: int = 1) -> str | None:
    """One line about the first file of a complete checkpoint that is not as it was written; None where all are.

    Every part compares all sizes; the files are divided by bytes over `num_parts`, and part `part` reads and hashes
    its own. A file that ``checksums.json`` does not name is left out: nothing says how it should be.
    """
    checksums = os.path.join(folder, CHECKSUMS)
    try:
        records = _read_records(checksums)
    except FileNotFoundError:
        return f"{checksums} is missing"
    except (OSError, ValueError, RecursionError) as error:
        return f"{checksums} is damaged ({' '.join(str(error).split())[:100]})"
    for name in sorted(records):
        path, expected = os.path.join(folder, name), records[name]["bytes"]
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return f"{path} is missing"
        except OSError as error:
            return f"{path} can't be read ({error.strerror})"
        if not stat.S_ISREG(status.st_mode):
            return f"{path} is not a file"
        if status.st_size != expected:
            fault = "is truncated" if status.st_size < expected else "is too long"
            return f"{path} {fault}: {status.st_size} bytes, {expected} were written"
    for name in _share(records, part, num_parts):
        path = os.path.join(folder, name)
        try:
            if file_record(path) != records[name]:
                return f"{path} is damaged: its checksum is not that of what was written"
        except OSError as error:
            return f"{path} can't be read ({error.strerror})"
    return None


# --- parts of the above


def _iterations(root: str, suffix: str = "") -> list[int]:
    """Numbers of the folders ``iter_NNNNNNN`` + `suffix`, ascending."""
    name = re.compile(r"iter_([0-9]{7,18})" + re.escape(suffix))
    try:
        found = [name.fullmatch(entry) for entry in os.listdir(root)]
    except FileNotFoundError:
        return []
    numbers = sorted(int(match[1]) for match in found if match)
    return [number for number in numbers if os.path.isdir(iteration_folder(root, number) + suffix)]


def _complete(root: str) -> list[int]:
    """Iterations of the complete checkpoints that have checksums, ascending."""
    return [
        iteration
        for iteration in _iterations(root)
        if os.path.isfile(os.path.join(iteration_folder(root, iteration), CHECKSUMS))
    ]


def _files_in(folder: str) -> set[str]:
    """Relative names of all files below `folder`, without its ``checksums.json``."""
    found = {
        os.path.relpath(os.path.join(parent, name), folder) for parent, _, names in os.walk(folder) for name in names
    }
    return found - {CHECKSUMS}


def _read_records(path: str) -> dict[str, FileRecord]:
    """The content of ``checksums.json``. Raises OSError and ValueError (also UnicodeDecodeError), RecursionError."""
    with open(path, encoding="utf-8") as file:
        content = json.load(file)
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict):
        raise ValueError("no table of files")
    for name, record in files.items():
        outside = os.path.isabs(name) or name.split("/")[0] == ".." or name != os.path.normpath(name)
        if outside or name == "." or b"\0" in os.fsencode(name):
            raise ValueError(f"{name!r} is not a file inside")
        if not isinstance(record, dict) or [type(record.get(key)) for key in ("bytes", "sha256")] != [int, str]:
            raise ValueError(f"{name!r} has no size and checksum")
    return {name: {"bytes": record["bytes"], "sha256": record["sha256"]} for name, record in files.items()}


def _share(records: Mapping[str, FileRecord], part: int, num_parts: int) -> list[str]:
    """Names of the files that `part` hashes, in order: the largest first, each to the part with least bytes so far."""
    load = [0] * num_parts
    mine = []
    for name in sorted(records, key=lambda name: (-records[name]["bytes"], name)):
        taker = load.index(min(load))
        load[taker] += records[name]["bytes"]
        if taker == part:
            mine.append(name)
    return sorted(mine)


def _remove(folder: str) -> None:
    """Delete a whole checkpoint, if it is there, under a name that no half of it can be taken for a whole one."""
    if not os.path.lexists(folder):
        return
    removed = folder.removesuffix(_REPLACED) + _REMOVED
    _delete(removed)
    os.rename(folder, removed)
    atomic_io.sync(os.path.dirname(folder))
    _delete(removed)


def _delete(folder: str) -> None:
    if os.path.islink(folder):  # a checkpoint that its user moved to another disk
        os.unlink(folder)
    elif os.path.lexists(folder):
        shutil.rmtree(folder)
