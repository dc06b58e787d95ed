"""Checkpoint folders after a kill, a full disk, a flipped bit, or another job."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.bcd.checkpoint import layout
from megatron.bcd.runtime.dir_claim import lock_folder


class Killed(BaseException):
    """Replaces SIGKILL; no code under test may catch it."""


class Killer:
    """Lets `fatal - 1` calls through that change the disk, and kills the process at the next one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        for owner, name in ((os, "rename"), (os, "replace"), (os, "unlink"), (shutil, "rmtree")):
            monkeypatch.setattr(owner, name, self._mortal(getattr(owner, name)))
        monkeypatch.setattr(os, "fsync", self._mortal(lambda file: None))

    def _mortal(self, original: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object, **kwargs: object) -> None:
            if self.left is not None:
                self.left -= 1
                if self.left == 0:
                    if original.__name__ == "rmtree":  # it takes many calls: killed after the first
                        next(path for path in Path(str(args[0])).rglob("*") if path.is_file()).unlink()
                    raise Killed
            original(*args, **kwargs)

        return call

    def kill_at(self, fatal: int, call: Callable[[], object]) -> bool:
        """Return True if `call` was killed at its call number `fatal`."""
        self.left = fatal
        try:
            call()
        except Killed:
            return True
        finally:
            self.left = None
        return False


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Killer:
    return Killer(monkeypatch)


def write(root: Path, iteration: int, content: str) -> None:
    """Write a checkpoint and finish it."""
    aside = Path(layout.incomplete_folder(str(root), iteration))
    (aside / "objects").mkdir(parents=True)
    (aside / "weights.distcp").write_text(content * 10)
    (aside / "objects" / "state.pt").write_text(content)
    names = ["weights.distcp", "objects/state.pt"]
    layout.finish(str(aside), {name: layout.file_digest(str(aside / name)) for name in names})


def save(root: Path, iteration: int, content: str) -> None:
    write(root, iteration, content)
    layout.publish(str(root), iteration)


def content_of(root: Path, iteration: int) -> str:
    checkpoint = Path(layout.iteration_folder(str(root), iteration))
    assert layout.damage(str(checkpoint)) is None
    return (checkpoint / "objects" / "state.pt").read_text()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def assert_no_half(root: Path) -> None:
    """Check that every folder with the name of a complete checkpoint is one."""
    for path in root.iterdir():
        if re.fullmatch(r"iter_\d+", path.name):
            assert layout.damage(str(path)) is None


@pytest.mark.parametrize("iteration", [7, 8], ids=["same_number", "next"])
def test_killed_anywhere(tmp_path: Path, killer: Killer, iteration: int) -> None:
    """A kill at any call leaves a whole checkpoint, and cleaning removes every leftover."""
    for fatal in range(1, 100):
        root = tmp_path / str(fatal)
        save(root, 6, "older")
        save(root, 7, "old")
        write(root, iteration, "new")

        def publish_and_prune(root: Path = root) -> None:
            layout.publish(str(root), iteration)
            layout.prune(str(root), 1)

        was_killed = killer.kill_at(fatal, publish_and_prune)
        assert_no_half(root)
        # whoever cleans may be killed as well
        for fatal_for_cleaner in range(1, 100):
            if not killer.kill_at(fatal_for_cleaner, lambda root=root: layout.clean_leftovers(str(root))):
                break
            assert_no_half(root)
        assert all(re.fullmatch(rf"iter_\d+|{layout.TRACKER}", name) for name in names(root))
        newest = layout.candidates(str(root))[0]
        assert content_of(root, newest) == "new" or (newest == 7 and content_of(root, 7) == "old" and was_killed)
        if not was_killed:
            break
        save(root, iteration, "again")
        assert content_of(root, layout.candidates(str(root))[0]) == "again"
    assert 8 < fatal < 99
    assert names(root) == [f"iter_000000{iteration}", layout.TRACKER]


