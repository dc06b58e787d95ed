"""A phase that is served from the prefix cache learns what one that computes its prefix learns, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import prefix_runs
import pytest
import worlds
from dist import World

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
    "tensor2": {"world_size": 2, "tensor_model_parallel_size": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_cached_is_computed(world1: World, world2: World, text_data: str, tmp_path: Path, case: str) -> None:
    """An output that is of another sample, layer or weight, or that is rounded; a stage that computes all the same."""
    flags = prefix_runs.FLAGS | {"data_path": text_data} | CASES[case]
    world = world2 if "world_size" in flags else world1
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
