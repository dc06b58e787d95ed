"""Several worlds that train one model through torchft, on one machine."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import resumed_runs, worlds
from support.dist import RankError, World
from support.pairwise import thinned
from support.planned import exchanged_bytes, outer_bytes

from megatron.bcd import data
from megatron.bcd.checkpoint import layout
from megatron.bcd.outer import groups, membership, outer_step

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
    join, mean, agree = groups.ReplicaGroups.join, membership.Membership._mean, membership.Membership.agree
    change, apply = groups.OuterStep.change, groups.OuterStep.apply
    number = 0
    changes: list[torch.Tensor] = []
    means: list[torch.Tensor] = []

    def changed(target: groups.OuterStep) -> torch.Tensor:
        changes.append(change(target))
        return changes[-1]

    def applied(target: groups.OuterStep, mean: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        means.append(mean)
        apply(target, mean, *args, **kwargs)

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

    def joining(target: groups.ReplicaGroups) -> bool:
        least, target._least = target._least, max(target._least, starts_with)
        is_in_step = join(target)
        target._least = least
        return is_in_step

    def counted_mean(*args: Any, **kwargs: Any) -> Any:
        nonlocal number
        number += 1
        if number == end_after and end == "kill in exchange":
            os.kill(os.getpid(), signal.SIGKILL)
        return mean(*args, **kwargs)

    def agreeing(target: membership.Membership, *, is_good: bool) -> bool:
        return agree(target, is_good=is_good and (number == 0 or number != refuses))

    tell, ends = groups.ReplicaGroups._report_exchange, []

    def telling(target: groups.ReplicaGroups, place: Any) -> None:
        tell(target, place)
        ends.append(target._parts.iteration())

    sample_number = data.GroupShare.sample_number

    def first(target: data.GroupShare, number: Any) -> Any:
        return sample_number(dataclasses.replace(target, group=0), number)

    with (
        mock.patch.object(data.GroupShare, "sample_number", first if reads_same else sample_number),
        mock.patch.object(groups.ReplicaGroups, "join", joining),
        mock.patch.object(groups.OuterStep, "change", changed),
        mock.patch.object(groups.OuterStep, "apply", applied),
        mock.patch.object(membership.Membership, "_mean", counted_mean),
        mock.patch.object(groups.ReplicaGroups, "_report_exchange", telling),
        mock.patch.object(membership.Membership, "agree", agreeing),
        worlds.started(config, after_step=after_step) as run,
    ):
        run.train()
        result = worlds.outcome(run)
        if run.groups is not None:
            result |= {"changes": changes, "means": means, "missed": run.groups._outer.add_errors(torch.zeros(()))[0]}
            run.groups.leave()
        told = {"notes": run.recorder.notes, "exchanges": run.recorder.exchanges, "ends": ends}
        return result | told | {"traffic": traffic(run)}


def traffic(run: worlds.RecordedRun) -> dict[str, Any]:
    """Return the bytes that all ranks sent in each step, and this rank's host memory at the end: counted and
    planned."""
    if run.groups is None:
        return {}
    settings, state, tensors = run.config.groups, run.metrics.planned, run.config.tensor_size
    ranks = range(torch.distributed.get_world_size())
    places = [(rank // (tensors * state.num_replicas), rank // tensors % state.num_replicas) for rank in ranks]
    interval, number = settings.outer_interval or 1, settings.replica_groups
    compression = settings.outer_compression
    sent = []
    for before, step in itertools.pairwise(run.results):
        is_exchanged = step["step"] % interval == 0  # before this step, in whose line it is counted
        sent.append(
            [
                is_exchanged
                * exchanged_bytes(
                    state, stage, before["block"], replica, replica_groups=number, compression=compression
                )
                for stage, replica in places
            ]
        )
    stage, replica = places[torch.distributed.get_rank()]
    return {
        "sent": [list(record.exchanged_bytes) for record in run.recorder.steps[1:]],
        "planned_sent": sent,
        "held": run.groups.host_bytes(),
        "planned_held": outer_bytes(state, stage, run.results[-1]["block"], replica, compression=compression),
    }


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
    """Return a configuration for each of `number` groups."""
    shared = GROUPS | {"lighthouse": lighthouse, "replica_groups": number, "min_replica_groups": number} | flags
    return [worlds.run_config(**shared, replica_id=f"group{index}") for index in range(number)]


def test_one_group_is_a_run_without_groups(world1: World, text_data: str, lighthouse: str) -> None:
    """Values that are copied to host memory and back, or a mean of one value, change a bit."""
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
    """Groups read each other's samples, or do not weight the mean by 1 / number."""
    flags = {"data_path": text_data, "optimizer": "sgd", "lr": 0.1, "clip_grad": 0, "log_interval": 1}
    whole = world2.run(train, worlds.run_config(**flags, world_size=2, bcd_steps_per_block=4, train_iters=12))
    every_step = MEAN | {"outer_interval": 1, "outer_compression": "fp32", "global_batch_size": 4}
    both = together(other_worlds, configs(2, lighthouse, **flags | every_step))
    agree(*both)
    for name, weight in whole[0]["weights"].items():
        torch.testing.assert_close(weight, both[0][0]["weights"][name], rtol=1e-5, atol=1e-6)
    losses = [[step["loss"] for step in ranks[0]["steps"]] for ranks in both]
    mean = [sum(pair) / 2 for pair in zip(*losses, strict=True)]
    assert mean == pytest.approx(whole[0]["losses"], rel=1e-5)
    assert [metric["consumed_samples"] for metric in both[0][0]["metrics"]] == [8 * (step + 1) for step in range(12)]


