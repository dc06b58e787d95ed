"""A checkpoint that can't be written costs a warning: the run goes on, older ones stay valid, the next one is saved."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import resumed_runs, save_faults, worlds
from support.dist import World

from megatron.bcd.checkpoint import layout

ONLY_ON_FIRST = ("rank 0's own files", "index of the shards", "checksums", "last renaming")
ALL_CASES = [
    (name, rank, how)
    for name in save_faults.PATCHES
    for rank in ((0,) if name in ONLY_ON_FIRST else (0, 1))
    for how in ("sync", "async")
]
# In the background where rank 1 fails, and where rank 0 finishes what all have written; at once elsewhere
CASES = [case for case in ALL_CASES if (case[1] == 1 or case[0] in ONLY_ON_FIRST[1:]) == (case[2] == "async")]


def by_name(cases: list[tuple[str, int, str]]) -> pytest.MarkDecorator:
    """Those of CASES, and with --long the others."""
    marked = [
        pytest.param(
            *case, marks=[pytest.mark.long] * (case not in CASES), id="-".join(map(str, case)).replace(" ", "_")
        )
        for case in cases
    ]
    return pytest.mark.parametrize(("name", "rank", "how"), marked)


def config_of(text_data: str, root: Path, **flags: Any) -> Any:
    pipeline = {"world_size": 2, "pipeline_model_parallel_size": 2, "bcd_layout": "submodel", "bcd_steps_per_block": 2}
    saving = {"save": root, "save_interval": save_faults.SAVE_INTERVAL, "train_iters": save_faults.LAST}
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
    ranks = world.run(save_faults.run_with_fault, config, name, str(root), rank=rank)
    assert ranks[0]["warnings"] == ranks[1]["warnings"]
    _, warning, _ = ranks[0]["warnings"]  # the others name blocks that 9 steps do not reach
    assert f"checkpoint {save_faults.FAULTY_SAVE} " in warning, warning
    assert "\n" not in warning
    for mine, expected in zip(ranks, whole, strict=True):
        assert resumed_runs.differences(expected, [mine]) == []
    assert_only_these(root, [3, 9])


def assert_only_these(root: Path, iterations: list[int]) -> None:
    """These checkpoints are there, whole, the last one named by the tracker, and nothing that is half."""
    assert sorted(path.name for path in root.glob("iter_*")) == [f"iter_{one:07d}" for one in iterations]
    assert [layout.damage(layout.iteration_folder(str(root), one)) for one in iterations] == [None] * len(iterations)
    assert layout.candidates(str(root)) == iterations[::-1]


@by_name(ALL_CASES)
def test_a_fault_on_one_rank(
    world2: World, text_data: str, tmp_path: Path, whole: list[dict[str, Any]], name: str, rank: int, how: str
) -> None:
    """The other rank waits for ever, or publishes a checkpoint with a part missing, or the run ends."""
    check(world2, config_of(text_data, tmp_path, async_save=how == "async"), name, tmp_path, rank, whole)


@pytest.mark.parametrize(("name", "async_save"), [("full disk", True), ("read-only disk", False)])
def test_a_disk_that_takes_nothing(
    world2: World, text_data: str, small_disk: Path, whole: list[dict[str, Any]], name: str, async_save: bool
) -> None:
    """What a real disk does that no patched function does: some other call fails first, on every rank."""
    check(world2, config_of(text_data, small_disk, async_save=async_save), name, small_disk, 0, whole)


def test_a_disk_with_little_room(world2: World, text_data: str, small_disk: Path) -> None:
    """A file that the disk takes in part: PyTorch's writer then reports positions in the file, not that it is full."""
    config = config_of(text_data, small_disk, save_hf=small_disk / "model", save_hf_interval=1)
    rooms = [2**power for power in range(12, 20, 2)]
    ranks = world2.run(save_faults.saves_with_room, config, str(small_disk), rooms)
    assert ranks[0] == ranks[1] and len(ranks[0]) > len(rooms)
    assert [line for line in ranks[0] if os.strerror(errno.ENOSPC) not in line] == []


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_the_last_one_can_not_be_written(world2: World, text_data: str, small_disk: Path, async_save: bool) -> None:
    """A run that ends as if all were well, and hours of training that are nowhere."""
    config = config_of(text_data, small_disk, async_save=async_save)
    ranks = world2.run(save_faults.run_with_fault, config, "full disk", str(small_disk), rank=0, for_ever=True)
    assert ranks[0] == ranks[1]
    good = os.path.join(str(small_disk), "iter_0000003")
    assert ranks[0]["failed"].startswith("iteration 9 ") and good in ranks[0]["failed"]
    assert_only_these(small_disk, [3])
