"""Several worlds that train one model through torchft, on one machine."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import resumed_runs, worlds
from support.dist import RankError, World

from megatron.bcd import data
from megatron.bcd.training.replica_groups import ReplicaGroups

pytest.importorskip("torchft")

GROUPS: dict[str, Any] = {"bcd_steps_per_block": 4, "train_iters": 12, "outer_timeout_seconds": 20}
MEAN: dict[str, Any] = {"outer_lr": 1, "outer_momentum": 0}


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """HOST:PORT of a lighthouse that quickly notices lost groups."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=5000, heartbeat_timeout_ms=1000)
    yield f"127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


@pytest.fixture(scope="session")
def other_worlds() -> Iterator[list[World]]:
    """Worlds of one rank that serve as the other groups."""
    group_worlds = [World(1), World(1)]
    yield group_worlds
    for world in group_worlds:
        world.close()


@pytest.fixture(scope="session")
def pairs() -> Iterator[list[World]]:
    group_worlds = [World(2), World(2)]
    yield group_worlds
    for world in group_worlds:
        world.close()


def train(
    config: Any,
    *,
    starts_with: int = 1,
    end: str = "",
    end_after: int | None = None,
    refuses: int | None = None,
    sleeps: tuple[int, int] = (0, 0),
    reads_same: bool = False,
) -> dict[str, Any]:
    """Run one group as `worlds.train_run` does; it starts when there are `starts_with` groups.

    `end` is "kill", "hang" or "signal" (SIGTERM, a moment later), after the step `end_after`, or "kill in exchange"
    inside the exchange of that number. `refuses` is the number of an exchange that does not count for this group, as if
    its connection had broken at the end. `sleeps`: after which step, and for how many seconds. All numbers start at 1.
    With `reads_same` all groups read the first group's samples.
    """
    join, change, agree = (getattr(ReplicaGroups, name) for name in ("join", "_change", "_agree"))
    number, sent = 0, []

    def after_step(run: worlds.RecordedRun) -> None:
        if run.iteration + 1 == end_after and end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if run.iteration + 1 == end_after and end == "hang":
            subprocess.Popen(["sh", "-c", f"sleep 12; kill -9 {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        if run.iteration + 1 == end_after and end == "signal":
            subprocess.Popen(["sh", "-c", f"sleep 3; kill {os.getpid()}"])
        if run.iteration + 1 == sleeps[0]:
            time.sleep(sleeps[1])

    def joining(target: ReplicaGroups) -> bool:
        return join_several(target, join, starts_with)

    def counted_change(target: ReplicaGroups, size: int) -> Any:
        nonlocal number
        number += size > 1
        if number == end_after and end == "kill in exchange":
            os.kill(os.getpid(), signal.SIGKILL)
        parts = change(target, size)
        sent.append(sum(part.nbytes for part in parts.values()))
        return parts

    def agreeing(target: ReplicaGroups, *, is_good: bool) -> bool:
        return agree(target, is_good=is_good and (number == 0 or number != refuses))

    sample_number = data.GroupShare.sample_number

    def first(target: data.GroupShare, number: Any) -> Any:
        return sample_number(dataclasses.replace(target, group=0), number)

    with (
        mock.patch.object(data.GroupShare, "sample_number", first if reads_same else sample_number),
        mock.patch.object(ReplicaGroups, "join", joining),
        mock.patch.object(ReplicaGroups, "_change", counted_change),
        mock.patch.object(ReplicaGroups, "_agree", agreeing),
        worlds.started(config, after_step=after_step) as run,
    ):
        run.train()
        result = worlds.outcome(run)
        if run.groups is not None:
            run.groups.leave()
        told = {"notes": run.recorder.notes, "exchanges": run.recorder.exchanges, "sent": sent}
        return result | told | {"trained": sum(weight.numel() for weight in run.active.parameters.active().values())}


def join_several(target: ReplicaGroups, join: Callable[[ReplicaGroups], bool], number: int) -> bool:
    """Join when there are at least `number` groups."""
    settings = target._settings
    least = max(settings.min_replica_groups, number)
    with mock.patch.object(target, "_settings", dataclasses.replace(settings, min_replica_groups=least)):
        return join(target)


def together(
    group_worlds: list[World], configs: list[Any], *options: dict[str, Any], starts_with: int = 0
) -> list[Any]:
    """Run `train` on all worlds at once. Return results by group and rank, or the exception; `options` are the last
    groups'."""
    first: list[dict[str, Any]] = [{}] * (len(group_worlds) - len(options))
    with ThreadPoolExecutor(len(group_worlds)) as pool:
        runs = [
            pool.submit(
                world.run, train, config, timeout=60, **{"starts_with": starts_with or len(group_worlds), **option}
            )
            for world, config, option in zip(group_worlds, configs, [*first, *options], strict=True)
        ]
        return [run.exception() or run.result() for run in runs]


def configs(number: int, lighthouse: str, **flags: Any) -> list[Any]:
    shared = GROUPS | {"lighthouse": lighthouse, "replica_groups": number, "min_replica_groups": number} | flags
    return [worlds.run_config(**shared, replica_id=f"group{index}") for index in range(number)]


def test_one_group_is_a_run_without_groups(world1: World, text_data: str, lighthouse: str) -> None:
    """A run with one group equals a run without groups bit for bit."""
    flags = GROUPS | {"data_path": text_data, "bf16": True, "bcd_preset": "pretrain"}
    del flags["outer_timeout_seconds"]
    (plain,) = world1.run(train, worlds.run_config(**flags))
    (grouped,) = world1.run(train, worlds.run_config(**flags | MEAN, outer_interval=1, lighthouse=lighthouse))
    assert plain["steps"] == grouped["steps"]
    assert plain["metrics"] == grouped["metrics"]
    assert not worlds.same_bits(plain["weights"], grouped["weights"])


def test_two_groups_are_data_parallelism(
    world2: World, other_worlds: list[World], text_data: str, lighthouse: str
) -> None:
    """Two groups that exchange after each step train as two data-parallel ranks, on samples of their own."""
    # with an epsilon this large, Adam's update is linear in the gradients, so updates by two halves of a batch have as
    # their mean the update by the whole
    linear = {"adam_eps": 1e4, "lr": 1e3, "weight_decay": 0, "clip_grad": 0}
    flags = linear | {"data_path": text_data, "log_interval": 1}
    whole = world2.run(
        train, worlds.run_config(**flags, world_size=2, global_batch_size=8, bcd_steps_per_block=4, train_iters=12)
    )
    every_step = MEAN | {"outer_interval": 1, "outer_compression": "fp32", "global_batch_size": 4}
    both = together(other_worlds, configs(2, lighthouse, **flags | every_step))
    agree(*both)
    for name, weight in whole[0]["weights"].items():
        torch.testing.assert_close(weight, both[0][0]["weights"][name], rtol=1e-5, atol=1e-6)
    losses = [[step["loss"] for step in ranks[0]["steps"]] for ranks in both]
    mean = [sum(pair) / 2 for pair in zip(*losses, strict=True)]
    assert mean == pytest.approx(whole[0]["losses"], rel=1e-5)
    assert [metric["consumed_samples"] for metric in both[0][0]["metrics"]] == [8 * (step + 1) for step in range(12)]


def test_groups_agree(text_data: str, lighthouse: str, pairs: list[World]) -> None:
    """After an exchange each rank has the weights of the same rank of another group, and a tied weight has the same
    bits on both stages. A rank sums what the phase trains, in bf16."""
    flags = worlds.CUTS["pipeline2"] | {"data_path": text_data, "bf16": True, "bcd_preset": "pretrain"}
    flags |= {"outer_interval": 2}
    first, second = together(pairs, configs(2, lighthouse, **flags))
    for left, right in zip(first, second, strict=True):
        assert left["losses"] != right["losses"]
        assert left["sent"][-1] == pytest.approx(2 * left["trained"], abs=64)
        assert not worlds.same_bits(left["weights"], right["weights"])
    both = [[each | {"group": 0} for each in ranks[0]["exchanges"]] for ranks in (first, second)]
    assert both[0] == both[1]
    assert [each["iteration"] for each in both[0]] == [*range(0, 13, 2)]
    tied = first[0]["weights"]["embedding.word_embeddings.weight"], first[1]["weights"]["output_layer.weight"]
    assert not worlds.same_bits({"": tied[0]}, {"": tied[1]})


def agree(*groups: Any) -> None:
    first, *others = groups
    for other in others:
        for left, right in zip(first, other, strict=True):
            assert not worlds.same_bits(left["weights"], right["weights"])


@pytest.mark.parametrize("end, after", [("kill in exchange", 2), pytest.param("hang", 6, marks=pytest.mark.long)])
def test_a_group_is_lost(
    world1: World, other_worlds: list[World], text_data: str, lighthouse: str, end: str, after: int
) -> None:
    """The remaining groups take all steps and end with the same weights."""
    flags = {"data_path": text_data, "min_replica_groups": 1, "bcd_preset": "pretrain"}
    group_worlds = [world1, *other_worlds]
    *left, lost = together(group_worlds, configs(3, lighthouse, **flags), {"end": end, "end_after": after})
    assert "died with exit code -9" in str(lost), lost
    agree(*left)
    assert len(left[0][0]["steps"]) == 12
    consumed = [metric["consumed_samples"] for metric in left[0][0]["metrics"]]
    assert consumed == [12 * step for step in range(1, 9)] + [12 * 8 + 8 * step for step in range(1, 5)]


def test_a_signal_while_a_group_waits_for_others(other_worlds: list[World], text_data: str, lighthouse: str) -> None:
    """A group that waits for others stops at a signal, and reports it."""
    (first,), lost = together(
        other_worlds,
        configs(2, lighthouse, data_path=text_data),
        {"end": "signal", "end_after": 8},
        {"end": "kill", "end_after": 6},
    )
    assert isinstance(lost, RankError) and len(first["steps"]) == 8
    assert any("SIGTERM" in note for note in first["notes"])


@pytest.mark.long
def test_an_exchange_that_counts_for_one_group(
    world1: World, other_worlds: list[World], text_data: str, lighthouse: str
) -> None:
    """Where an exchange counts for one group only, the others repeat it without that group, which then takes their
    state."""
    planned = configs(3, lighthouse, data_path=text_data, min_replica_groups=1, bcd_preset="pretrain")
    two = {"refuses": 2, "sleeps": (11, 4)}  # else they meet without the first one
    all_three = together([world1, *other_worlds], planned, {"sleeps": (9, 7)}, two, two)
    agree(*all_three)
    assert any("state of another" in note for note in all_three[0][0]["notes"])
    assert len(all_three[1][0]["steps"]) == 12


def come_back(group_worlds: list[World], planned: list[Any], **options: Any) -> list[dict[str, Any]]:
    """Kill the last group after its fifth step, and start it again while the others wait for it."""
    with ThreadPoolExecutor(len(group_worlds)) as pool:
        left = [
            pool.submit(world.run, train, config, timeout=60, **options)
            for world, config in zip(group_worlds[:-1], planned[:-1], strict=True)
        ]
        with pytest.raises(RankError):
            group_worlds[-1].run(train, planned[-1], end="kill", end_after=5, **options)
        back = group_worlds[-1].run(train, planned[-1], timeout=40, **options)
        results = [*(run.result() for run in left), back]
    agree(*results)
    return [ranks[0] for ranks in results]


def test_a_group_comes_back(other_worlds: list[World], text_data: str, lighthouse: str) -> None:
    """A group that comes back continues with weights, optimizer state and counters of the others. Both groups read the
    same samples here."""
    flags = {"data_path": text_data, "bcd_preset": "pretrain", "bf16": True, "bcd_optimizer_state": "host"}
    flags |= {"outer_interval": 2, "bcd_layers_on": "host"}
    planned = configs(2, lighthouse, **flags)
    first, back = come_back(other_worlds, planned, reads_same=True)
    assert len(back["steps"]) == 6
    assert back["steps"] == first["steps"][6:]
    assert back["metrics"] == first["metrics"][6:]


def test_resume(text_data: str, lighthouse: str, pairs: list[World], tmp_path: Path) -> None:
    """A run resumes with its outer momenta, also under another layout and with another number of groups."""
    flags = {"data_path": text_data, "outer_interval": 2, "save": str(tmp_path), "save_interval": 7}
    flags |= {"global_batch_size": 4, "bcd_preset": "pretrain", "load": str(tmp_path)}

    def run(cut: str, number: int = 1) -> list[Any]:
        shutil.rmtree(tmp_path / "iter_0000012", ignore_errors=True)
        return together(pairs[:number], configs(number, lighthouse, **flags | worlds.CUTS[cut]))

    (whole,), (again,) = run("data2"), run("data2")
    assert again[0]["losses"] == whole[0]["losses"][7:]
    agree(whole, again)
    ((first, _),) = run("pipeline2")
    assert first["losses"] == pytest.approx(whole[0]["losses"][7:], rel=1e-4)
    agree(*run("data2", 2))


def test_an_exported_model_is_of_all_groups(
    other_worlds: list[World], text_data: str, lighthouse: str, tmp_path: Path
) -> None:
    """--save-hf-interval writes the first group's own weights, within a phase and before the exchange."""
    planned = configs(2, lighthouse, data_path=text_data)
    exports = [{"save_hf": str(tmp_path / f"out{index}"), "save_hf_interval": 6} for index in range(2)]
    both = together(
        other_worlds,
        [resumed_runs.with_checkpoints(config, **more) for config, more in zip(planned, exports, strict=True)],
    )
    agree(*both)
    assert [exchange["iteration"] for exchange in both[0][0]["exchanges"]] == [0, 4, 6, 8, 12]
    assert sorted(path.name for path in (tmp_path / "out0").glob("iter_*")) == ["iter_0000006", "iter_0000012"]


def test_leftovers_of_a_killed_save(world1: World, text_data: str, lighthouse: str, tmp_path: Path) -> None:
    """A save removes older half-written checkpoints of killed groups, and leaves newer ones."""
    for iteration in (3, 60):
        (tmp_path / f"iter_{iteration:07d}.incomplete").mkdir()
    together([world1], configs(1, lighthouse, data_path=text_data, save=str(tmp_path), save_interval=6))
    assert [path.name for path in tmp_path.glob("*.incomplete")] == ["iter_0000060.incomplete"]


@pytest.mark.long
def test_a_group_of_another_run(world1: World, other_worlds: list[World], text_data: str, lighthouse: str) -> None:
    """A group with other flags is refused, and the others train on without it."""
    planned = configs(3, lighthouse, data_path=text_data, min_replica_groups=2, train_iters=60)
    planned[2] = planned[2].replace_section("optimizer", lr=0.5)
    (first,), (second,), refused = together([world1, *other_worlds], planned, starts_with=1)
    assert "ValueError: --lighthouse" in str(refused) and "--lr is 0.5 here and 0.01" in str(refused)
    agree([first], [second])
    assert [metric["consumed_samples"] for metric in first["metrics"]] == [8 * (step + 1) for step in range(60)]


def test_no_groups_at_the_start(world1: World, text_data: str, lighthouse: str) -> None:
    """A group whose quorum fails before the first step ends as with a wrong flag: one line that names --lighthouse."""
    with pytest.raises(RankError, match="ValueError: --lighthouse .*: iteration 0: no replica groups met in time"):
        world1.run(train_without_quorum, *configs(1, lighthouse, data_path=text_data))


def train_without_quorum(config: Any) -> None:
    from torchft import Manager

    with mock.patch.object(Manager, "start_quorum", side_effect=TimeoutError), worlds.started(config):
        pass
