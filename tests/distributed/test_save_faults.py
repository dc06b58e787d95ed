"""A checkpoint that cannot be written costs a warning: the run continues, older ones stay valid, the next one is
saved. The folder of --save is claimed at the start of a run; two jobs: e2e/test_checkpoint_faults.py."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import resumed_runs, worlds
from support.dist import World
from torch.distributed.checkpoint import filesystem

from megatron.bcd.checkpoint import layout, saver, shard_writer
from megatron.bcd.checkpoint.saver import claim_save_folder
from megatron.bcd.config import RunConfig
from megatron.bcd.training.state import TrainingFailed

SAVE_INTERVAL, FAULTY_SAVE, LAST = 3, 6, 9


def fails(number: int) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number), "some_file")

    return fail


def out_of_memory(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("not enough memory for the copy")


# what fails, on which rank, and whether in a save in the background: there where rank 1 fails, or where rank 0 finishes
# what all have written
FAULTS: dict[str, tuple[int, bool, Callable[[], Any]]] = {
    "shard_1": (1, True, lambda: mock.patch.object(shard_writer, "_write_item", fails(errno.ENOSPC))),
    "copy_in_host_memory": (1, True, lambda: mock.patch.object(shard_writer.ShardWrite, "_on_host", out_of_memory)),
    "random_states": (0, False, lambda: mock.patch.object(saver.atomic_io, "write", fails(errno.EDQUOT))),
    "index": (0, True, lambda: mock.patch.object(filesystem.FileSystemWriter, "finish", fails(errno.EIO))),
    "last_renaming": (0, True, lambda: mock.patch.object(saver.layout, "publish", fails(errno.ESTALE))),
}


@contextlib.contextmanager
def full_disk(root: str) -> Iterator[None]:
    """Fill the file system of `root`, which must be small."""
    filler = os.path.join(root, "filler")
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**16))
    yield
    os.unlink(filler)


def run_with_fault(config: RunConfig, name: str, root: str, *, rank: int, for_ever: bool = False) -> dict[str, Any]:
    """Run `resumed_runs.one_part` with a fault on one rank in the save after iteration FAULTY_SAVE.

    If the run fails, "failed" in its result is the reason.
    """
    with worlds.parallel(config), contextlib.ExitStack() as fault:

        def before_step(run: worlds.RecordedRun) -> None:
            if run.iteration == FAULTY_SAVE - 1 and torch.distributed.get_rank() == rank:
                fault.enter_context(FAULTS[name][2]() if name in FAULTS else full_disk(root))
            if run.iteration == FAULTY_SAVE + 1:  # the step after this one finishes what is written in the background
                while run.saver is not None and run.saver.is_writing:
                    time.sleep(0.01)
            if run.iteration == FAULTY_SAVE + 2 and not for_ever:
                fault.close()

        try:
            return resumed_runs.one_part(config, before_step=before_step) | {"failed": None}
        except TrainingFailed as failed:
            return {"failed": str(failed)}


def config_of(text_data: str, root: Path, **flags: Any) -> Any:
    pipeline = {"world_size": 2, "pipeline_model_parallel_size": 2, "bcd_layout": "submodel", "bcd_steps_per_block": 2}
    saving = {"save": root, "save_interval": SAVE_INTERVAL, "train_iters": LAST}
    return worlds.run_config(data_path=text_data, **pipeline | saving | flags)


@pytest.fixture(scope="module")
def whole(world2: World, text_data: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    config = config_of(text_data, tmp_path_factory.mktemp("unused"))
    return world2.run(resumed_runs.one_part, resumed_runs.with_checkpoints(config, save=None))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", place], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small file system can't be mounted here ({done.stderr.strip()})")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def check(world: World, config: Any, name: str, root: Path, rank: int, whole: list[dict[str, Any]]) -> None:
    ranks = world.run(run_with_fault, config, name, str(root), rank=rank)
    assert ranks[0]["warnings"] == ranks[1]["warnings"]
    _, warning, _ = ranks[0]["warnings"]  # the others name blocks that 9 steps do not reach
    assert f"checkpoint {FAULTY_SAVE} " in warning and "\n" not in warning
    for mine, expected in zip(ranks, whole, strict=True):
        assert resumed_runs.differences(expected, [mine]) == []
    assert_only_these(root, [3, 9])


def assert_only_these(root: Path, iterations: list[int]) -> None:
    """Check that exactly these checkpoints exist, complete, that the tracker names the last, and nothing partial is
    left."""
    assert sorted(path.name for path in root.glob("iter_*")) == [f"iter_{iteration:07d}" for iteration in iterations]
    assert [layout.damage(layout.iteration_folder(str(root), item)) for item in iterations] == [None] * len(iterations)
    assert layout.candidates(str(root)) == iterations[::-1]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_on_one_rank(
    world2: World, text_data: str, tmp_path: Path, whole: list[dict[str, Any]], name: str
) -> None:
    """If one rank fails to write a checkpoint, both ranks warn, train on as without the fault, and leave only complete
    checkpoints."""
    rank, async_save, _ = FAULTS[name]
    check(world2, config_of(text_data, tmp_path, async_save=async_save), name, tmp_path, rank, whole)


def test_a_full_disk(world2: World, text_data: str, small_disk: Path, whole: list[dict[str, Any]]) -> None:
    """The same holds on a disk that is really full, where other calls fail than the patched ones."""
    check(world2, config_of(text_data, small_disk, async_save=True), "full disk", small_disk, 0, whole)


def test_the_last_one_can_not_be_written(world2: World, text_data: str, small_disk: Path) -> None:
    """A run whose last checkpoint can't be written fails on both ranks, and names the last complete one."""
    config = config_of(text_data, small_disk, async_save=True)
    ranks = world2.run(run_with_fault, config, "full disk", str(small_disk), rank=0, for_ever=True)
    assert ranks[0] == ranks[1]
    good = os.path.join(str(small_disk), "iter_0000003")
    assert ranks[0]["failed"].startswith("iteration 9 ") and good in ranks[0]["failed"]
    assert_only_these(small_disk, [3])


def claim(*roots: str) -> str:
    """Claim the folder that `roots` names for this rank and release it; return the messages."""
    with worlds.parallel(worlds.run_config(mock_data=True, split=None, world_size=2)):
        try:
            folder_claim = claim_save_folder(roots[torch.distributed.get_rank() % len(roots)])
            folder_claim.release()
            return f"claimed {list(folder_claim.warnings)}"
        except ValueError as refused:
            return str(refused)


def test_another_disk_on_one_node(world2: World, tmp_path: Path) -> None:
    """All ranks refuse a --save folder that is not on the same disk for all of them."""
    roots = [str(tmp_path / "here"), str(tmp_path / "elsewhere")]
    os.mkdir(roots[1])
    first, second = world2.run(claim, *roots)
    assert first.replace(roots[0], roots[1]) == second and first.startswith(f"--save {roots[0]}: ")
    assert os.listdir(roots[1]) == []


@pytest.mark.parametrize("name", ["a_file/saved", "/proc/saved"])
def test_a_folder_that_can_not_be_made(world2: World, tmp_path: Path, name: str) -> None:
    """All ranks refuse a folder that can't be made, with the same error."""
    (tmp_path / "a_file").write_text("")
    root = str(tmp_path / name)
    first, second = world2.run(claim, root)
    assert first == second and first.startswith(f"--save {root}")