@pytest.mark.parametrize(
    "cut, preset, compression",
    thinned(
        [
            (cut, preset, compression)
            for cut in ("data2", "tensor2", "pipeline2")
            for preset, compression in (("paper", "bf16"), ("paper", "4bit"), ("pretrain", "4bit"))
        ],
        keep_every=4,
    ),
)
def test_groups_agree(
    text_data: str, lighthouse: str, pairs: list[World], cut: str, preset: str, compression: str
) -> None:
    """After an exchange some rank's weights differ from those of the same rank of another group; or, where a row is of
    two parameters, those of a tied weight between stages."""
    flags = worlds.CUTS[cut] | {"data_path": text_data, "bf16": True, "bcd_preset": preset, "outer_interval": 2}
    flags |= {"outer_compression": compression}
    first, second = together(pairs, configs(2, lighthouse, **flags))
    for left, right in zip(first, second, strict=True):
        assert left["losses"] != right["losses"]
        assert left["traffic"]["sent"] == left["traffic"]["planned_sent"] and any(map(any, left["traffic"]["sent"]))
        assert left["traffic"]["held"] == left["traffic"]["planned_held"]
        assert not worlds.same_bits(left["weights"], right["weights"])
    if cut == "pipeline2":
        tied = first[0]["weights"]["embedding.word_embeddings.weight"], first[1]["weights"]["output_layer.weight"]
        assert not worlds.same_bits({"": tied[0]}, {"": tied[1]})


def test_4_bits_lose_nothing_for_good(other_worlds: list[World], text_data: str, lighthouse: str) -> None:
    """The compression error of a change or a mean is not sent later, is sent by the wrong group, or twice after a
    failed exchange (the third one here)."""
    flags = {"data_path": text_data, "bcd_preset": "pretrain", "outer_compression": "4bit", "outer_interval": 2}
    (first,), (second,) = together(other_worlds, configs(2, lighthouse, **flags), {"refuses": 3}, {"refuses": 3})
    assert len(first["means"]) == len(first["changes"]) == 6
    arrived, changed = 2 * sum(first["means"]), sum(first["changes"]) + sum(second["changes"])
    torch.testing.assert_close(arrived + first["missed"] + second["missed"], changed, rtol=1e-4, atol=1e-6)
    assert first["missed"].any() and second["missed"].any()


