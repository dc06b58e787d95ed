"""Layers in host memory (--bcd-layers-on host), also of divided experts: the same training bit for bit."""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import resumed_runs, worlds
from support.dist import World
from support.planned import EXPERTS, recipe_of
from support.processes import disk_for

from megatron.bcd.planner.memory import host_bytes
from megatron.bcd.runtime import host_memory

CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "pipeline": (2, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 3}),
    "tensor": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "data": (2, {}),
    "context": (2, {"context_parallel_size": 2}),
}
EMBEDDING_ON_HOST = {"bcd_frozen": "embedding"}
FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "layout": {
        "spread": {},
        "strided": {"bcd_layout": "strided"},
    },
    "precision": {"fp32": {}, "bf16": {"bf16": True}},
    "method": {
        "paper": {"bcd_preset": "paper"},
        "finetune": {"bcd_preset": "finetune", "position_embedding_type": "rope"} | EMBEDDING_ON_HOST,
        "parts": {"bcd_always_active": "norms,biases,head", "bcd_frozen": "none", "bcd_optimizer_state": "host"},
        "frozen": {"bcd_frozen": "norms,embedding,head"},
        "head": {"bcd_head_phase": True, "bcd_order": "descending"} | EMBEDDING_ON_HOST,
    },
    "recompute": {
        "none": {},
        "selective": {"recompute_granularity": "selective"},
    },
    "resident": {"0": {}, "1": {"bcd_resident_layers": 1}, "2": {"bcd_resident_layers": 2}},
}


DEFAULT = """
one-strided-bf16-parts-selective-1
pipeline-spread-bf16-finetune-none-1
tensor-spread-fp32-frozen-none-2
context-spread-fp32-head-none-0
"""
CASES = [dict(zip(("cut", *FACTORS), line.split("-"), strict=True)) for line in DEFAULT.split()]


def config_of(case: dict[str, str], **more: Any) -> Any:
    size, cut = CUTS[case["cut"]]
    flags = {"num_layers": 6, "mock_data": True, "split": None, "micro_batch_size": 1, "global_batch_size": 4} | cut
    flags |= {"eval_iters": 1, "eval_interval": 3, "train_iters": 4, "bcd_num_blocks": 3}
    flags["untie_embeddings_and_output_weights"] = True  # the parts of a tied gradient add up in another order
    for name, values in FACTORS.items():
        flags |= values[case[name]]
    return worlds.run_config(world_size=size, **flags | more)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case.values()))
def test_the_same_bits(world1: World, world2: World, case: dict[str, str]) -> None:
    """Runs with layers in host memory equal runs with layers on the device bit for bit."""
    world = (world1, world2)[CUTS[case["cut"]][0] - 1]
    on_device = world.run(worlds.train_run, config_of(case, bcd_resident_layers=0))
    on_host = world.run(worlds.train_run, config_of(case, bcd_layers_on="host"))
    for left, other in zip(on_device, on_host, strict=True):
        assert len(other["steps"]) == 4 and len(set(other["blocks"])) > 1
        assert [left["steps"], left["evaluations"]] == [other["steps"], other["evaluations"]]
        assert worlds.same_bits(left["weights"], other["weights"]) == []


def test_the_same_bits_with_experts_and_biases(world1: World) -> None:
    """Layers with experts and biases in host memory train as on the device, bit for bit."""
    flags = {"num_layers": 4, "mock_data": True, "split": None, "bcd_preset": "finetune", "bcd_num_blocks": 2}
    flags |= worlds.EXPERT_BIASES | {"bcd_schedule": "breadth-first"}
    [on_device] = world1.run(worlds.train_run, worlds.run_config(**flags))
    [on_host] = world1.run(worlds.train_run, worlds.run_config(**flags, bcd_layers_on="host"))
    assert on_device["steps"] == on_host["steps"] and len(set(on_host["blocks"])) == 2
    assert worlds.same_bits(on_device["weights"], on_host["weights"]) == []


def test_resumes_in_the_other_place(world2: World, tmp_path: Path) -> None:
    """A run that resumes with its layers in the other place equals the uninterrupted run bit for bit."""
    case = {"cut": "data", "layout": "spread", "precision": "bf16", "method": "parts", "recompute": "none"}
    config = functools.partial(config_of, case | {"resident": "0"}, **EMBEDDING_ON_HOST)
    whole = world2.run(resumed_runs.one_part, config())
    folder = tmp_path / "run"
    world2.run(resumed_runs.one_part, config(save=folder, exit_interval=2, bcd_layers_on="host"))
    rest = world2.run(resumed_runs.one_part, config(load=folder, bcd_layers_on="device"))
    for left, other in zip(whole, rest, strict=True):
        assert left["steps"][2:] == other["steps"]
        assert worlds.same_bits(left["weights"], other["weights"]) == []


