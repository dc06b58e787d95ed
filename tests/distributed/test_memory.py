"""Invariant 5: a phase leaves nothing behind, and a run's own figures equal the live bytes. Nor does a checkpoint."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil
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


NUM_SAVES, NUM_BEFORE = 8, 3
PIPELINE = {"world_size": 2, "pipeline_model_parallel_size": 2, "bcd_layout": "submodel", "bcd_steps_per_block": 100}


def config_of(text_data: str, root: Path, **flags: Any) -> Any:
    return worlds.run_config(data_path=text_data, train_iters=2, save=root, keep_last_checkpoints=2, **PIPELINE | flags)


def save_once_more(run: worlds.RecordedRun) -> None:
    """Save a checkpoint with a new number."""
    run.state.iteration += 1
    torch.distributed.barrier()
    assert run.outputs.save()


def needed_bytes(config: Any) -> int:
    """Return this rank's weights and the active block's state after a run that saved at its end."""
    with worlds.started(config) as run:
        run.train()
        state = run.active.state_bytes()["optimizer_state_bytes"]
        return sum(weight.nbytes for weight in run.model.parameters()) + state


def test_bytes_on_disk(world2: World, text_data: str, tmp_path: Path) -> None:
    """A checkpoint takes at most 5 % more bytes than the weights and the active block's state."""
    untied = {"untie_embeddings_and_output_weights": True}  # a tied head is a copy, and not saved
    config = config_of(text_data, tmp_path, hidden_size=256, bcd_layout="spread", bf16=True, **untied)
    needed = sum(world2.run(needed_bytes, config))
    on_disk = sum(path.stat().st_size for path in (tmp_path / "iter_0000002").rglob("*") if path.is_file())
    assert needed > 2 * 2**20
    assert needed <= on_disk < 1.05 * needed


def what_is_alive() -> dict[str, int]:
    while gc.collect():  # what earlier runs of this process left can take several passes
        pass
    process = psutil.Process()
    objects = gc.get_objects()
    tensors = [thing for thing in objects if issubclass(type(thing), torch.Tensor)]
    return {
        "threads": threading.active_count(),
        "threads of the system": len(os.listdir("/proc/self/task")),
        "processes": len(process.children(recursive=True)),
        "files": len(os.listdir("/proc/self/fd")),
        "tensors": len(tensors),
        "tensor bytes": sum(tensor.nbytes for tensor in tensors),
        "objects": len(objects),
    }


def alive_before_and_after(config: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Return the live bytes before and after some saves; the first saves fill caches."""
    with worlds.started(config) as run:
        run.train()
        gc.unfreeze()  # the run has frozen what was there: it would not be looked at
        for _ in range(NUM_BEFORE):
            save_once_more(run)
        assert run.saver is not None and run.saver.finish()
        before = what_is_alive()
        for _ in range(NUM_SAVES):
            save_once_more(run)
        assert run.saver.finish()
        return before, what_is_alive()


def test_nothing_stays_behind(world2: World, text_data: str, tmp_path: Path) -> None:
    """Repeated saves leave no thread, process, open file or tensor behind."""
    config = config_of(text_data, tmp_path, async_save=True, hidden_size=128)
    for before, after in world2.run(alive_before_and_after, config):
        more = {name: after[name] - before[name] for name in after}
        assert more.pop("objects") < NUM_SAVES
        assert set(more.values()) == {0}, more
    assert len(list(tmp_path.glob("iter_*"))) == 2