def agree(*groups: Any) -> None:
    first, *others = groups
    for other in others:
        for left, right in zip(first, other, strict=True):
            assert not worlds.same_bits(left["weights"], right["weights"])


@pytest.mark.parametrize("end, after", thinned([("kill in exchange", 2), ("kill", 6), ("hang", 6)], keep_every=2))
def test_a_group_is_lost(
    world1: World, other_worlds: list[World], text_data: str, lighthouse: str, end: str, after: int
) -> None:
    """The remaining groups lose steps, hang, or end with different weights."""
    flags = {"data_path": text_data, "min_replica_groups": 1, "bcd_preset": "pretrain"}
    group_worlds = [world1, *other_worlds]
    *left, lost = together(group_worlds, configs(3, lighthouse, **flags), {"end": end, "end_after": after})
    assert "died with exit code -9" in str(lost), lost
    agree(*left)
    assert len(left[0][0]["steps"]) == 12
    consumed = [metric["consumed_samples"] for metric in left[0][0]["metrics"]]
    assert consumed == [24 * step for step in range(1, 9)] + [24 * 8 + 16 * step for step in range(1, 5)]


def test_a_signal_while_a_group_waits_for_others(other_worlds: list[World], text_data: str, lighthouse: str) -> None:
    """The group waits until the machine is taken away, and saves nothing."""
    (first,), lost = together(
        other_worlds,
        configs(2, lighthouse, data_path=text_data),
        {"end": "signal", "end_after": 8},
        {"end": "kill", "end_after": 6},
    )
    assert isinstance(lost, RankError) and len(first["steps"]) == 8
    assert any("SIGTERM" in note for note in first["notes"])


def test_an_exchange_that_counts_for_one_group(
    world1: World, other_worlds: list[World], text_data: str, lighthouse: str
) -> None:
    """The connection breaks at the end: one group has the mean, the others have not and exchange without it. All are at
    the same step later, with different weights."""
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


@pytest.mark.parametrize(
    ("preset", "place"), thinned([("pretrain", "host"), ("paper", "host"), ("pretrain", "device")], keep_every=3)
)
def test_a_group_comes_back(
    other_worlds: list[World], text_data: str, lighthouse: str, preset: str, place: str
) -> None:
    """The group continues from its old weights, optimizer state or counters. Here both groups read the same samples."""
    flags = {"data_path": text_data, "bcd_preset": preset, "bf16": True, "bcd_optimizer_state": "host"}
    flags |= {"outer_interval": 2, "bcd_layers_on": place}
    planned = configs(2, lighthouse, **flags)
    first, back = come_back(other_worlds, planned, reads_same=True)
    assert len(back["steps"]) == 6
    assert back["steps"] == first["steps"][6:]
    assert back["metrics"] == first["metrics"][6:]


def test_a_group_comes_back_as_the_first(
    other_worlds: list[World], text_data: str, lighthouse: str, tmp_path: Path
) -> None:
    """No group writes the checkpoint that is due when it returns: the others are no longer the first."""
    planned = configs(2, lighthouse, data_path=text_data, save=str(tmp_path), save_interval=6)
    come_back(other_worlds, planned[::-1])
    assert layout.candidates(str(tmp_path)) == [12, 6]


def test_a_group_that_comes_back_adds_nothing(
    world1: World, other_worlds: list[World], text_data: str, lighthouse: str
) -> None:
    """The change that it has taken from another group counts in the mean, or in the number of changes."""
    group_worlds, flags = [world1, *other_worlds], {"data_path": text_data, "outer_interval": 2}
    first, *_ = come_back(group_worlds, configs(3, lighthouse, **flags))
    two = configs(3, lighthouse, **flags | {"min_replica_groups": 1})
    (without,), *_ = together(group_worlds, two, {"end": "kill", "end_after": 5})
    assert first["losses"][:7] == without["losses"][:7]
    assert first["losses"][7:] != without["losses"][7:]


