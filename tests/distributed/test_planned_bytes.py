"""What tools/plan.py plans is what a run counts: model state of every rank in every phase, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import worlds
from dist import World

from megatron.bcd.planner.memory import rank_memory
from megatron.bcd.planner.recipe import Recipe
from megatron.bcd.planner.tables import Model, read_clusters

TWO = {"world_size": 2}
RUNS: dict[str, dict[str, Any]] = {
    "one": {},
    "one_block": {"bcd_num_blocks": 1},
    "data2_bf16": TWO | {"bf16": True},
    "pipeline2": TWO | {"pipeline_model_parallel_size": 2},
    "pipeline2_submodel": TWO | {"pipeline_model_parallel_size": 2, "bcd_layout": "submodel", "num_layers": 7},
}


def planned(root: Path, flags: dict[str, Any]) -> list[list[int]]:
    """Bytes by block, then by rank."""
    model = Model(
        name="small", form="gpt", layers=flags["num_layers"], hidden=40, heads=4, ffn=160, vocabulary=257, sequence=32,
        source="",
    )  # fmt: skip
    recipe = Recipe(
        model=model,
        cluster=read_clusters(root / "examples" / "clusters.csv")["rtx4090"],
        num_gpus=flags.get("world_size", 1),
        pipeline_size=flags.get("pipeline_model_parallel_size", 1),
        num_blocks=flags.get("bcd_num_blocks", 3),
        layout=flags.get("bcd_layout", "spread"),
        precision="bf16" if flags.get("bf16") else "fp32",
        micro_batch_size=2,
        global_batch_size=8,
        vocabulary_multiple=worlds.PADDED_VOCABULARY,
    )
    replicas = [rank_memory(recipe, data_rank=rank) for rank in range(recipe.data_size)]
    return [
        [
            memory.model_state
            for stage in range(recipe.pipeline_size)
            for replica in replicas
            for memory in replica
            if (memory.stage, memory.block) == (stage, block)
        ]
        for block in range(recipe.partition.num_blocks)
    ]


@pytest.mark.parametrize("name", RUNS)
def test_model_state(repo_root: Path, world1: World, world2: World, text_data: str, name: str) -> None:
    """A budget that forgets padding, masters, step counters, the head's copy or a shard: a plan that fits, and a run
    that does not. The hidden size 40 is no multiple of any alignment."""
    flags = {"num_layers": 6, "hidden_size": 40} | RUNS[name]
    expected = planned(repo_root, flags)
    config = worlds.run_config(data_path=text_data, **flags, train_iters=2 * len(expected))
    outcome = (world2 if "world_size" in flags else world1).run(worlds.train_run, config)[0]
    # in the first cycle the blocks to come are not in a buffer yet
    counted = [list(by_rank) for by_rank in outcome["model_state_bytes"][len(expected) :]]
    assert counted == expected
