"""Several worlds that train one model through torchft, on one machine."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support import worlds
from support.dist import RankError, World

pytest.importorskip("torchft")

GROUPS: dict[str, Any] = {"bcd_steps_per_block": 4, "train_iters": 12, "outer_timeout_seconds": 20}
MEAN: dict[str, Any] = {"outer_lr": 1, "outer_momentum": 0}


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """HOST:PORT of one that notices soon who is gone."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=5000, heartbeat_timeout_ms=1000)
    yield f"127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


@pytest.fixture(scope="session")
def other_worlds() -> Iterator[list[World]]:
    """Worlds of one rank that are other groups."""
    found = [World(1), World(1)]
    yield found
    for world in found:
        world.close()


def train(config: Any, *, dies_after: int | None = None) -> dict[str, Any]:
    """As `worlds.train_run`, of one group; `dies_after`: the step after which its process is killed."""

    def after_step(one: worlds.RecordedRun) -> None:
        if one.iteration + 1 == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)

    with worlds.started(config, after_step=after_step) as one:
        one.train()
        found = worlds.outcome(one)
        if one.groups is not None:
            one.groups.leave()
        return found | {"notes": one.recorder.notes}


def together(groups: list[World], configs: list[Any], **options: Any) -> list[Any]:
    """`train` on all worlds at once: results by group and rank, or what was raised. `options` are the last group's."""
    with ThreadPoolExecutor(len(groups)) as pool:
        runs = [
            pool.submit(world.run, train, config, **(options if world is groups[-1] else {}))
            for world, config in zip(groups, configs, strict=True)
        ]
        return [run.exception() or run.result() for run in runs]


def configs(number: int, lighthouse: str, **flags: Any) -> list[Any]:
    """Of each of so many groups."""
    shared = GROUPS | {"lighthouse": lighthouse, "replica_groups": number, "min_replica_groups": number} | flags
    return [worlds.run_config(**shared, replica_id=f"group{index}") for index in range(number)]


def test_one_group_is_a_run_without_groups(world1: World, text_data: str, lighthouse: str) -> None:
    """Values that go to host memory and back, or a mean of one, change a bit."""
    flags = GROUPS | {"data_path": text_data, "bf16": True, "bcd_preset": "pretrain"}
    del flags["outer_timeout_seconds"]
    (plain,) = world1.run(train, worlds.run_config(**flags))
    (grouped,) = world1.run(train, worlds.run_config(**flags | MEAN, outer_interval=1, lighthouse=lighthouse))
    assert plain["steps"] == grouped["steps"]
    assert plain["metrics"] == grouped["metrics"]
    assert not worlds.same_bits(plain["weights"], grouped["weights"])


def test_two_groups_are_data_parallelism(
    world1: World, world2: World, other_worlds: list[World], text_data: str, lighthouse: str
) -> None:
    """Groups that read each other's samples, or average with other weights than 1 / number."""
    flags = {"data_path": text_data, "optimizer": "sgd", "lr": 0.1, "clip_grad": 0, "log_interval": 1}
    whole = world2.run(train, worlds.run_config(**flags, world_size=2, bcd_steps_per_block=4, train_iters=12))
    one = MEAN | {"outer_interval": 1, "outer_compression": "fp32", "global_batch_size": 4}
    groups = together(other_worlds, configs(2, lighthouse, **flags | one))
    assert not worlds.same_bits(groups[0][0]["weights"], groups[1][0]["weights"])
    for name, weight in whole[0]["weights"].items():
        torch.testing.assert_close(weight, groups[0][0]["weights"][name], rtol=1e-5, atol=1e-6)
    losses = [[step["loss"] for step in ranks[0]["steps"]] for ranks in groups]
    mean = [sum(pair) / 2 for pair in zip(*losses, strict=True)]
    assert mean == pytest.approx(whole[0]["losses"], rel=1e-5)
    assert [one["consumed_samples"] for one in groups[0][0]["metrics"]] == [8 * (step + 1) for step in range(12)]


@pytest.mark.parametrize("cut", ["pipeline2", "data2", "tensor2"])
@pytest.mark.parametrize("preset", ["paper", "pretrain"])
def test_groups_agree(text_data: str, lighthouse: str, pairs: list[World], cut: str, preset: str) -> None:
    """After an exchange some rank's weights differ from those of the same rank of another group."""
    flags = worlds.CUTS[cut] | {"data_path": text_data, "bf16": True, "bcd_preset": preset, "outer_interval": 2}
    first, second = together(pairs, configs(2, lighthouse, **flags))
    for left, right in zip(first, second, strict=True):
        assert left["losses"] != right["losses"]
        assert not worlds.same_bits(left["weights"], right["weights"])


@pytest.fixture(scope="session")
def pairs() -> Iterator[list[World]]:
    found = [World(2), World(2)]
    yield found
    for world in found:
        world.close()
