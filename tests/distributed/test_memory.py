"""Invariant 5: a phase leaves nothing behind, and a run's own figures equal the live bytes."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from support import worlds
from support.dist import World

from megatron.bcd.config import RunConfig

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
RUNS: dict[str, dict[str, Any]] = {
    "one": {},
    "data2_overlap_bf16": {"world_size": 2, "bf16": True, **OVERLAP},
    "experts_norms": {"bcd_always_active": "norms", **worlds.EXPERTS},
    "pipeline2_submodel_overlap": worlds.PIPELINE | {"bcd_layout": "submodel", **OVERLAP},
}


def live_bytes() -> int:
    """Count the bytes of this process's live tensors, shared storages once, without those that `worlds` has frozen."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu" and thing.layout == torch.strided:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
            if thing.grad is not None:
                storages[thing.grad.untyped_storage().data_ptr()] = thing.grad.untyped_storage().nbytes()
    storages.pop(0, None)
    return sum(storages.values())


def device_bytes(run: worlds.RecordedRun) -> int:
    offloaded = (tensor for shard in run.active.offloaded.shards.values() for tensor in shard.stored())
    return live_bytes() - sum(tensor.nbytes for tensor in offloaded)


def settled_bytes(run: worlds.RecordedRun, at_most: float) -> int:
    """Count `device_bytes` again for up to five seconds while it exceeds `at_most`.

    A thread of gloo holds the operands of its last operation until it is scheduled again, which may take long.
    """
    deadline = time.monotonic() + 5
    while (live := device_bytes(run)) > at_most and time.monotonic() < deadline:
        time.sleep(0.02)
    return live


def memory_of_a_run(config: RunConfig) -> dict[str, Any]:
    """Return the live bytes before the first phase, at the end of every phase and after every dispose, on this rank.

    State in host memory is subtracted, because it is the same memory on a CPU.
    """
    start: list[int] = []
    in_phase: list[tuple[int, int, int]] = []
    between: list[tuple[int, int]] = []
    a_cycle = config.training.train_iters // 3

    def before_build(run: worlds.RecordedRun) -> None:
        if not start:
            start.append(live_bytes())

    def before_switch(run: worlds.RecordedRun) -> None:
        in_phase.append((run.results[-1]["block"], device_bytes(run), run.active.state_bytes()["model_state_bytes"]))

    def after_dispose(run: worlds.RecordedRun) -> None:
        # from the end of the first cycle on nothing is to come
        at_most = between[a_cycle - 1][1] if len(between) >= a_cycle else float("inf")
        between.append((run.results[-1]["block"], settled_bytes(run, at_most)))

    hooks = {"before_build": before_build, "before_switch": before_switch, "after_dispose": after_dispose}
    with worlds.started(config, **hooks) as run:
        run.train()
        weights = sum(parameter.numel() * parameter.element_size() for parameter in run.model.parameters())
    return {"start": start[0], "in_phase": in_phase, "between": between, "weights": weights}


@pytest.fixture(scope="module", params=RUNS)
def memory(request: pytest.FixtureRequest, world1: World, world2: World, text_data: str) -> list[dict[str, Any]]:
    """Three measured cycles of a run, by rank."""
    flags = {"data_path": text_data, "hidden_size": 64} | RUNS[request.param]
    num_blocks = 6 if "submodel" in request.param else 3
    config = worlds.run_config(**flags, train_iters=3 * num_blocks + 1)
    ranks = (world2 if "world_size" in flags else world1).run(memory_of_a_run, config)
    assert all(len(memory["between"]) == len(memory["in_phase"]) == 3 * num_blocks for memory in ranks)
    return ranks


def test_nothing_is_left_of_a_phase(memory: list[dict[str, Any]]) -> None:
    """Between phases the device stores the weights and little else, and memory does not grow after the first cycle."""
    for rank in memory:
        for _, live in rank["between"]:
            # between phases: the weights, and the padding of Megatron Core's buffers, the current batch, and the last
            # activation that a stage received (32 x 2 x 64 numbers) with its gradient
            assert live - rank["start"] <= 0.02 * rank["weights"] + 2 * 16384 + 8192
        a_cycle = len(rank["between"]) // 3
        first_cycle, last_cycle = rank["between"][:a_cycle], rank["between"][-a_cycle:]
        # in its first phase a block's weights move into a buffer of Megatron Core, which is padded; nothing comes later
        assert last_cycle[-1][1] <= first_cycle[-1][1]
        assert max(live for _, live in last_cycle) <= max(live for _, live in first_cycle)


def test_model_state_is_counted_whole(memory: list[dict[str, Any]]) -> None:
    """The model state that the run counts equals the live bytes within 2 %."""
    for rank in memory:
        other = rank["start"] - rank["weights"]  # generators' states and the like, no model state
        for _, live, counted in rank["in_phase"]:
            assert live - other == pytest.approx(counted, rel=0.02, abs=2 * 16384 + 8192)
