"""What can go wrong while a checkpoint is written, put into one rank of a `dist.World` and taken out again."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.distributed.checkpoint import filesystem

from megatron.bcd.checkpoint import saver, shard_writer
from megatron.bcd.config import RunConfig
from megatron.bcd.training.state import TrainingFailed
from support import resumed_runs, worlds

SAVE_INTERVAL, FAULTY_SAVE, LAST = 3, 6, 9


def _fails(number: int) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number), "some_file")

    return fail


def _out_of_memory(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("not enough memory for the copy")


PATCHES: dict[str, Callable[[], Any]] = {
    "shard": lambda: mock.patch.object(filesystem, "_write_item", _fails(errno.ENOSPC)),
    "checksum of a shard": lambda: mock.patch.object(shard_writer, "file_digest", _fails(errno.EIO)),
    "copy in host memory": lambda: mock.patch.object(shard_writer.ShardWrite, "_on_host", _out_of_memory),
    "random states": lambda: mock.patch.object(saver.atomic_io, "write", _fails(errno.EDQUOT)),
    "rank 0's own files": lambda: mock.patch.object(saver, "save_config", _fails(errno.EACCES)),
    "index of the shards": lambda: mock.patch.object(filesystem.FileSystemWriter, "finish", _fails(errno.EIO)),
    "checksums": lambda: mock.patch.object(saver.layout, "finish", _fails(errno.ENOSPC)),
    "last renaming": lambda: mock.patch.object(saver.layout, "publish", _fails(errno.ESTALE)),
}


@contextlib.contextmanager
def full_disk(root: str, *, room: int = 0) -> Iterator[None]:
    """`room` bytes are left of the file system below `root`, which has to be a small one."""
    filler = os.path.join(root, "filler")
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**16))
    os.truncate(filler, os.path.getsize(filler) - room)
    yield
    os.unlink(filler)


@contextlib.contextmanager
def read_only_disk(root: str) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", root], check=True)
    yield
    subprocess.run(["mount", "-o", "remount,rw", root], check=True)


class Fault:
    """Hooks of a run in which the save after iteration FAULTY_SAVE meets a fault on one rank."""

    def __init__(self, name: str, root: str, *, rank: int, for_ever: bool = False) -> None:
        self._name, self._root, self._for_ever = name, root, for_ever
        self._is_here = torch.distributed.get_rank() == rank
        self._fault = contextlib.ExitStack()

    def before_step(self, one: worlds.RecordedRun) -> None:
        if one.iteration == FAULTY_SAVE - 1 and self._is_here:
            self._fault.enter_context(self._make())
        if one.iteration == FAULTY_SAVE + 1:  # the step after this one finishes what is written in the background
            while one.saver is not None and one.saver.is_writing:
                time.sleep(0.01)
        if one.iteration == FAULTY_SAVE + 2 and not self._for_ever:
            self.close()

    def close(self) -> None:
        self._fault.close()

    def _make(self) -> contextlib.AbstractContextManager[Any]:
        if self._name in PATCHES:
            return PATCHES[self._name]()
        return full_disk(self._root) if self._name == "full disk" else read_only_disk(self._root)


def run_with_fault(config: RunConfig, name: str, root: str, *, rank: int, for_ever: bool = False) -> dict[str, Any]:
    """`resumed_runs.one_part` with a fault; "failed" in its result is why the run ended, if it did."""
    with worlds.parallel(config):
        fault = Fault(name, root, rank=rank, for_ever=for_ever)
        try:
            return resumed_runs.one_part(config, before_step=fault.before_step) | {"failed": None}
        except TrainingFailed as failed:
            return {"failed": str(failed)}
        finally:
            fault.close()


def saves_with_room(config: RunConfig, root: str, rooms: Sequence[int]) -> list[str]:
    """Warnings of a checkpoint and of an export for each number of bytes that is left on the disk of `root`."""
    with worlds.started(config) as one:
        for room in rooms:
            barrier = torch.distributed.barrier
            with full_disk(root, room=room) if torch.distributed.get_rank() == 0 else contextlib.nullcontext():
                barrier()
                one.save()
                one._export(is_last=False)
                barrier()
        return one.recorder.warnings
