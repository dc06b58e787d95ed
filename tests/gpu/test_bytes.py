"""Bytes of the allocator by phase, beside the planner's memory model."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from support import worlds
from support.gpu_worlds import Worlds
from support.planned import RUNS, planned_memory, recipe_of


def allocated(config: Any) -> dict[str, Any]:
    """Of this rank by step: bytes that stay, their peak in the step, what PyTorch holds, and tensors."""
    steps: list[dict[str, int]] = []

    def before_step(one: worlds.RecordedRun) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def after_step(one: worlds.RecordedRun) -> None:
        torch.cuda.synchronize()
        statistics = torch.cuda.memory_stats()
        steps.append(
            {
                "stays": statistics["allocated_bytes.all.current"],
                "asked": statistics["requested_bytes.all.current"],
                "peak": statistics["allocated_bytes.all.peak"],
                "reserved": statistics["reserved_bytes.all.current"],
                "number": statistics["allocation.all.current"],
            }
        )

    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with worlds.started(config, before_step=before_step, after_step=after_step) as one:
        one.run()
    return {"before": before, "steps": steps}


@pytest.mark.parametrize("name", RUNS)
def test_allocated_is_planned(repo_root: Path, gpus: Worlds, text_data: str, name: str) -> None:
    """x"""
    flags = {
        "num_layers": 6,
        "hidden_size": 256,
        "seq_length": 128,
        "max_position_embeddings": 128,
        "micro_batch_size": 4,
        "global_batch_size": 8,
    } | RUNS[name]
    recipe = recipe_of(repo_root, flags)
    planned = planned_memory(recipe)
    config = worlds.run_config(data_path=text_data, **flags, train_iters=2 * len(planned) + 1)
    ranks = gpus(flags.get("world_size", 1)).run(allocated, config)
    for rank, one in enumerate(ranks):
        for number, step in enumerate(one["steps"]):
            plan = planned[number % len(planned)][rank]
            total = plan.total - plan.framework
            print(
                rank,
                number,
                "before",
                one["before"],
                "extra",
                step["stays"] - plan.model_state,
                "asked extra",
                step["asked"] - plan.model_state,
                "n",
                step["number"],
                "peak/plan",
                round((step["peak"] - one["before"]) / total, 3),
                "state",
                plan.model_state,
                "act",
                plan.activations,
                plan.communication,
                plan.optimizer_work,
                "reserved",
                step["reserved"] / step["peak"],
            )
