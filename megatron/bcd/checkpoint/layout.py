"""Files and folders of checkpoints. No function is a collective: the caller decides which rank calls it.

Below a root (--save, --load), as in stock Megatron-LM::

    iter_0000007/                        complete
    iter_0000007/checksums.json          {"files": {name: {"bytes": n, "sha256": hex}}} of all other files
    latest_checkpointed_iteration.txt    the tracker: number of the newest checkpoint, written last
    .lock                                held by the job that writes here (`runtime.dir_claim`)

and during a save, or after a killed one until `clean_leftovers`::

    iter_0000007.incomplete/             being written
    iter_0000007.removed/                being deleted, or replaced by the incomplete folder of that number

A complete folder is never modified: its name appears and disappears by renaming. So the previous checkpoint survives a
kill, a full disk or a power cut. Functions raise OSError.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Mapping
from typing import TypedDict

from megatron.bcd.runtime import atomic_io

TRACKER = "latest_checkpointed_iteration.txt"
CHECKSUMS = "checksums.json"
RUN_STATE = "run_state.json"
RANDOM_STATES = "random_states_{:05d}.safetensors"
"""The file of the random generators of a rank."""

_INCOMPLETE, _REMOVED = ".incomplete", ".removed"


class FileDigest(TypedDict):
    """Size in bytes and SHA-256 (64 hexadecimal digits) of one file."""

    bytes: int
    sha256: str


def iteration_folder(root: str, iteration: int) -> str:
    """Return the folder of checkpoint `iteration` when it is complete."""
    return os.path.join(root, f"iter_{iteration:07d}")


def incomplete_folder(root: str, iteration: int) -> str:
    """Return the folder in which checkpoint `iteration` is written until `publish`."""
    return iteration_folder(root, iteration) + _INCOMPLETE


# --- writing


def file_digest(path: str) -> FileDigest:
    """Return the size and the SHA-256 of a file. Hashing releases the GIL."""
    with open(path, "rb", buffering=0) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": sha256}


def finish(folder: str, digests: Mapping[str, FileDigest]) -> None:
    """Write ``checksums.json`` into `folder` and sync the folder. The names in `digests` are relative to `folder`.

    Other nodes must sync the files that they write. To sync them again here costs nothing.
    """
    content = {"files": {name: digests[name] for name in sorted(digests)}}
    atomic_io.write(os.path.join(folder, CHECKSUMS), json.dumps(content, indent=1).encode())
    for name in digests:
        atomic_io.sync(os.path.join(folder, name))
    for parent, _, _ in os.walk(folder):
        atomic_io.sync(parent)


def publish(root: str, iteration: int) -> None:
    """Rename the finished `incomplete_folder` to the complete checkpoint `iteration`, then update the tracker.

    A complete checkpoint of the same number is replaced. It stays intact until the new one has its name.

    Raises:
        FileNotFoundError: there is no finished `incomplete_folder`; nothing has changed.
    """
    folder, target = incomplete_folder(root, iteration), iteration_folder(root, iteration)
    os.stat(os.path.join(folder, CHECKSUMS))
    _set_aside(target)
    try:
        os.rename(folder, target)
    except OSError:
        if os.path.lexists(target + _REMOVED):
            os.rename(target + _REMOVED, target)
        raise
    atomic_io.sync(root)
    atomic_io.replace(os.path.join(root, TRACKER), str(iteration).encode())
    atomic_io.sync(root)
    _delete(target + _REMOVED)


def prune(root: str, keep: int, *, retain_interval: int | None = None) -> list[int]:
    """Delete old checkpoints and return their iterations.

    It keeps the newest `keep` complete checkpoints, the tracker's and newer ones, and multiples of `retain_interval`.
    Folders without ``checksums.json`` belong to another program: they are neither counted nor deleted.
    """
    assert keep >= 1
    named = read_tracker(root)
    # later ones than the tracker's belong to an abandoned run
    usable = [iteration for iteration in _complete(root) if named is None or iteration <= named]
    old = [
        iteration
        for iteration in usable[:-keep]
        if iteration != named and (retain_interval is None or iteration % retain_interval)
    ]
    for iteration in old:
        folder = iteration_folder(root, iteration)
        _set_aside(folder)  # renamed first, so that a part of it never looks complete
        _delete(folder + _REMOVED)
    return old


def clean_leftovers(root: str, *, before: int | None = None) -> None:
    """Clean up after a killed job: delete unfinished checkpoints.

    If the job was replacing a checkpoint and the new one is missing, the old one gets its name back. The caller must
    hold the lock of `root` and not be writing a checkpoint. With `before`, only checkpoints of smaller iterations are
    cleaned up, so that newer ones may be written meanwhile.
    """
    limit = math.inf if before is None else before
    for iteration in [number for number in _iterations(root, _REMOVED) if number < limit]:
        target = iteration_folder(root, iteration)
        if os.path.lexists(incomplete_folder(root, iteration)) and not os.path.lexists(target):
            os.rename(target + _REMOVED, target)
            atomic_io.sync(root)
        else:
            _delete(target + _REMOVED)
    for iteration in [number for number in _iterations(root, _INCOMPLETE) if number < limit]:
        _delete(incomplete_folder(root, iteration))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(root, TRACKER + ".new"))


# --- reading


def read_tracker(root: str) -> int | None:
    """Return the iteration in the tracker; None if the tracker is missing or has no number."""
    try:
        with open(os.path.join(root, TRACKER), "rb") as file:
            text = file.read(32).strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdigit() else None


def candidates(root: str) -> list[int]:
    """Return the iterations to try, best first; empty if there is no checkpoint.

    The tracker's iteration comes first (ours or stock Megatron-LM's), then our complete checkpoints before it, newest
    first. Later ones belong to an abandoned run. Without a readable tracker, all our complete checkpoints count.
    """
    newest_first = _complete(root)[::-1]
    named = read_tracker(root)
    if named is None:
        return newest_first
    first = [named] if os.path.isdir(iteration_folder(root, named)) else []
    return first + [iteration for iteration in newest_first if iteration < named]


def has_other_files(root: str) -> bool:
    """Return whether a folder without checkpoints has files, other than those that a killed job leaves."""
    with contextlib.suppress(FileNotFoundError):
        return any(not name.startswith((".", "iter_", TRACKER)) for name in os.listdir(root))
    return False


def is_foreign(folder: str) -> bool:
    """Return whether another program has written the checkpoint: it has Megatron Core's format and none of our files.

    A checkpoint of ours without its checksums is damaged.
    """
    is_ours = any(os.path.lexists(os.path.join(folder, name)) for name in (CHECKSUMS, RUN_STATE))
    return not is_ours and os.path.isfile(os.path.join(folder, "metadata.json"))


def damage(folder: str, *, part: int = 0, num_parts: int = 1) -> str | None:
    """Describe the first damaged file of a complete checkpoint in one line; None if all files are intact.

    Every part compares all sizes. The files are divided into `num_parts`, and only those of `part` are read and hashed.
    Files that ``checksums.json`` does not list are ignored.
    """
    path = checksums = os.path.join(folder, CHECKSUMS)
    try:
        with open(checksums, encoding="utf-8") as file:
            files = json.load(file)["files"]
        digests: dict[str, FileDigest] = {
            name: {"bytes": files[name]["bytes"], "sha256": files[name]["sha256"]} for name in sorted(files)
        }
        for name in digests:
            path, expected = os.path.join(folder, name), digests[name]["bytes"]
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                return f"{path} is not a file"
            if status.st_size != expected:
                fault = "is truncated" if status.st_size < expected else "is too long"
                return f"{path} {fault}: {status.st_size} bytes, {expected} were written"
        for name in list(digests)[part::num_parts]:  # the ranks' files, by far the largest, are neighbours
            path = os.path.join(folder, name)
            if file_digest(path) != digests[name]:
                return f"{path} is damaged: its checksum differs from that of the written file"
    except (FileNotFoundError, NotADirectoryError):
        return f"{path} is missing"
    except OSError as error:
        return f"{path} can't be read ({error.strerror})"
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        return f"{checksums} is damaged ({' '.join(str(error).split())[:100]})"
    return None


# --- helpers


def _iterations(root: str, suffix: str = "") -> list[int]:
    """Return the numbers of the folders ``iter_NNNNNNN`` + `suffix`, ascending."""
    name = re.compile(r"iter_([0-9]{7,18})" + re.escape(suffix))
    try:
        matches = [name.fullmatch(entry) for entry in os.listdir(root)]
    except FileNotFoundError:
        return []
    numbers = sorted(int(match[1]) for match in matches if match)
    return [number for number in numbers if os.path.isdir(iteration_folder(root, number) + suffix)]


def _complete(root: str) -> list[int]:
    """Return the iterations of complete checkpoints with checksums, ascending."""
    return [
        iteration
        for iteration in _iterations(root)
        if os.path.isfile(os.path.join(iteration_folder(root, iteration), CHECKSUMS))
    ]


def _set_aside(folder: str) -> None:
    """Rename a complete checkpoint, if there is one, to free its name."""
    _delete(folder + _REMOVED)
    if os.path.lexists(folder):
        os.rename(folder, folder + _REMOVED)
        atomic_io.sync(os.path.dirname(folder))


def _delete(folder: str) -> None:
    if os.path.islink(folder):  # the user has moved the checkpoint to another disk
        os.unlink(folder)
    elif os.path.lexists(folder):
        shutil.rmtree(folder)
