"""Bytes of the allocator by phase, beside the planner's memory model."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import worlds
from support.gpu_worlds import Worlds
from support.planned import RUNS, planned_memory, recipe_of

from megatron.bcd.optim.active_block import ActiveBlock

SIZES = {"num_layers": 6, "hidden_size": 256, "seq_length": 128, "max_position_embeddings": 128}
SIZES |= {"micro_batch_size": 4, "global_batch_size": 8}
PEAKS = (0.88, 1.13)
"""Of the planned ones. The model is coarse at this size: phases with a long prefix are planned up to 11 % too high,
those of `pretrain`, which keeps gradients of matrices that rest, up to 12 % too low. Of a stage
that only runs forward, whose layers' temporary memory is not planned, the peak is bounded by no figure here."""


def allocated(config: Any, *, leaks: bool = False) -> list[dict[str, int]]:
    """This rank's bytes by step; the mutant that `leaks` keeps every phase's optimizer."""
    steps: list[dict[str, int]] = []
    kept: list[Any] = []
    dispose = ActiveBlock.dispose

    def leak(self: ActiveBlock, **options: bool) -> None:
        kept.append(self.optimizer)
        dispose(self, **options)

    def before_step(one: worlds.RecordedRun) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def after_step(one: worlds.RecordedRun) -> None:
        torch.cuda.synchronize()
        statistics = torch.cuda.memory_stats()
        steps.append(
            {
                "asked": statistics["requested_bytes.all.current"] - before["requested_bytes.all.current"],
                "stays": statistics["allocated_bytes.all.current"] - before["allocated_bytes.all.current"],
                "number": statistics["allocation.all.current"] - before["allocation.all.current"],
                "peak": statistics["allocated_bytes.all.peak"] - before["allocated_bytes.all.current"],
                "reserved": statistics["reserved_bytes.all.current"] - before["reserved_bytes.all.current"],
                "block": one.results[-1]["block"],
            }
        )

    gc.unfreeze()  # `worlds` hides a run's objects from the collector
    gc.collect()
    torch.cuda.empty_cache()
    before = Counter(torch.cuda.memory_stats())  # empty before the first allocation
    patch = mock.patch.object(ActiveBlock, "dispose", leak if leaks else dispose)
    with patch, worlds.started(config, before_step=before_step, after_step=after_step) as one:
        one.run()
    return steps


@pytest.mark.parametrize("name", RUNS)
def test_allocated_is_planned(repo_root: Path, gpus: Worlds, text_data: str, name: str) -> None:
    """Model state that the run holds and neither counts nor plans, to the byte; a peak that does not fit though its
    plan does. A stage keeps the message that it received last, with its gradient, and a few numbers stay."""
    flags = SIZES | RUNS[name]
    recipe = recipe_of(repo_root, flags)
    planned = planned_memory(recipe)
    num_blocks = len(planned)
    config = worlds.run_config(data_path=text_data, **flags, train_iters=2 * num_blocks)
    size = flags.get("world_size", 1)
    for rank, steps in enumerate(gpus(size).run(allocated, config)):
        is_behind_another = rank >= size // flags.get("pipeline_model_parallel_size", size)
        message = SIZES["seq_length"] * SIZES["micro_batch_size"] * SIZES["hidden_size"] * 8 * is_behind_another
        for step in steps[num_blocks:]:  # from the second cycle on, all blocks are in buffers
            plan = planned[step["block"]][rank]
            rest = step["asked"] - plan.model_state
            assert rest % 512 <= 64 and rest // 512 in (0, message // 512), (rank, step, plan)
            assert 0 <= step["stays"] - step["asked"] <= 512 * step["number"] + 2**20, "a block of the allocator"
            total = plan.total - plan.framework
            if plan.gradients:
                assert PEAKS[0] <= (step["peak"] - rest) / total <= PEAKS[1], (rank, step, plan)


def visits_of(steps: list[dict[str, int]]) -> dict[int, list[int]]:
    """What stays at each visit of a block, from the second on."""
    visits: dict[int, list[int]] = {}
    for step in steps[3:]:
        visits.setdefault(step["block"], []).append(step["asked"])
    return visits


def test_twenty_switches(gpus: Worlds, text_data: str) -> None:
    """Memory that grows from visit to visit, or that the allocator has and cannot use."""
    config = worlds.run_config(data_path=text_data, **SIZES | {"hidden_size": 512}, train_iters=21)
    [steps] = gpus(1).run(allocated, config)
    assert all(len(set(visits)) == 1 for visits in visits_of(steps).values())
    assert steps[-1]["reserved"] <= 1.25 * max(step["peak"] for step in steps[-3:])


def test_a_leak_is_seen(gpus: Worlds, text_data: str) -> None:
    """The mutant of the test above: a reference to the optimizer of a phase that is over."""
    config = worlds.run_config(data_path=text_data, train_iters=9)
    [steps] = gpus(1).run(allocated, config, leaks=True)
    assert any(len(set(visits)) > 1 for visits in visits_of(steps).values())
