"""A phase that reads its prefix from the cache trains like one that computes it, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import prefix_runs, worlds
from support.dist import World

HEAD = {"bcd_head_phase": True, "untie_embeddings_and_output_weights": True, "bcd_order": "descending"}
CASES: dict[str, dict[str, Any]] = {
    "recompute_bf16": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    | {"bf16": True},
    "masks": {"reset_attention_mask": True, "reset_position_ids": True, "position_embedding_type": "rope"},
    "stage": worlds.PIPELINE | {"bcd_layout": "stage", "bcd_num_blocks": None},
    "llama": worlds.PIPELINE
    | {"form": "llama", "group_query_attention": True, "num_query_groups": 2, "bcd_order": "descending"}
    | {"bcd_layout": "submodel", "bcd_num_blocks": 2, "train_iters": 16},
    "interleaved": worlds.PIPELINE | {"bcd_layout": "interleaved"},
    "head": HEAD | {"train_iters": 16},
}


@pytest.mark.parametrize("case", CASES)
def test_cached_is_computed(
    world1: World, world2: World, world4: World, text_data: str, tmp_path: Path, case: str
) -> None:
    """A run that reads its prefix from the cache equals one that computes it, bit for bit, and reads every sample."""
    flags = prefix_runs.FLAGS | {"data_path": text_data} | CASES[case]
    world = {1: world1, 2: world2, 4: world4}[flags.get("world_size", 1)]
    computed = world.run(worlds.train_run, worlds.run_config(**flags))
    served = world.run(prefix_runs.served_run, worlds.run_config(**flags, bcd_prefix_cache=tmp_path))
    for mine, other in zip(served, computed, strict=True):
        assert mine["losses"] == other["losses"]
        assert mine["grad_norms"] == other["grad_norms"]
        assert worlds.same_bits(mine["weights"], other["weights"]) == []
    hits = sum(served[0]["hits"])
    with_prefix = sum(block > 0 for block in served[0]["blocks"])
    assert hits == with_prefix * 8, "every sample of the phases with a prefix"
    assert served[0]["warnings"] == []
