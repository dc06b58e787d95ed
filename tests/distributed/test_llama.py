"""LLaMA's layers, with grouped-query attention, under what was built for GPT: stop and go on, cache, always active."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import prefix_runs, resumed_runs, worlds
from support.dist import World
from support.planned import shape_of, stage_parameters

from megatron.bcd.blocks.ownership import ownership
from megatron.bcd.blocks.partition import partition

LLAMA: dict[str, Any] = {
    "form": "llama",
    "ffn_hidden_size": 88,
    "group_query_attention": True,
    "num_query_groups": 2,
    "world_size": 2,
    "pipeline_model_parallel_size": 2,
}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def test_resumed_is_uninterrupted(world2: World, text_data: str, tmp_path: Path) -> None:
    """Invariant 7 where the head is its own, norms have no bias and the query-key-value rows are grouped."""
    flags = LLAMA | RECOMPUTED | {"data_path": text_data, "bf16": True, "train_iters": 6, "bcd_steps_per_block": 2}
    flags |= {"bcd_optimizer_state": "host", "bcd_always_active": "norms,head", "bcd_layout": "submodel"}
    config = worlds.run_config(**flags)
    assert world2.run(resumed_runs.stopped_and_resumed, config, (3,), str(tmp_path)) == [[], []]


def test_cached_prefix_is_computed(world2: World, text_data: str, tmp_path: Path) -> None:
    """Invariant 8 with rotary positions, which no record holds and the first active layer needs again."""
    flags = LLAMA | prefix_runs.FLAGS | {"data_path": text_data, "bcd_layout": "submodel", "bcd_num_blocks": 2}
    flags |= {"bcd_order": "descending", "train_iters": 8, "eval_iters": 0}  # amid a stage, and where one begins
    computed = world2.run(worlds.train_run, worlds.run_config(**flags))
    served = world2.run(prefix_runs.served_run, worlds.run_config(**flags, bcd_prefix_cache=tmp_path))
    assert sum(served[0]["hits"]) > 0
    for mine, other in zip(served, computed, strict=True):
        assert mine["losses"] == other["losses"]
        assert worlds.same_bits(mine["weights"], other["weights"]) == []


def trained_in_first_phase(config: Any) -> dict[str, bool]:
    """By this rank's parameters: whether a step changed it."""
    with worlds.started(config) as one:
        before = worlds.weights_of(one.model)
        one.train()
        changed = worlds.same_bits(before, worlds.weights_of(one.model))
        return {name: name in changed for name in before}


def test_norms_are_always_active(world2: World, text_data: str) -> None:
    """RMSNorm's weights, or those of queries and keys, that stay frozen because they go by another name."""
    flags = LLAMA | {"data_path": text_data, "train_iters": 1, "qk_layernorm": True, "bcd_always_active": "norms"}
    config = worlds.run_config(**flags)
    cut = partition(num_layers=config.num_layers, num_stages=2, num_blocks=3, layout="spread", tied=config.tied)
    for stage, trained in enumerate(world2.run(trained_in_first_phase, config)):
        norms = [name for name in trained if "norm" in name]
        assert len(norms) == 4 * 3 + (stage == 1)
        for name, was_trained in trained.items():
            owned = ownership(name, partition=cut, stage=stage)
            assert was_trained == (name in norms or owned.block == 0), name


@pytest.mark.parametrize("extra", [{}, {"kv_channels": 16, "num_query_groups": 1}], ids=["grouped", "one_wide_group"])
def test_parameters(world2: World, text_data: str, extra: dict[str, Any]) -> None:
    """Invariant 10 with grouped-query attention: key and value heads counted as often as query heads."""
    config = worlds.run_config(**LLAMA | {"data_path": text_data, "train_iters": 1} | extra)
    outcomes = world2.run(worlds.train_run, config)
    heads = {"heads": 4, "groups": config.transformer["num_query_groups"], "head_dim": extra.get("kv_channels", 8)}
    shape = shape_of("llama", layers=config.num_layers, hidden=32, ffn=88, vocabulary=257, **heads)
    cut = partition(num_layers=config.num_layers, num_stages=2, num_blocks=3, layout="spread", tied=False)
    padding = 2 * (worlds.PADDED_VOCABULARY - 257) * 32
    for outcome in outcomes:
        assert outcome["total_parameters"] - padding == shape.num_parameters
        assert outcome["parameters_per_stage"] == stage_parameters(shape, cut, padded=worlds.PADDED_VOCABULARY)
