"""Layers in host memory that are loaded, updated and written back chunk by chunk."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import resumed_runs, streamed_layers, worlds
from support.dist import World

from megatron.bcd.checkpoint import optimizer_state
from megatron.bcd.checkpoint.shard_writer import Planner, ShardWrite
from megatron.bcd.optim.state import MAIN_PARAM
from megatron.bcd.runtime import host_memory


def on_two_nodes(config: Any = None, **arguments: Any) -> Any:
    """Return the state or the outcome of a run whose two ranks share no memory."""
    with mock.patch.object(host_memory, "_node", lambda: str(torch.distributed.get_rank())):
        return streamed_layers.state_at_end(**arguments) if config is None else resumed_runs.one_part(config)


def test_two_nodes(world2: World, tmp_path: Path) -> None:
    """Two nodes without shared memory train, save and resume with the weights and low bits of one node."""
    on_device = world2.run(streamed_layers.state_at_end, is_on_host=False, num_layers=8)
    assert world2.run(on_two_nodes, num_layers=8) == on_device
    flags = {"train_iters": 4} | RULES["pretrain"]
    whole = world2.run(resumed_runs.one_part, config_of(**flags))
    world2.run(on_two_nodes, config_of(tmp_path, exit_interval=2, **flags))
    rest = world2.run(on_two_nodes, config_of(load=tmp_path, **flags))
    for expected, late in zip(whole, rest, strict=True):
        assert resumed_runs.differences(expected, [late]) == []


RULES: dict[str, dict[str, Any]] = {
    "factored": {"bcd_num_blocks": 0, "bcd_inactive_update": "factored"},
    "pretrain": {"bcd_preset": "pretrain", "bcd_num_blocks": 2},
    "adam": {"bcd_num_blocks": 1, "clip_grad": 0.0},
}


def config_of(folder: Path | None = None, **flags: Any) -> Any:
    run = {"num_layers": 4, "mock_data": True, "split": None, "micro_batch_size": 1, "global_batch_size": 4}
    run |= {"train_iters": 6, "eval_iters": 0, "bf16": True, "bcd_layers_on": "host", "swiglu": True}
    return worlds.run_config(**run | flags | ({} if folder is None else {"save": folder}))


def saved_in_passing(config: Any) -> tuple[dict[str, Any], Counter[str]]:
    """Delay the writing of a run's checkpoints as long as possible. Return its outcome, and bytes of the layers' main
    parameters and weights in all saves: of all, of those that a save copied, and the most at a time while it wrote."""
    on_host, seen = ShardWrite._on_host, Counter[str]()
    lookup_object, made = Planner.lookup_object, list[Any]()

    def look_up(self: Planner, index: Any) -> Any:
        result = lookup_object(self, index)
        if ".layers." in index.fqn and index.fqn.startswith(f"optimizer.{MAIN_PARAM}.") and result.dim() > 1:
            made.append(weakref.ref(result))
            alive = [each() for each in made if each() is not None]
            seen["most"] = max(seen["most"], sum(each.untyped_storage().nbytes() for each in alive))
        return result

    def count(self: ShardWrite, part: Any) -> torch.Tensor:
        result = on_host(self, part)
        is_state, is_main = part.key.startswith("optimizer."), part.key.startswith(f"optimizer.{MAIN_PARAM}.")
        kind = "main" if is_main else "state" if is_state else "model"
        if ".layers." in part.key and part.data.dim() > 1:
            is_copied = not result.is_meta if kind != "model" else result.data_ptr() != part.data.data_ptr()
            seen[kind] += result.nbytes
            seen[f"copied {kind}"] += result.nbytes * is_copied
        return result

    def look_at_summary(run: worlds.RecordedRun) -> None:
        seen["said"] = sum("--async-save writes at once" in note for note in run.recorder.summary.notes)

    with (
        resumed_runs.writes_wait_for_finish(),
        mock.patch.object(ShardWrite, "is_writing", True),
        mock.patch.object(ShardWrite, "_on_host", count),
        mock.patch.object(Planner, "lookup_object", look_up),
    ):
        return resumed_runs.one_part(config, after_step=look_at_summary), seen


def loaded_in_portions(config: Any) -> tuple[dict[str, Any], int]:
    """Resume with portions of one matrix. Return the outcome, and the most bytes of layers' state loaded at a time."""
    requested, most = optimizer_state.requested_state, 0

    def count(*args: Any) -> Any:
        nonlocal most
        entries = requested(*args)
        sizes = [math.prod(entry.data.shape) for name, entry in entries.items() if ".layers." in name]
        most = max(most, 4 * sum(sizes))
        return entries

    with (
        mock.patch.object(optimizer_state, "_PORTION", 4096),
        mock.patch.object(optimizer_state, "requested_state", count),
    ):
        return resumed_runs.one_part(config), most


@pytest.mark.parametrize(("size", "rule"), [(1, "adam"), (2, "factored"), (2, "pretrain")])
def test_saves_layers_that_each_step_writes(world1: World, world2: World, tmp_path: Path, size: int, rule: str) -> None:
    """An asynchronous save has the layers as they were before later steps, without a copy of their weights. A resumed
    run loads their state in portions."""
    world, flags = (world1, world2)[size - 1], RULES[rule]
    whole = world.run(resumed_runs.one_part, config_of(**flags))
    folder = tmp_path / "run"
    saving = world.run(saved_in_passing, config_of(folder, save_interval=2, async_save=True, **flags))
    seen = sum((seen for _, seen in saving), Counter[str]())
    assert seen["said"] > 0
    assert seen["main"] == 2 * seen["model"] > 0
    assert seen["copied model"] == 0
    most = max(each["most"] for _, each in saving)
    assert rule == "pretrain" or most < seen["main"] / 3 / 4, "of three saves of four layers"
    assert seen["copied main"] == (seen["main"] // 2 if rule == "pretrain" else 0), "of the active block alone"
    assert rule != "adam" or (seen["state"], seen["copied state"]) == (2 * seen["main"], 0)
    resumed_runs.point_to(str(folder), 2)
    rest = world.run(loaded_in_portions, config_of(load=folder, **flags))
    assert max(most for _, most in rest) < seen["main"] / 3 / 2
    for expected, (passing, _), (late, _) in zip(whole, saving, rest, strict=True):
        assert resumed_runs.differences(expected, [passing]) + resumed_runs.differences(expected, [late]) == []