def test_publish_loses_neither_when_renaming_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing rename leaves the old checkpoint in its place."""
    save(tmp_path, 7, "old")
    write(tmp_path, 7, "new")
    rename = os.rename

    def fail(source: str, target: str) -> None:
        if source.endswith(".incomplete"):
            raise OSError(errno.EIO, "broken disk")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="broken disk"):
        layout.publish(str(tmp_path), 7)
    assert content_of(tmp_path, 7) == "old"


def test_prune(tmp_path: Path) -> None:
    """Pruning deletes the oldest complete checkpoints, but not stock's, retained ones or those after the tracker's."""
    for iteration in (1, 2, 3, 4, 20):
        save(tmp_path, iteration, "x")
    (tmp_path / "iter_0000000").mkdir()
    (tmp_path / "iter_0000000" / "metadata.json").write_text("{}")
    (tmp_path / layout.TRACKER).write_text("4")  # 20 belongs to a run that was given up: kept, and no candidate
    assert layout.prune(str(tmp_path), 2) == [1, 2]
    assert names(tmp_path)[:-1] == ["iter_0000000", "iter_0000003", "iter_0000004", "iter_0000020"]
    assert layout.candidates(str(tmp_path)) == [4, 3]
    assert layout.prune(str(tmp_path), 9) == []
    for iteration in (6, 8, 10):
        save(tmp_path, iteration, "x")
    assert layout.prune(str(tmp_path), 1, retain_interval=4) == [3, 6]
    assert layout.candidates(str(tmp_path)) == [10, 8, 4]


def test_clean_leftovers(tmp_path: Path) -> None:
    """Cleaning removes unfinished folders, and keeps the only copy of a checkpoint and all other files."""
    root = str(tmp_path)
    layout.clean_leftovers(str(tmp_path / "absent"))
    save(tmp_path, 7, "old")
    (tmp_path / "iter_0000007").rename(tmp_path / "iter_0000007.removed")
    write(tmp_path, 7, "unfinished")
    save(tmp_path, 8, "new")
    shutil.copytree(tmp_path / "iter_0000008", tmp_path / "iter_0000008.removed")
    write(tmp_path, 9, "unfinished")
    others = ["iter_0000009.backup", "iter_9", "notes.incomplete"]
    for name in others:
        (tmp_path / name).mkdir()
    layout.clean_leftovers(root, before=7)
    assert len(names(tmp_path)) == 6 + len(others), "replica groups may write the later ones"
    layout.clean_leftovers(root)
    assert names(tmp_path) == sorted(["iter_0000007", "iter_0000008", layout.TRACKER, *others])
    assert (content_of(tmp_path, 7), content_of(tmp_path, 8)) == ("old", "new")


def test_a_checkpoint_on_another_disk(tmp_path: Path) -> None:
    """A save replaces a linked folder, and the folder behind the link stays whole."""
    root = tmp_path / "root"
    save(root, 7, "old")
    shutil.move(root / "iter_0000007", tmp_path / "elsewhere")
    (root / "iter_0000007").symlink_to(tmp_path / "elsewhere")
    assert content_of(root, 7) == "old"
    save(root, 7, "new")
    assert content_of(root, 7) == "new" and names(root) == ["iter_0000007", layout.TRACKER]
    assert layout.damage(str(tmp_path / "elsewhere")) is None


@pytest.mark.parametrize(
    ("tracker", "expected"),
    [
        ("3\n", [3, 2, 1]),
        ("4", [3, 2, 1]),  # it names one that is not there
        ("5", [5, 3, 2, 1]),  # stock's, without checksums
        ("release", [6, 3, 2, 1]),
        ("9" * 5000, [6, 3, 2, 1]),
        ("٣", [6, 3, 2, 1]),
        (None, [6, 3, 2, 1]),
    ],
)
def test_candidates(tmp_path: Path, tracker: str | None, expected: list[int]) -> None:
    """Candidates are the checkpoints up to the one that the tracker names, newest first; without a number, all."""
    for iteration in (1, 2, 3, 6):
        save(tmp_path, iteration, "x")
    (tmp_path / "iter_0000005").mkdir()
    (tmp_path / "iter_0000007.incomplete").mkdir()
    (tmp_path / "iter_08").mkdir()
    if tracker is None:
        (tmp_path / layout.TRACKER).unlink()
    else:
        (tmp_path / layout.TRACKER).write_text(tracker)
    assert layout.candidates(str(tmp_path)) == expected
    assert layout.candidates(str(tmp_path / "absent")) == []


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)


def checksums_are(text: str) -> Callable[[Path], object]:
    return lambda at: (at / layout.CHECKSUMS).write_text(text)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (lambda at: flip(at / "weights.distcp"), "weights.distcp"),
    "truncated": (lambda at: os.truncate(at / "weights.distcp", 9), "weights.distcp"),
    "missing_folder": (lambda at: shutil.rmtree(at / "objects"), "objects/state.pt"),
    "no_file": (lambda at: [(at / "weights.distcp").unlink(), (at / "weights.distcp").mkdir()], "weights.distcp"),
    "no_checksums": (lambda at: (at / layout.CHECKSUMS).unlink(), layout.CHECKSUMS),
    "half_json": (lambda at: os.truncate(at / layout.CHECKSUMS, 20), layout.CHECKSUMS),
    "deep": (checksums_are("[" * 10**5), layout.CHECKSUMS),
    "no_record": (checksums_are('{"files": {"a": 1}}'), layout.CHECKSUMS),
    "null": (checksums_are('{"files": {"a\\u0000": {"bytes": 1, "sha256": "0"}}}'), layout.CHECKSUMS),
}
"""Ways to damage a checkpoint, and the file that the message must name."""


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage(tmp_path: Path, kind: str) -> None:
    """Each kind of damage is reported in one line that names the file."""
    do_damage, named = DAMAGE[kind]
    save(tmp_path, 7, "x")
    checkpoint = tmp_path / "iter_0000007"
    do_damage(checkpoint)
    said = layout.damage(str(checkpoint))
    assert said is not None and "\n" not in said
    assert said.startswith(f"{checkpoint}/") and named in said


def test_damage_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part hashes its own share of the files, and every part sees a missing one."""
    aside = Path(layout.incomplete_folder(str(tmp_path), 1))
    aside.mkdir()
    sizes = {"a": 100, "b": 60, "c": 50, "d": 5}
    for name, size in sizes.items():
        (aside / name).write_bytes(b"x" * size)
    layout.finish(str(aside), {name: layout.file_digest(str(aside / name)) for name in sizes})
    record = layout.file_digest
    hashed: list[list[str]] = []

    def spy(path: str) -> layout.FileDigest:
        hashed[-1].append(os.path.basename(path))
        return record(path)

    monkeypatch.setattr(layout, "file_digest", spy)
    for part in range(2):
        hashed.append([])
        assert layout.damage(str(aside), part=part, num_parts=2) is None
    assert hashed == [["a", "c"], ["b", "d"]]
    (aside / "c").write_bytes(b"y" * 50)
    assert [layout.damage(str(aside), part=part, num_parts=2) is None for part in range(2)] == [False, True]
    (aside / "c").unlink()
    assert all(layout.damage(str(aside), part=part, num_parts=2) for part in range(2))


@pytest.mark.parametrize("content", [b"", b"\xff", b"pid 7"])
def test_lock_of_another_job(tmp_path: Path, content: bytes) -> None:
    """A folder whose lock another job has is refused, whatever the lock's file says."""
    with open(tmp_path / ".lock", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(content)
        file.flush()
        with pytest.raises(ValueError, match="another job"):
            lock_folder(str(tmp_path), flag="--save", contents="checkpoints")


def test_no_locks_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks gives a warning, and a broken one an error."""
    code = errno.ENOLCK

    def flock(file: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    _, warning = lock_folder(str(tmp_path), flag="--save", contents="checkpoints")
    assert warning is not None and f"--save {tmp_path}" in warning
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        lock_folder(str(tmp_path), flag="--save", contents="checkpoints")