def choice_of_auto(config: Any) -> tuple[str, int, int]:
    """Return where the run keeps frozen weights, how many layers stay on the device, and the peak model state of a
    step."""
    with worlds.started(config) as run:
        run.train()
        most = max(max(step.model_state_bytes) for step in run.recorder.steps)
        return run.config.bcd.bcd_layers_on, run.config.bcd.bcd_resident_layers, most


def test_auto_takes_what_fits(world1: World) -> None:
    """--bcd-layers-on auto keeps more layers on the device the more memory there is, and stays below the limit if it
    keeps any."""
    case = {"cut": "one", "layout": "spread", "precision": "bf16", "method": "paper", "recompute": "none"}
    flags = {"bcd_layers_on": "auto", "num_layers": 8, "bcd_num_blocks": 4, "train_iters": 4} | EMBEDDING_ON_HOST
    config = functools.partial(config_of, case | {"resident": "0"}, **flags)
    kib, result = 2**10, []
    for limit in (1, 830, 845, 860, 100_000):
        [(place, resident, state)] = world1.run(choice_of_auto, config(recompute_memory_gib=limit * kib / 2**30))
        result.append((place, resident))
        assert (place, resident) == ("host", 0) or state < limit * kib
    on_device = [8 if place == "device" else resident for place, resident in result]
    assert on_device == sorted(on_device) and on_device[0] == 0 and on_device[-1] == 8
    assert len(set(on_device)) >= 4, result


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_containers(tmp_path: Path, version: int) -> None:
    """A container's limit bounds the available memory, of which cached files are a part; without a limit the machine's
    memory counts."""
    folder, limit, used, prefix = host_memory._CONTROL_GROUPS[2 - version]
    for name, text in ((limit, "1000000"), (used, "900000"), ("memory.stat", f"{prefix}active_file 400000")):
        (tmp_path / name).write_text(text + f"\n{prefix}inactive_file 300000" * (name == "memory.stat"))
    with mock.patch.object(host_memory, "_CONTROL_GROUPS", ((tmp_path, limit, used, prefix),)):
        assert host_memory.available_bytes() == 800000
        (tmp_path / limit).write_text("max" if version == 2 else str(2**63 - 4096))
        assert host_memory.available_bytes() > 2**30


def with_little_memory(config: Any) -> str:
    """Return the error of a run on a machine with 4 KiB of free memory."""
    with mock.patch.object(host_memory, "available_bytes", lambda: 1 << 12), pytest.raises(ValueError) as raised:
        worlds.train_run(config)
    return str(raised.value)


def test_too_little_host_memory(world1: World, world2: World) -> None:
    """All ranks refuse --bcd-layers-on host if host memory is too small, and activations that do not fit."""
    activations = {"bcd_schedule": "breadth-first", "bcd_saved_activations": "host"}
    [error] = world1.run(with_little_memory, config_of(CASES[0] | {"cut": "one"}, **activations))
    assert error.startswith("--bcd-saved-activations: needs 0.00 more GiB of host memory, and 0.00 are available.")
    config = config_of(CASES[0] | {"cut": "data"}, bcd_layers_on="host")
    for error in world2.run(with_little_memory, config):
        assert error.startswith("--bcd-layers-on host: ") and error.endswith("--bcd-layers-on device.")


def refused(config: Any, case: str) -> str:
    """Return the error of a run that cannot allocate shared memory or page-lock it."""
    cuda = mock.Mock(cudaHostRegister=mock.Mock(return_value=2))
    with pytest.raises(ValueError) as raised, contextlib.ExitStack() as stack:
        if case == "file size":
            stack.enter_context(disk_for(1000))
        else:
            stack.enter_context(mock.patch.object(host_memory, "device", mock.Mock(has_cuda=lambda: True)))
            stack.enter_context(mock.patch.object(torch.cuda, "cudart", lambda: cuda))
        worlds.train_run(config)
    return str(raised.value)


