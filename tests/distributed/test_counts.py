"""Invariant 10: what the run holds is the closed formula's number of parameters."""

from __future__ import annotations

from typing import Any

import pytest
from support import worlds
from support.dist import World
from support.planned import shape_of, stage_parameters

from megatron.bcd.blocks.partition import partition_from_config

PIPELINE = {"world_size": 2, "pipeline_model_parallel_size": 2}
UNTIED = {"untie_embeddings_and_output_weights": True}
LLAMA = PIPELINE | {"form": "llama", "ffn_hidden_size": 88, "group_query_attention": True}
CASES: dict[str, dict[str, Any]] = {
    "one_untied": UNTIED,
    "tensor2": {"world_size": 2, "tensor_model_parallel_size": 2},
    "pipeline2": PIPELINE,
    "pipeline2_uneven_untied": PIPELINE | UNTIED | {"num_layers": 7},
    "pipeline2_tensor2": PIPELINE | {"world_size": 4, "tensor_model_parallel_size": 2},
    "llama": LLAMA | {"num_query_groups": 2},
    "llama_one_wide_group": LLAMA | {"kv_channels": 16, "num_query_groups": 1},
}
VOCABULARY = 257


@pytest.mark.parametrize("name", CASES)
def test_parameters(world1: World, world2: World, world4: World, text_data: str, name: str) -> None:
    """A layer that is on no stage or on two, a tied copy that is counted twice, a slice that is counted once, key and
    value heads that are counted as often as query heads."""
    flags = {"data_path": text_data, "num_layers": 6, "train_iters": 1} | CASES[name]
    config = worlds.run_config(**flags)
    world = {1: world1, 2: world2, 4: world4}[int(flags.get("world_size", 1))]
    outcomes = world.run(worlds.train_run, config)
    sizes: dict[str, Any] = {"layers": config.num_layers, "hidden": 32, "vocabulary": VOCABULARY}
    if name.startswith("llama"):
        heads = {"heads": 4, "groups": flags["num_query_groups"], "head_dim": flags.get("kv_channels", 8)}
        shape = shape_of("llama", ffn=88, **sizes, **heads)
    else:
        shape = shape_of(positions=32, tied=config.tied, **sizes)
        # the formula of GPT-2: L (12 H^2 + 13 H) + (V + S) H + 2 H, and V H more where the head is its own
        formula = config.num_layers * (12 * 32**2 + 13 * 32) + (VOCABULARY * (2 - config.tied) + 32) * 32 + 2 * 32
        assert shape.num_parameters == formula
    stages = stage_parameters(shape, partition_from_config(config), padded=worlds.PADDED_VOCABULARY)
    padding = (worlds.PADDED_VOCABULARY - VOCABULARY) * 32 * (2 - config.tied)
    for outcome in outcomes:
        assert outcome["parameters_per_stage"] == stages
        assert outcome["total_parameters"] - padding == shape.num_parameters
    if config.tensor_size == 1:
        held = [sum(weight.numel() for weight in outcome["weights"].values()) for outcome in outcomes]
        assert tuple(held) == stages
