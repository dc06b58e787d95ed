"""A phase that is served from the prefix cache learns what one that computes its prefix learns, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import prefix_runs, worlds
from support.dist import World

PIPELINE = {"world_size": 2, "pipeline_model_parallel_size": 2}
CASES: dict[str, dict[str, Any]] = {
    "one": {},
    "recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "bf16": {"bf16": True, "bcd_prefix_cache_dtype": "bf16"},
    "masks": {"reset_attention_mask": True, "reset_position_ids": True, "position_embedding_type": "rope"},
    "data2": {"world_size": 2},
    "submodel": PIPELINE | {"bcd_layout": "submodel", "bcd_num_blocks": 2},
    "stage": PIPELINE | {"bcd_layout": "stage", "bcd_num_blocks": None},
    "spread": PIPELINE,
    "stages4": {"world_size": 4, "pipeline_model_parallel_size": 4, "bcd_layout": "stage", "bcd_num_blocks": None}
    | {"bcd_steps_per_block": 2, "train_iters": 8, "bcd_sample_ratio": 0.003},
    "interleaved": PIPELINE | {"bcd_layout": "interleaved"},
    "strided_chunks": PIPELINE
    | {"num_virtual_stages_per_pipeline_rank": 6, "num_layers": 12}
    | {"bf16": True, "bcd_prefix_cache_dtype": "bf16", "reset_attention_mask": True},
    "tensor2": {"world_size": 2, "tensor_model_parallel_size": 2, "micro_batch_size": 4},
    "stages2_context2": PIPELINE | {"world_size": 4, "context_parallel_size": 2, "micro_batch_size": 4},
}


@pytest.mark.parametrize("case", CASES)
def test_cached_is_computed(
    world1: World, world2: World, world4: World, text_data: str, tmp_path: Path, case: str
) -> None:
    """An output that is of another sample, layer or weight, or that is rounded."""
    flags = prefix_runs.FLAGS | {"data_path": text_data} | CASES[case]
    world = {1: world1, 2: world2, 4: world4}[flags.get("world_size", 1)]
    computed = world.run(worlds.train_run, worlds.run_config(**flags | {"bcd_prefix_cache_dtype": None}))
    served = world.run(prefix_runs.served_run, worlds.run_config(**flags, bcd_prefix_cache=tmp_path))
    for mine, other in zip(served, computed, strict=True):
        assert mine["losses"] == other["losses"]
        assert mine["grad_norms"] == other["grad_norms"]
        assert worlds.same_bits(mine["weights"], other["weights"]) == []
    hits = sum(served[0]["hits"])
    with_prefix = sum(block > 0 for block in served[0]["blocks"])
    assert hits == with_prefix * 8, "every sample of the phases with a prefix"
    assert served[0]["warnings"] == []


def test_a_prefix_runs_once_for_each_sample(world2: World, text_data: str, tmp_path: Path) -> None:
    """A stage before the first trainable stage that computes though its output is read, or a fill that computes too
    much."""
    flags = prefix_runs.FLAGS | {"data_path": text_data, "eval_iters": 0, "train_iters": 8} | CASES["stage"]
    first, second = world2.run(prefix_runs.counted_run, worlds.run_config(**flags, bcd_prefix_cache=tmp_path))
    before, after = first
    assert {layer: after[layer] - before[layer] for layer in after} == dict.fromkeys(range(3), 8), "15 samples, by 2"
    before, after = second
    assert {layer: after[layer] - before[layer] for layer in after} == dict.fromkeys(range(3, 6), 16), "4 steps"


def test_all_stages_leave_out_their_chunks_of_the_prefix(world2: World, text_data: str, tmp_path: Path) -> None:
    """A chunk before the block that still runs on one of the stages, or a fill that goes on behind the prefix."""
    flags = prefix_runs.FLAGS | {"data_path": text_data, "eval_iters": 0, "train_iters": 8} | CASES["interleaved"]
    ranks = world2.run(prefix_runs.counted_run, worlds.run_config(**flags, bcd_prefix_cache=tmp_path))
    for stage, rank in enumerate(ranks):
        before, after = rank
        times = {layer: after[layer] - before[layer] for layer in after}
        assert times == {stage: 8, stage + 2: 16, stage + 4: 16}, "15 samples by 2 in the fill, then 4 steps"