@pytest.mark.parametrize(("case", "flag"), [("file size", "-f and -v unlimited"), ("locked memory", "-l unlimited")])
def test_limits_of_processes(world1: World, case: str, flag: str) -> None:
    """A run that can't allocate or page-lock shared memory ends with an error that names the ulimit."""
    config = config_of(CASES[0] | {"cut": "one"}, bcd_layers_on="host")
    [error] = world1.run(refused, config, case)
    assert error.startswith("--bcd-layers-on host: ") and f"ulimit {flag}" in error
    ends = ("or give --bcd-layers-on device.", "or leave --bcd-layers-on host out.")
    assert error.endswith(ends), "what Megatron Core adds says nothing to a user"


def locked_by(config: Any, code: int) -> tuple[list[tuple[str, int, bool]], list[str]]:
    """Train twice with a stand-in for CUDA, whose cudaHostUnregister returns `code`. Return its calls, each with the
    address and whether it was mapped, and the warnings."""
    calls = []

    def note(name: str, result: int) -> Any:
        def call(address: int, *_: int) -> int:
            ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
            calls.append((name, address, any(int(start, 16) <= address < int(end, 16) for start, end in ranges)))
            return result

        return call

    cuda = mock.Mock(cudaHostRegister=note("register", 0), cudaHostUnregister=note("unregister", code))
    with (
        mock.patch.object(host_memory, "device", mock.Mock(has_cuda=lambda: True)),
        mock.patch.object(torch.cuda, "cudart", lambda: cuda),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            worlds.train_run(config)
            gc.collect()
    return calls, [str(each.message) for each in caught if "unlock" in str(each.message)]


def test_pages_are_unlocked_before_they_are_unmapped(world1: World) -> None:
    """The second run in a process locks its own pages, after those of the first are unlocked and while both are mapped.
    An error of CUDA is reported."""
    config = config_of(CASES[0], bcd_layers_on="host", train_iters=1, eval_iters=0)
    [(calls, told)] = world1.run(locked_by, config, 712)
    assert [name for name, *_ in calls] == ["register", "unregister"] * 2
    assert all(is_mapped for *_, is_mapped in calls)
    assert [calls[index][1] for index in (0, 2)] == [calls[index][1] for index in (1, 3)]
    assert len(told) == 2 and all(line.startswith("--bcd-layers-on host: ") for line in told)


EXPERT_CUTS: dict[str, dict[str, Any]] = {
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


def expert_config_of(cut: str, method: str, **more: Any) -> Any:
    """Return a run in bf16 of a model with four experts a layer."""
    flags = worlds.EXPERTS | worlds.EXPERT2 | {"num_layers": 4, "mock_data": True, "split": None, "bf16": True}
    flags |= {"micro_batch_size": 1, "global_batch_size": 4, "moe_token_dispatcher_type": "alltoall"}
    flags |= {"untie_embeddings_and_output_weights": True, "moe_grouped_gemm": True}
    return worlds.run_config(**flags | EXPERT_CUTS[cut] | METHODS[method] | more)


def world_of(worlds_by_size: tuple[World, World], cut: str) -> World:
    return worlds_by_size[EXPERT_CUTS[cut]["world_size"] == 4]


@pytest.mark.parametrize(
    ("cut", "method", "places"),
    [
        ("expert2_data4", "finetune", ("host", "device")),
        ("expert2_tensor2_etp1", "blocks", ("device", "host")),
        ("expert2", "one_block", ("host", "host")),
        ("expert2_pipeline2", "finetune", ("host", "host")),
    ],
)
def test_the_same_bits_with_divided_experts(
    world2: World, world4: World, tmp_path: Path, cut: str, method: str, places: tuple[str, str]
) -> None:
    """A run that stops and resumes with expert layers in host memory equals an uninterrupted one with layers on the
    device, bit for bit."""
    world, config = world_of((world2, world4), cut), functools.partial(expert_config_of, cut, method, train_iters=4)
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
    config = functools.partial(expert_config_of, "expert2", "finetune", bcd_layers_on="host", train_iters=4)
    whole = world2.run(resumed_runs.one_part, config())
    world2.run(resumed_runs.one_part, config(save=tmp_path, exit_interval=2))
    rest = world2.run(resumed_runs.one_part, config(load=tmp_path, expert_model_parallel_size=1))
    for left, other in zip(whole, rest, strict=True):
        assert other["losses"] == pytest.approx(left["losses"][2:], rel=1e-3)