def idle_after_join(config: Any, *, is_idle: bool) -> str:
    """Return how a run ended. If it `is_idle`, it takes the other group's main parameters and steps nothing
    afterwards."""

    is_first = True

    def perturb(run: worlds.RecordedRun) -> None:
        nonlocal is_first
        for weight in run.model.parameters() if is_idle and is_first else ():
            weight.data.mul_(1.5)

    def refine(run: worlds.RecordedRun) -> None:
        nonlocal is_first
        for main_param in worlds.masters_of(run) if is_first and not is_idle else ():
            main_param.data.mul_(1 + 2**-12)  # not of bf16
        is_first = False

    def stop(run: worlds.RecordedRun) -> None:
        if is_idle:
            run.active.scale_learning_rate(0.0)

    join = groups.ReplicaGroups.join

    def join_both(target: groups.ReplicaGroups) -> bool:
        with mock.patch.object(target, "_least", 2):
            return join(target)

    with (
        mock.patch.object(groups.ReplicaGroups, "join", join_both),
        worlds.started(config, before_build=perturb, after_build=refine, before_step=stop) as run,
    ):
        try:
            run.train()
        except RuntimeError as error:
            return str(error)
        finally:
            run.groups.leave()  # type: ignore[union-attr]
    return " ".join(run.recorder.notes)


def test_the_switch_check_of_a_group_that_joins(other_worlds: list[World], text_data: str, lighthouse: str) -> None:
    """Weights that a group takes from another one count as a change by its first step."""
    planned = configs(2, lighthouse, data_path=text_data, bf16=True, min_replica_groups=1)
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(world.run, idle_after_join, config, timeout=60, is_idle=is_idle)
            for world, config, is_idle in zip(other_worlds, planned, (False, True), strict=True)
        ]
        [healthy], [idle] = [run.result() for run in runs]
    assert idle.startswith("iteration 1, phase 0: block 0 is active, but its weights"), (idle, healthy)


def test_resume(text_data: str, lighthouse: str, pairs: list[World], tmp_path: Path) -> None:
    """Outer momenta that a checkpoint lacks, or that are another parameter's; a checkpoint that one number of groups
    can resume alone."""
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
    assert [exchange.iteration for exchange in both[0][0]["exchanges"]] == [0, 4, 6, 8, 12]
    assert sorted(path.name for path in (tmp_path / "out0").glob("iter_*")) == ["iter_0000006", "iter_0000012"]


def test_leftovers_of_a_killed_save(world1: World, text_data: str, lighthouse: str, tmp_path: Path) -> None:
    """Half a checkpoint that a killed group leaves stays for good, because groups do not lock --save."""
    for iteration in (3, 60):
        (tmp_path / f"iter_{iteration:07d}.incomplete").mkdir()
    together([world1], configs(1, lighthouse, data_path=text_data, save=str(tmp_path), save_interval=6))
    assert [path.name for path in tmp_path.glob("*.incomplete")] == ["iter_0000060.incomplete"]


def test_a_group_of_another_run(world1: World, other_worlds: list[World], text_data: str, lighthouse: str) -> None:
    """The group trains on, and its changes enter the others' mean or end their run."""
    planned = configs(3, lighthouse, data_path=text_data, min_replica_groups=2, train_iters=60)
    planned[2] = dataclasses.replace(planned[2], optimizer=dataclasses.replace(planned[2].optimizer, lr=0.5))
    (first,), (second,), refused = together([world1, *other_worlds], planned, starts_with=1)
    assert "ValueError: --lighthouse" in str(refused) and "--lr is 0.5 here and 0.01" in str(refused)
    agree([first], [second])
    assert [metric["consumed_samples"] for metric in first["metrics"]] == [16 * (step + 1) for step in range(60)]


