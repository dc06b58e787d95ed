"""What a block leaves behind at the end of its phase, and finds again at its next visit."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
from support import switched_runs, worlds
from support.dist import World

from megatron.bcd.config import RunConfig

KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "initial_loss_scale": 256},
    "sgd": {"optimizer": "sgd"},
    "bf16_whole": {"bf16": True, "no_use_distributed_optimizer": True},
}
HOST = {"bcd_optimizer_state": "host"}
MOMENTS = {"adam": {"exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}


@pytest.mark.parametrize(
    ("cut", "kind"),
    [("one", "fp32"), ("one", "bf16_whole"), ("data2", "fp16"), ("submodel", "bf16"), ("pipeline2", "sgd")],
)
def test_host_gives_back_what_was(world1: World, world2: World, text_data: str, cut: str, kind: str) -> None:
    """A moment, a step count or a low bit of a main parameter that is lost, of another visit, or of another block."""
    reset, host = (
        switched_runs.run(world1, world2, cut, data_path=text_data, **KINDS[kind], **policy) for policy in ({}, HOST)
    )
    names = MOMENTS["sgd" if "sgd" in kind else "adam"]
    main_params = set() if kind in ("fp32", "sgd") else {"master"}
    for ranks, kept in ((host, names | main_params), (reset, main_params)):
        for rank in ranks:
            left: dict[int, Any] = {}
            num_compared = 0
            for event in rank["told"]:
                block, own = event["block"], event["own"]
                if event["when"] == "end":
                    left[block] = own
                elif block in left:
                    for name, (start, end, steps, tensors) in own.items():
                        before = left[block][name]
                        assert (start, end) == before[:2]
                        assert set(tensors) == kept
                        assert steps == (before[2] if ranks is host else 0)
                        assert worlds.same_bits(tensors, {key: before[3][key] for key in tensors}) == []
                        num_compared += 1
            assert num_compared > 0
    # on the device a block costs the same under both policies, once it has stepped
    assert [one[:2] for one in host[0]["metrics"]][1::2] == [one[:2] for one in reset[0]["metrics"]][1::2]
    first = 2 * len({event["block"] for event in host[0]["told"]})
    assert host[0]["losses"][:first] == reset[0]["losses"][:first]
    assert host[0]["losses"] != reset[0]["losses"]


@pytest.mark.parametrize("flags", [HOST, {"optimizer": "muon"}], ids=["adam", "muon"])
def test_host_bytes_are_those_of_the_run_summary(world2: World, text_data: str, flags: dict[str, Any]) -> None:
    """Host memory that grows from visit to visit, or that nobody was told of: of all state with a policy, and of the
    low bits of a Muon block, which are on the device in its phase."""
    ranks = switched_runs.run(world2, world2, "data2", data_path=text_data, bf16=True, train_iters=13, **flags)
    by_step = [host for *_, host in ranks[0]["metrics"]]
    (note,) = (note for note in ranks[0]["notes"] if "host memory" in note)
    told = int(re.sub(r".*, ([0-9,]+) bytes per rank$", r"\1", note).replace(",", ""))
    assert by_step[0] == (0, 0)
    if "optimizer" in flags:  # the summary counts all blocks, as between two phases
        assert told / 3 < max(by_step[-1]) < told
    else:
        assert 0 < by_step[2][0] < by_step[4][0]
        assert by_step[-1] == pytest.approx(by_step[4], rel=1e-3), "a handful of ties comes and goes"
        assert max(by_step[-1]) == pytest.approx(told, rel=0.02)


def in_short_phases(config: RunConfig, *, is_cut: bool) -> list[float]:
    """Losses, with the active block frozen and made active again before every further step, or not."""

    def freeze_and_return(one: worlds.RecordedRun) -> None:
        block = one.active.block
        if one.iteration == 0:
            return
        one.lr_scheduler.optimizer = None
        one.active.dispose()
        one.build(block)
        one.lr_scheduler.optimizer = one.active.optimizer
        one.lr_scheduler.step(0)

    with worlds.started(config, **({"before_step": freeze_and_return} if is_cut else {})) as one:
        one.train()
        return worlds.outcome(one)["losses"]


def test_short_phases_lose_nothing(world1: World, text_data: str) -> None:
    """12 phases over one block that differ from one long phase in any bit."""
    flags = {"data_path": text_data, "train_iters": 12, "bcd_steps_per_block": 30, "num_layers": 3, "lr": 1e-3}
    config = worlds.run_config(**flags, **HOST, bf16=True, bcd_always_active="norms")
    long, short = (world1.run(in_short_phases, config, is_cut=is_cut)[0] for is_cut in (False, True))
    assert long == short


def saves_of_a_run(config: RunConfig) -> int:
    """How often state is kept, from the first step to the end of the run."""
    with (
        worlds.started(config) as one,
        mock.patch.object(one.active.kept, "save", wraps=one.active.kept.save) as save,
    ):
        one.train()
        one.end_phase(is_end_of_run=True)
    return save.call_count


def test_nothing_is_kept_when_the_run_ends(world1: World, text_data: str) -> None:
    """Copies that nobody reads, and that can fail after the last checkpoint: main parameters of the host beside weights
    of the device with --optimizer-cpu-offload."""
    flags = {"bcd_optimizer_state": "host", "bf16": True, "train_iters": 3}
    assert world1.run(saves_of_a_run, worlds.run_config(data_path=text_data, **flags)) == [2]
