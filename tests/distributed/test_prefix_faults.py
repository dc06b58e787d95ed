"""A prefix cache that is damaged, of another model, half filled or on a disk that is full is never trusted."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import prefix_runs, resumed_runs, worlds
from support.dist import World

from megatron.bcd.runtime.dir_lock import DirLock

NUM_RECORDS = 15  # of the text's sequences, the share of prefix_runs.FLAGS


@pytest.fixture(scope="module")
def flags(text_data: str) -> dict[str, Any]:
    """Two phases, the second one with a prefix."""
    return prefix_runs.FLAGS | {"data_path": text_data, "train_iters": 8, "eval_iters": 0}


@pytest.fixture(scope="module")
def computed(world1: World, flags: dict[str, Any]) -> dict[str, Any]:
    return world1.run(worlds.train_run, worlds.run_config(**flags))[0]


def served(world: World, flags: dict[str, Any], root: Path, **others: Any) -> dict[str, Any]:
    return world.run(prefix_runs.served_run, worlds.run_config(**flags | others, bcd_prefix_cache=root))[0]


def flip(folder: Path) -> None:
    path = next(folder.glob("shard_*.bin"))
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], Any], int]] = {
    "nothing": (lambda folder: None, NUM_RECORDS),
    "flipped_bit": (flip, NUM_RECORDS - 1),
    "shard_absent": (lambda folder: next(folder.glob("shard_*.bin")).unlink(), 0),
    "manifest_wrong": (lambda folder: (folder / "manifest.json").write_text("{}"), 0),
}


def test_what_is_damaged_is_computed_anew(
    world1: World, flags: dict[str, Any], computed: dict[str, Any], tmp_path: Path
) -> None:
    """A damaged record that is served, or an undamaged cache that is filled again."""
    assert served(world1, flags, tmp_path)["losses"] == computed["losses"]
    (folder,) = tmp_path.glob("prefix_*")
    for damage, (do, num_left) in DAMAGES.items():
        do(folder)
        outcome = served(world1, flags, tmp_path)
        assert outcome["losses"] == computed["losses"], damage
        assert f"of {NUM_RECORDS} records {num_left} were there" in outcome["notes"][-1], damage


def test_other_runs_have_caches_of_their_own(world1: World, flags: dict[str, Any], tmp_path: Path) -> None:
    """Outputs of other weights, samples, network or precision that are served because a part of the key is missing."""
    served(world1, flags, tmp_path)
    others: list[dict[str, Any]] = [
        {"seed": 4321},
        {"lr": 2e-3},
        {"bcd_sample_ratio": 0.008},
        {"rotary_base": 100, "position_embedding_type": "rope"},
        {"bf16": True},
        {"bcd_prefix_cache_dtype": "bf16"},
    ]
    for index, other in enumerate(others):
        outcome = served(world1, flags, tmp_path, **other)
        assert "records 0 were there" in outcome["notes"][-1], other
        assert len(list(tmp_path.glob("prefix_*"))) == index + 2


def test_a_fill_goes_on_where_it_was_killed(
    world1: World, flags: dict[str, Any], computed: dict[str, Any], tmp_path: Path
) -> None:
    """A fill that begins again, or that trusts what a killed one has not written."""
    config = worlds.run_config(**flags, bcd_prefix_cache=tmp_path)
    world1.run(prefix_runs.killed_in_fill, config, 6)
    outcome = world1.run(prefix_runs.counted_run, config)[0]
    assert outcome["losses"] == computed["losses"]
    assert f"of {NUM_RECORDS} records 6 were there, 9 were computed" in outcome["notes"][-1]
    first, second = outcome["layers"]
    assert second[0] - first[0] == 5, "micro-batches of 2 for 9 records"


def test_damage_amid_a_phase(world1: World, flags: dict[str, Any], tmp_path: Path) -> None:
    """A wrong activation, where another program writes into the folder while the phase reads from it."""
    config = worlds.run_config(**flags, bcd_prefix_cache=tmp_path)
    said = world1.run(prefix_runs.damaged_in_phase, config, str(tmp_path))[0]
    assert said.startswith(f"prefix cache {tmp_path}") and "damaged" in said and "\n" not in said


def test_bf16_within_its_rounding(
    world1: World, flags: dict[str, Any], computed: dict[str, Any], tmp_path: Path
) -> None:
    """A bf16 cache of an fp32 model that is read as something else than rounded outputs, or that is not in bf16."""
    outcome = served(world1, flags, tmp_path, bcd_prefix_cache_dtype="bf16")
    assert outcome["losses"][:4] == computed["losses"][:4], "without a prefix"
    assert outcome["losses"][4:] != computed["losses"][4:]
    assert outcome["losses"] == pytest.approx(computed["losses"], rel=2e-4)
    assert sum(outcome["hits"]) == 32


ALL_SAMPLES: dict[str, Any] = {"split": "1,99,0", "bcd_sample_ratio": 1.0, "eval_iters": 0, "bcd_steps_per_block": 5}


@pytest.mark.parametrize("case, num_blocks, num_layers", [("data2", 3, 2), ("tensor2", 3, 2), ("submodel", 4, 3)])
def test_ranks_start_from_a_shorter_prefix(
    world2: World, text_data: str, tmp_path: Path, case: str, num_blocks: int, num_layers: int
) -> None:
    """Ranks that don't agree on what is taken from where; a later stage that begins with its embedding."""
    cut = {
        "data2": {},
        "tensor2": {"tensor_model_parallel_size": 2, "micro_batch_size": 4},
        "submodel": {"pipeline_model_parallel_size": 2, "bcd_layout": "submodel", "bcd_num_blocks": 2},
    }
    whole = prefix_runs.FLAGS | ALL_SAMPLES | {"data_path": text_data, "train_iters": 5 * num_blocks, "world_size": 2}
    config = worlds.run_config(**whole | cut[case], bcd_prefix_cache=tmp_path)
    computed = world2.run(worlds.train_run, worlds.run_config(**whole | cut[case]))
    served = world2.run(prefix_runs.served_run, config)
    assert [rank["losses"] for rank in served] == [rank["losses"] for rank in computed]
    assert f"32 were taken from a prefix of {num_layers} layers" in served[0]["notes"][-1]


