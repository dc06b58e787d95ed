"""A phase that reads its prefix from the cache trains like one that computes it, bit for bit. A cache that is torn,
incomplete, from another model or on a full disk is never used."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support import resumed_runs, worlds
from support.dist import World

from megatron.bcd.config import RunConfig
from megatron.bcd.prefix_cache.store import PrefixFile

FLAGS: dict[str, Any] = {"bcd_sample_ratio": 0.007, "bcd_steps_per_block": 4, "train_iters": 12, "eval_iters": 1,
                         "eval_interval": 7, "global_batch_size": 8}  # fmt: skip
"""A subset that each phase reads several times."""
HEAD = {"bcd_head_phase": True, "untie_embeddings_and_output_weights": True, "bcd_order": "descending"}
CASES: dict[str, dict[str, Any]] = {
    "recompute_bf16": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    | {"bf16": True},
    "fp8": {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise", "micro_batch_size": 1}
    | {"hidden_size": 64, "seq_length": 24},
    "masks": {"reset_attention_mask": True, "reset_position_ids": True, "position_embedding_type": "rope"},
    "stage": worlds.PIPELINE | {"bcd_layout": "stage", "bcd_num_blocks": None},
    "llama": worlds.PIPELINE
    | {"form": "llama", "group_query_attention": True, "num_query_groups": 2, "bcd_order": "descending"}
    | {"bcd_layout": "submodel", "bcd_num_blocks": 2, "train_iters": 16},
    "interleaved": worlds.PIPELINE | {"bcd_layout": "interleaved"},
    "head": HEAD | {"train_iters": 16},
}


@pytest.mark.parametrize("case", CASES)
def test_cached_is_computed(
    world1: World, world2: World, world4: World, text_data: str, tmp_path: Path, case: str
) -> None:
    """A run that reads its prefix from the cache equals one that computes it, bit for bit, and reads every sample."""
    flags = FLAGS | {"data_path": text_data} | CASES[case]
    world = {1: world1, 2: world2, 4: world4}[flags.get("world_size", 1)]
    computed = world.run(worlds.train_run, worlds.run_config(**flags))
    served = world.run(served_run, worlds.run_config(**flags, bcd_prefix_cache=tmp_path))
    for mine, other in zip(served, computed, strict=True):
        assert mine["losses"] == other["losses"]
        assert mine["grad_norms"] == other["grad_norms"]
        assert worlds.same_bits(mine["weights"], other["weights"]) == []
    hits = sum(served[0]["hits"])
    with_prefix = sum(block > 0 for block in served[0]["blocks"])
    assert hits == with_prefix * 8, "every sample of the phases with a prefix"
    assert served[0]["warnings"] == []


def served_run(config: RunConfig) -> dict[str, Any]:
    """Run `worlds.train_run`; also return the cache's counters, and `computed`: entries by phase."""
    fills: list[int] = []
    original = PrefixFile.write

    def counting(file: PrefixFile, slots: Any, entries: Any) -> None:
        fills.append(len(slots))
        original(file, slots, entries)

    with mock.patch.object(PrefixFile, "write", counting), worlds.started(config) as run:
        run.train()
        return worlds.outcome(run) | {
            "hits": [record.prefix_cache_hits for record in run.recorder.steps],
            "bytes": [record.prefix_cache_bytes for record in run.recorder.steps],
            "warnings": run.recorder.warnings,
            "num_computed": sum(fills),
        }


def killed_in_fill(config: RunConfig, after: int) -> None:
    """End a run during a fill, after this many writes, as if it had been killed."""

    def write(file: PrefixFile, slots: Any, entries: Any) -> None:
        nonlocal after
        if not after:
            raise KeyboardInterrupt
        after -= 1
        original(file, slots, entries)

    original = PrefixFile.write
    with contextlib.suppress(KeyboardInterrupt), mock.patch.object(PrefixFile, "write", write):
        with worlds.started(config) as run:
            run.train()
        raise AssertionError("it was not killed")


def fault_on_rank(config: RunConfig, rank: int, fault: str) -> dict[str, Any]:
    """Run `worlds.train_run` with a disk that fails on one rank."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "some_file")

    is_here = os.environ["RANK"] == str(rank)
    with (
        mock.patch.object(PrefixFile, fault, fail) if is_here else contextlib.nullcontext(),
        worlds.started(config) as run,
    ):
        run.train()
        return worlds.outcome(run) | {"warnings": run.recorder.warnings}


NUM_ENTRIES = 15  # of the text's sequences, the share of FLAGS


@pytest.fixture(scope="module")
def flags(text_data: str) -> dict[str, Any]:
    """Return two phases, the second one with a prefix."""
    return FLAGS | {"data_path": text_data, "train_iters": 8, "eval_iters": 0}


@pytest.fixture(scope="module")
def computed(world1: World, flags: dict[str, Any]) -> dict[str, Any]:
    return world1.run(worlds.train_run, worlds.run_config(**flags))[0]


def served(world: World, flags: dict[str, Any], root: Path, **others: Any) -> dict[str, Any]:
    return world.run(served_run, worlds.run_config(**flags | others, bcd_prefix_cache=root))[0]


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
    """A run with other weights, samples or network fills another cache in its place; a user's file stays."""
    (tmp_path / "prefix_notes.bin").write_text("mine")
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
        assert len(after) == 2 and before & after == {"prefix_notes.bin"}, other


def test_a_killed_fill_begins_again(
    world1: World, flags: dict[str, Any], computed: dict[str, Any], tmp_path: Path
) -> None:
    """After a killed fill the next run computes all entries anew."""
    world1.run(killed_in_fill, worlds.run_config(**flags, bcd_prefix_cache=tmp_path), 3)
    outcome = served(world1, flags, tmp_path)
    assert outcome["losses"] == computed["losses"]
    assert outcome["num_computed"] == NUM_ENTRIES


def test_used_too_seldom(world1: World, flags: dict[str, Any], tmp_path: Path) -> None:
    """A cache that is read too seldom is not filled."""
    outcome = served(world1, flags, tmp_path, bcd_sample_ratio=0.03)
    assert sum(outcome["hits"]) == outcome["num_computed"] == 0 and not list(tmp_path.glob("prefix_*"))


@pytest.mark.parametrize(("fault", "rank"), [("write", 1), ("publish", 0)])
def test_a_disk_that_refuses(world2: World, flags: dict[str, Any], tmp_path: Path, fault: str, rank: int) -> None:
    """If one rank's disk fails, both ranks warn, train as without a cache, and leave none behind."""
    config = worlds.run_config(**flags, world_size=2, bcd_prefix_cache=tmp_path)
    first, second = world2.run(fault_on_rank, config, rank, fault)
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