DELAYED: dict[str, Any] = {"bcd_steps_per_block": 6, "outer_interval": 3, "outer_delay": 2, "bcd_preset": "pretrain"}


def test_a_delayed_result_keeps_the_steps_since() -> None:
    """The local steps are lost or count twice, or the anchor is not what all groups have reached."""
    values = mock.Mock(parts=mock.Mock(side_effect=[torch.tensor([1.0]), torch.tensor([1.5])]))
    outer = outer_step.OuterStep(outer_step.OuterRule(lr=1, momentum=0), mock.Mock())
    outer.anchor = torch.tensor([0.5])
    with mock.patch.object(outer, "_trained", lambda: values):
        assert outer.change() == 0.5
        outer.apply(torch.tensor([0.25]), is_alone=False, keeps_steps=True)  # the groups reach 0.75
    values.set_parts.assert_called_once_with(torch.tensor([1.25]))
    assert outer.anchor == 0.75


def test_the_outer_step_of_one_group_alone() -> None:
    """The outer update is added to the group's own values in place: the steps since count less."""
    values = mock.Mock(parts=mock.Mock(side_effect=[torch.tensor([1.0]), torch.tensor([1.5])]), sizes={"weight": 1})
    active = mock.Mock(outer_momenta={})
    outer = outer_step.OuterStep(outer_step.OuterRule(lr=0.5, momentum=0), active)
    outer.anchor = torch.tensor([0.5])
    with mock.patch.object(outer, "_trained", lambda: values):
        outer.apply(outer.change(), is_alone=True, keeps_steps=True)  # half of the change: 0.75
    values.set_parts.assert_called_once_with(torch.tensor([1.25]))
    assert outer.anchor == 0.75


@pytest.mark.parametrize("cut", thinned(["pipeline2", "data2"], keep_every=2))
def test_delayed_groups_agree(text_data: str, lighthouse: str, pairs: list[World], tmp_path: Path, cut: str) -> None:
    """Groups reach different values; a phase or a checkpoint ends before the exchange that is under way."""
    flags = worlds.CUTS[cut] | DELAYED | {"data_path": text_data, "save": str(tmp_path), "save_interval": 4}
    first, second = together(pairs, configs(2, lighthouse, **flags))
    agree(first, second)
    lines = [(exchange.iteration, exchange.lineage, exchange.values) for exchange in first[0]["exchanges"]]
    assert lines == [(item.iteration, item.lineage, item.values) for item in second[0]["exchanges"]]
    assert [line[0] for line in lines] == [0, 3, 4, 6, 8, 9, 12]
    assert first[0]["ends"] == [0, 4, 4, 6, 8, 11, 12]


def test_a_group_is_lost_while_an_exchange_is_under_way(
    world1: World, other_worlds: list[World], text_data: str, lighthouse: str
) -> None:
    """The others wait for it forever, lose their change, or end with different weights."""
    planned = configs(3, lighthouse, **DELAYED, data_path=text_data, min_replica_groups=1)
    *left, lost = together([world1, *other_worlds], planned, {"end": "kill in exchange", "end_after": 1})
    assert isinstance(lost, RankError)
    agree(*left)
    assert len(left[0][0]["steps"]) == 12
    assert [exchange.iteration for exchange in left[0][0]["exchanges"]] == [0, 5, 6, 9, 12]


def test_a_group_joins_where_the_result_is_delayed(other_worlds: list[World], text_data: str, lighthouse: str) -> None:
    """The group reaches other values than those that apply the result later."""
    planned = configs(2, lighthouse, data_path=text_data, **DELAYED | {"bcd_steps_per_block": 12, "outer_interval": 6})
    first, back = come_back(other_worlds, planned)
    assert first["exchanges"][-2].iteration == 6
    pairs = zip(first["exchanges"][-2:], back["exchanges"], strict=True)
    assert all(dataclasses.replace(left, group=1) == right for left, right in pairs)
