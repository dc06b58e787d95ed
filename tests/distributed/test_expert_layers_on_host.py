"""Expert parallelism with layers in host memory: the same training bit for bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support import resumed_runs, worlds
from support.dist import World
from support.planned import EXPERTS, recipe_of

from megatron.bcd.planner.memory import host_bytes
from megatron.bcd.runtime import host_memory

CUTS: dict[str, dict[str, Any]] = {
    "expert2": {"world_size": 2},
    "expert2_data4": {"world_size": 4},
    "expert2_pipeline2": {"world_size": 4, "pipeline_model_parallel_size": 2},
    "expert2_tensor2_etp1": {
        "world_size": 4,
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}
BREADTH_FIRST = {"bcd_schedule": "breadth-first"}
"""On the device too, because sums over ranks differ between schedules."""
METHODS: dict[str, dict[str, Any]] = {
    "finetune": {"bcd_preset": "finetune", "bcd_num_blocks": None, "bcd_inactive_update": "factored"} | BREADTH_FIRST,
    "blocks": {"bcd_num_blocks": 2, "bcd_optimizer_state": "host", "bcd_frozen": "embedding"},
    "one_block": {"bcd_num_blocks": 1, "clip_grad": 0.0} | BREADTH_FIRST,
}


def config_of(cut: str, method: str, **more: Any) -> Any:
    """Return a run in bf16 of a model with four experts a layer."""
    flags = worlds.EXPERTS | worlds.EXPERT2 | {"num_layers": 4, "mock_data": True, "split": None, "bf16": True}
    flags |= {"micro_batch_size": 1, "global_batch_size": 4, "moe_token_dispatcher_type": "alltoall"}
    flags |= {"untie_embeddings_and_output_weights": True, "moe_grouped_gemm": True}
    return worlds.run_config(**flags | CUTS[cut] | METHODS[method] | more)


def world_of(worlds_by_size: tuple[World, World], cut: str) -> World:
    return worlds_by_size[CUTS[cut]["world_size"] == 4]


@pytest.mark.parametrize(
    ("cut", "method", "places"),
    [
        ("expert2_data4", "finetune", ("host", "device")),
        ("expert2_tensor2_etp1", "blocks", ("device", "host")),
        ("expert2", "one_block", ("host", "host")),
        ("expert2_pipeline2", "finetune", ("host", "host")),
    ],
)
def test_the_same_bits(
    world2: World, world4: World, tmp_path: Path, cut: str, method: str, places: tuple[str, str]
) -> None:
    """A run that stops and resumes with expert layers in host memory equals an uninterrupted one with layers on the
    device, bit for bit."""
    world, config = world_of((world2, world4), cut), functools.partial(config_of, cut, method, train_iters=4)
    whole = world.run(resumed_runs.one_part, config())
    first = world.run(resumed_runs.one_part, config(save=tmp_path, exit_interval=2, bcd_layers_on=places[0]))
    rest = world.run(resumed_runs.one_part, config(load=tmp_path, bcd_layers_on=places[1]))
    for expected, *parts in zip(whole, first, rest, strict=True):
        assert len(expected["steps"]) == 4 and expected["steps"] == [step for part in parts for step in part["steps"]]
        assert worlds.same_bits(expected["weights"], parts[-1]["weights"]) == []


def allocated(config: Any) -> int:
    """Return the bytes of shared memory that this rank allocates for others and itself."""
    allocate, results = host_memory.allocate, list[host_memory.SharedMemory]()

    def note(*args: Any, **options: Any) -> host_memory.SharedMemory:
        results.append(allocate(*args, **options))
        return results[-1]

    with mock.patch.object(host_memory, "allocate", note):
        worlds.train_run(config)
    return sum(each.data.nbytes for each in results if each.is_owner)


def test_host_memory_is_planned(world2: World) -> None:
    """The ranks allocate the planned host memory, within 0.5 %."""
    flags = EXPERTS | worlds.EXPERT2 | METHODS["finetune"] | {"bcd_layers_on": "host", "world_size": 2}
    flags |= {"num_layers": 4, "hidden_size": 256}
    config = worlds.run_config(**flags, mock_data=True, split=None, train_iters=1)
    assert sum(world2.run(allocated, config)) == pytest.approx(2 * host_bytes(recipe_of(flags)), rel=0.005)


def test_resumes_with_other_parts(world2: World, tmp_path: Path) -> None:
    """A run resumes without expert parallelism, and its losses differ by rounding only."""
    config = functools.partial(config_of, "expert2", "finetune", bcd_layers_on="host", train_iters=4)
    whole = world2.run(resumed_runs.one_part, config())
    world2.run(resumed_runs.one_part, config(save=tmp_path, exit_interval=2))
    rest = world2.run(resumed_runs.one_part, config(load=tmp_path, expert_model_parallel_size=1))
    for left, other in zip(whole, rest, strict=True):
        assert other["losses"] == pytest.approx(left["losses"][2:], rel=1e-3)
