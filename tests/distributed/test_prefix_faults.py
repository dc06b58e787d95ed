"""A prefix cache that is torn, incomplete, from another model or on a full disk is never used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support import prefix_runs, resumed_runs, worlds
from support.dist import World

from megatron.bcd import data
from megatron.bcd.config import RunConfig

NUM_ENTRIES = 15  # of the text's sequences, the share of prefix_runs.FLAGS


@pytest.fixture(scope="module")
def flags(text_data: str) -> dict[str, Any]:
    """Return two phases, the second one with a prefix."""
    return prefix_runs.FLAGS | {"data_path": text_data, "train_iters": 8, "eval_iters": 0}


@pytest.fixture(scope="module")
def computed(world1: World, flags: dict[str, Any]) -> dict[str, Any]:
    return world1.run(worlds.train_run, worlds.run_config(**flags))[0]


def served(world: World, flags: dict[str, Any], root: Path, **others: Any) -> dict[str, Any]:
    return world.run(prefix_runs.served_run, worlds.run_config(**flags | others, bcd_prefix_cache=root))[0]


DAMAGES: dict[str, tuple[Callable[[Path], Any], int]] = {
    "nothing": (lambda path: None, 0),
    "cut_off": (lambda path: path.write_bytes(path.read_bytes()[:-1]), NUM_ENTRIES),
    "absent": (lambda path: path.unlink(), NUM_ENTRIES),
}


def test_what_is_damaged_is_computed_anew(
    world1: World, flags: dict[str, Any], computed: dict[str, Any], tmp_path: Path
) -> None:
    """A damaged cache is computed anew, and an undamaged one is read."""
    assert served(world1, flags, tmp_path)["num_computed"] == NUM_ENTRIES
    (path,) = tmp_path.glob("prefix_*")
    for damage, (do, num_computed) in DAMAGES.items():
        do(path)
        outcome = served(world1, flags, tmp_path)
        assert outcome["losses"] == computed["losses"], damage
        assert outcome["num_computed"] == num_computed, damage
        assert outcome["hits"] == [0] * 4 + [8] * 4 and max(outcome["bytes"]) == path.stat().st_size


def test_other_runs_have_caches_of_their_own(world1: World, flags: dict[str, Any], tmp_path: Path) -> None:
    """A run with other weights, samples or network fills another cache."""
    served(world1, flags, tmp_path)
    others: list[dict[str, Any]] = [
        {"lr": 2e-3},
        {"bcd_sample_ratio": 0.0071},
        {"rotary_base": 100, "position_embedding_type": "rope"},
    ]
    for other in others:
        before = {path.name for path in tmp_path.glob("prefix_*")}
        assert served(world1, flags, tmp_path, **other)["num_computed"] == NUM_ENTRIES, other
        after = {path.name for path in tmp_path.glob("prefix_*")}
        assert len(after) == 1 and after != before, other


def test_a_killed_fill_begins_again(
    world1: World, flags: dict[str, Any], computed: dict[str, Any], tmp_path: Path
) -> None:
    """After a killed fill the next run computes all entries anew."""
    world1.run(prefix_runs.killed_in_fill, worlds.run_config(**flags, bcd_prefix_cache=tmp_path), 3)
    outcome = served(world1, flags, tmp_path)
    assert outcome["losses"] == computed["losses"]
    assert outcome["num_computed"] == NUM_ENTRIES


def read_in_another_order(config: RunConfig) -> str:
    """Return the error of a run that reads a phase's entries one sample late."""
    original = data.subset_indices

    def late(*args: Any, position: int, **kwargs: Any) -> Any:
        return original(*args, position=position + 1, **kwargs)

    with mock.patch.object(data, "subset_indices", late), pytest.raises(RuntimeError) as raised:
        worlds.train_run(config)
    return str(raised.value)


def test_entries_of_other_samples(world1: World, flags: dict[str, Any], tmp_path: Path) -> None:
    """A run whose cached entries belong to other samples than its batches ends with an error."""
    [error] = world1.run(read_in_another_order, worlds.run_config(**flags, bcd_prefix_cache=tmp_path))
    assert error.startswith(f"--bcd-prefix-cache {tmp_path}: ")


def test_used_too_seldom(world1: World, flags: dict[str, Any], tmp_path: Path) -> None:
    """A cache that is read too seldom is not filled."""
    outcome = served(world1, flags, tmp_path, bcd_sample_ratio=0.03)
    assert sum(outcome["hits"]) == outcome["num_computed"] == 0 and not list(tmp_path.glob("prefix_*"))


@pytest.mark.parametrize(("fault", "rank"), [("write", 1), ("publish", 0)])
def test_a_disk_that_refuses(world2: World, flags: dict[str, Any], tmp_path: Path, fault: str, rank: int) -> None:
    """If one rank's disk fails, both ranks warn, train as without a cache, and leave none behind."""
    config = worlds.run_config(**flags, world_size=2, bcd_prefix_cache=tmp_path)
    first, second = world2.run(prefix_runs.fault_on_rank, config, rank, fault)
    computed = world2.run(worlds.train_run, worlds.run_config(**flags, world_size=2))
    for mine, expected in zip((first, second), computed, strict=True):
        assert len(mine["losses"]) == 8 and mine["losses"] == expected["losses"]
        assert worlds.same_bits(mine["weights"], expected["weights"]) == []
    assert first["warnings"] == second["warnings"]
    assert any(warning.startswith("--bcd-prefix-cache") for warning in first["warnings"])
    assert not list(tmp_path.glob("prefix_*"))


def test_resume(world1: World, flags: dict[str, Any], tmp_path: Path) -> None:
    """A run that stops inside a phase with a cached prefix resumes as the uninterrupted run."""
    config = worlds.run_config(**flags, bcd_prefix_cache=tmp_path / "cache")
    assert world1.run(resumed_runs.stopped_and_resumed, config, [6], str(tmp_path / "saved"))[0] == []