def test_a_longer_prefix_starts_from_a_shorter_one(world1: World, text_data: str, tmp_path: Path) -> None:
    """Layers that run again though their outputs are there; outputs taken for another sample's."""
    whole = prefix_runs.FLAGS | ALL_SAMPLES | {"data_path": text_data, "train_iters": 15}
    computed = world1.run(worlds.train_run, worlds.run_config(**whole))[0]
    outcome = world1.run(prefix_runs.counted_run, worlds.run_config(**whole, bcd_prefix_cache=tmp_path))[0]
    assert outcome["losses"] == computed["losses"]
    assert "were taken from a prefix of 2 layers" in outcome["notes"][-1]
    first, second, third = outcome["layers"]
    assert second[0] > first[0] and second[1] == second[0], "the fill of the second phase"
    assert (third[0], third[1]) == (second[0], second[1]), "the third one's begins behind these"
    assert third[2] - second[2] == second[0] - first[0]


def test_too_large_or_used_too_seldom(world1: World, flags: dict[str, Any], tmp_path: Path) -> None:
    """A fill that can't pay, or a limit that is passed."""
    limited = served(world1, flags, tmp_path, bcd_prefix_cache_max_gib=6e4 / 2**30)
    assert "more than --bcd-prefix-cache-max-gib" in limited["notes"][-1]
    seldom = served(world1, flags, tmp_path, bcd_sample_ratio=0.03)
    assert "are used 0.51 times, and it pays from 1.15 on" in seldom["notes"][-1]
    assert sum(limited["hits"]) == sum(seldom["hits"]) == 0 and not list(tmp_path.glob("prefix_*"))


def test_old_caches_make_room(world1: World, flags: dict[str, Any], tmp_path: Path) -> None:
    """A limit that later phases can't keep to, because earlier ones' caches are never deleted."""
    outcome = served(world1, flags, tmp_path, train_iters=12, bcd_prefix_cache_max_gib=7e4 / 2**30)
    assert sum(outcome["hits"]) == 64 and max(outcome["bytes"]) <= 7e4
    assert len(list(tmp_path.glob("prefix_*"))) == 1


@pytest.mark.parametrize("fault", ["write", "reserve", "close"])
def test_a_disk_that_refuses(world2: World, flags: dict[str, Any], tmp_path: Path, fault: str) -> None:
    """The other rank waits for ever, or a phase is served from a cache that was not written."""
    config = worlds.run_config(**flags, world_size=2, bcd_prefix_cache=tmp_path)
    first, second = world2.run(prefix_runs.fault_on_rank, config, int(fault != "reserve"), fault)
    assert first["losses"] == second["losses"] and sum(first["hits"]) == 0
    assert first["warnings"] == second["warnings"]
    _, warning, _ = first["warnings"]  # the others name the block that 8 steps do not reach
    assert warning.startswith(f"--bcd-prefix-cache {tmp_path}: can't be filled (No space left on device"), warning
    assert not list(tmp_path.glob("prefix_*"))


def test_a_full_disk(world1: World, flags: dict[str, Any], computed: dict[str, Any], tmp_path: Path) -> None:
    """A run that ends, or dies of SIGBUS, where the disk has no room."""
    for disk in small_disk(tmp_path):
        (disk / "filler").write_bytes(bytes(230 * 2**10))
        for limit, reason in ((None, "more than half of what is free"), (1, "the disk has room for")):
            outcome = served(world1, flags | {"bcd_prefix_cache_max_gib": limit}, disk)
            assert outcome["losses"] == computed["losses"] and sum(outcome["hits"]) == 0
            assert reason in outcome["notes"][-1]


def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small file system can't be mounted here ({done.stderr.strip()})")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.parametrize("stop", [4, 6])
def test_resume(world1: World, flags: dict[str, Any], tmp_path: Path, stop: int) -> None:
    """A phase that goes on with other samples, or without its cache, where it was stopped before it or amid."""
    config = worlds.run_config(**flags, bcd_prefix_cache=tmp_path / "cache", bcd_prefix_cache_dtype="bf16")
    assert world1.run(resumed_runs.stopped_and_resumed, config, [stop], str(tmp_path / "saved"))[0] == []


def test_a_second_job(tmp_path: Path, world1: World) -> None:
    """Two jobs that fill and delete the same caches."""
    lock = DirLock(str(tmp_path), flag="--bcd-prefix-cache", contents="prefix caches")
    lock.acquire()
    said = world1.run(prefix_runs.claimed, str(tmp_path))[0]
    assert said.startswith(f"--bcd-prefix-cache {tmp_path}: another job (pid ") and "prefix caches" in said
    lock.release()
    assert world1.run(prefix_runs.claimed, str(tmp_path)) == ["claimed"]
