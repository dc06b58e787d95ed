"""Whole runs in breadth-first order with layers in host memory, where copies and NCCL are as late as possible."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
from support import resumed_runs, worlds
from support.dist import RankError
from support.gpu_worlds import Worlds

from megatron.bcd.runtime import device

HOST = {"bcd_schedule": "breadth-first", "bcd_layers_on": "host", "bcd_saved_inputs": "host"}
HOST |= {"bcd_saved_activations": "auto", "bcd_passes_on_host": 3, "recompute_memory_gib": 1e-6}
CASES: dict[str, dict[str, Any]] = {
    "pretrain": {"bcd_preset": "pretrain", "overlap_grad_reduce": True},
    "factored": {"bcd_num_blocks": 0, "bcd_inactive_update": "factored", "bcd_steps_per_block": None},
    "pipeline": {
        "bcd_preset": "pretrain",
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
    },
    "full muon": {"bcd_num_blocks": 1, "optimizer": "muon", "clip_grad": 0.0},
    "full adam, clipped": {"bcd_num_blocks": 1, "clip_grad": 0.5},
    "experts, divided": worlds.EXPERTS
    | worlds.EXPERT2
    | {"bcd_num_blocks": 0, "bcd_inactive_update": "factored", "bcd_steps_per_block": None}
    | {"moe_token_dispatcher_type": "alltoall", "sequence_parallel": None},
}


def config_of(case: str, **more: Any) -> Any:
    flags = {"num_layers": 4, "mock_data": True, "split": None, "micro_batch_size": 1, "global_batch_size": 4}
    flags |= {"world_size": 2, "bf16": True, "train_iters": 3, "bcd_num_blocks": 2}
    flags |= {"untie_embeddings_and_output_weights": True, "eval_iters": 1, "eval_interval": 2}
    return worlds.run_config(**flags | CASES[case] | more)


def run(config: Any, *, is_mutant: bool = False) -> dict[str, Any]:
    """Run `resumed_runs.with_rounded_norm`; the mutant computes without waiting for copies to the device."""
    broken = mock.patch.object(device.CopyStream, "wait", lambda *_: None)
    with broken if is_mutant else contextlib.nullcontext():
        return resumed_runs.with_rounded_norm(config)


@pytest.mark.parametrize("case", CASES)
def test_late_is_the_same(late: Worlds, gpus: Worlds, case: str) -> None:
    """A breadth-first run with layers, saved inputs and some activations in host memory, where all copies are late,
    equals a run with layers on the device bit for bit."""
    depth = gpus(2).run(run, config_of(case))
    for expected, other in zip(depth, late(2).run(run, config_of(case, **HOST)), strict=True):
        assert resumed_runs.differences(expected, [other]) == []


def test_a_mutant_fails(late: Worlds, gpus: Worlds) -> None:
    """A run that does not wait for copies to the device fails or has other results."""
    depth = gpus(2).run(run, config_of("factored"))
    try:
        broken = late(2).run(run, config_of("factored", **HOST), is_mutant=True)
    except RankError as error:
        assert "[emulated] RACE" in str(error)
    else:
        assert resumed_runs.differences(depth[0], [broken[0]])
