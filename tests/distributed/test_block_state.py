"""The state that a block leaves at the end of its phase and restores at its next visit. State of what is always active:
test_inactive_update.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from support import worlds
from support.dist import World

from megatron.bcd.config import RunConfig
from megatron.bcd.optim.param_shard import ParamShard


def copies(parts: dict[str, ParamShard]) -> dict[str, tuple[int, int, int, dict[str, torch.Tensor]]]:
    """Return by parameter: the position of the part, its steps, and its tensors."""
    return {
        name: (part.start, part.end, part.num_steps, {key: part.read(key, weight).clone() for key in part.names()})
        for name, part, weight in ((name, live.snapshot(), live.weight) for name, live in parts.items())
    }


def switches(config: RunConfig) -> dict[str, Any]:
    """Return a run, and the state of the block before and after every switch."""
    told: list[dict[str, Any]] = []

    def look(run: worlds.RecordedRun, when: str) -> None:
        core = run.active.core
        told.append({"when": when, "block": core.block, "own": copies(worlds.block_shards(core))})

    with worlds.started(
        config, before_switch=lambda run: look(run, "end"), after_build=lambda run: look(run, "begin")
    ) as run:
        run.train()
        metrics = [(record.block, record.model_state_bytes, record.host_state_bytes) for record in run.recorder.steps]
        losses = [step["loss"] for step in run.results]
        return {"told": told, "metrics": metrics, "losses": losses}


def run_switched(world1: World, world2: World, cut: str, **flags: Any) -> list[dict[str, Any]]:
    cut_flags = worlds.CUTS[cut]
    base = {"bcd_steps_per_block": 2, "bcd_num_blocks": 2, "num_layers": 4, "hidden_size": 64}
    config = worlds.run_config(**base | {"train_iters": 9} | cut_flags | flags)
    return (world2 if "world_size" in cut_flags else world1).run(switches, config)


KINDS: dict[str, dict[str, Any]] = {
    "fp16": {"fp16": True, "initial_loss_scale": 256},
    "fp32": {},
    "bf16": {"bf16": True},
}
HOST = {"bcd_optimizer_state": "host"}


@pytest.mark.parametrize(
    ("cut", "kind"),
    [("one", "bf16"), ("data2", "fp16"), ("pipeline2", "fp32")],
)
def test_host_gives_back_what_was(world1: World, world2: World, text_data: str, cut: str, kind: str) -> None:
    """A block gets back moments, step count and main parameters of its last visit; with policy `reset` main parameters
    only."""
    reset, host = (
        run_switched(world1, world2, cut, data_path=text_data, **KINDS[kind], **policy) for policy in ({}, HOST)
    )
    main_params = set() if kind == "fp32" else {"master"}
    for ranks, kept in ((host, {"exp_avg", "exp_avg_sq"} | main_params), (reset, main_params)):
        for rank in ranks:
            left: dict[int, Any] = {}
            num_compared = 0
            for event in rank["told"]:
                block, shards = event["block"], event["own"]
                if event["when"] == "end":
                    left[block] = shards
                elif block in left:
                    for name, (start, end, steps, tensors) in shards.items():
                        before = left[block][name]
                        assert (start, end) == before[:2]
                        assert set(tensors) == kept
                        assert steps == (before[2] if ranks is host else 0)
                        assert worlds.same_bits(tensors, {key: before[3][key] for key in tensors}) == []
                        num_compared += 1
            assert num_compared > 0
    # on the device a block costs the same under both policies, once it has stepped
    assert [metric[:2] for metric in host[0]["metrics"]][1::2] == [item[:2] for item in reset[0]["metrics"]][1::2]
    first = 2 * len({event["block"] for event in host[0]["told"]})
    assert host[0]["losses"][:first] == reset[0]["losses"][:first]
    assert host[0]["losses"] != reset[0]["losses"]


def test_host_memory_does_not_grow(world2: World, text_data: str) -> None:
    """Host memory stops growing after the first cycle."""
    ranks = run_switched(world2, world2, "data2", data_path=text_data, bf16=True, train_iters=13, **HOST)
    by_step = [host for *_, host in ranks[0]["metrics"]]
    assert by_step[0] == (0, 0) and 0 < by_step[2][0] < by_step[4][0]
    assert by_step[-1] == pytest.approx(by_step[4], rel=1e-3), "a handful of ties comes and goes"


def saves_of_a_run(config: RunConfig) -> int:
    """Count how often state is offloaded, from the first step to the end of the run."""
    with (
        worlds.started(config) as run,
        mock.patch.object(run.active.offloaded, "save", wraps=run.active.offloaded.save) as save,
    ):
        run.train()
        run.end_phase(is_end_of_run=True)
    return save.call_count


def test_nothing_is_kept_when_the_run_ends(world1: World, text_data: str) -> None:
    """The end of a run offloads no state, because no phase would read it."""
    flags = {"bcd_optimizer_state": "host", "bf16": True, "train_iters": 3}
    assert world1.run(saves_of_a_run, worlds.run_config(data_path=text_data, **flags)) == [2]


def states_of_a_joining_rank(config: RunConfig) -> dict[str, Any]:
    """Return the state of a rank that trained, and what another one has after it has loaded that state and built the
    same block."""
    with worlds.started(config) as run:
        run.train()
        sent = run.active.rank_state()
        run.end_phase(is_end_of_run=True)
        run.active.load_rank_state(sent)
        run._build_block()
        return {"sent": sent, "loaded": run.active.rank_state()}


@pytest.mark.parametrize(
    ("cut", "flags"),
    [
        ("data2", {"adam_moments_dtype": "int8"}),
        ("one", {"bcd_inactive_update": "factored", "bcd_schedule": "breadth-first", "bcd_steps_per_block": 3}),
    ],
)
def test_a_joining_rank_has_the_same_state(
    world1: World, world2: World, text_data: str, cut: str, flags: dict[str, Any]
) -> None:
    """A rank that loads the state of the same rank of another group has the same bits, of all blocks."""
    base = {"data_path": text_data, "bf16": True, "train_iters": 5, "bcd_steps_per_block": 2} | HOST
    config = worlds.run_config(**base | worlds.CUTS[cut] | flags)
    for rank in (world2 if cut == "data2" else world1).run(states_of_a_joining_rank, config):
        pairs = [*zip(rank["sent"]["states"], rank["loaded"]["states"], strict=True)]
        assert sum(bool(tensors) for (tensors, *_), _ in pairs) > 20
        for (tensors, *place), (loaded, *loaded_place) in pairs:
            assert worlds.same_bits(tensors, loaded) == [] and place == loaded_place
