"""bf16 with fp32 main parameters learns what fp32 learns."""

from __future__ import annotations

import statistics

import pytest
from support import worlds
from support.dist import World

# The quickstart's recipe on a smaller model: the same depth, blocks, schedule and pipeline
RECIPE = {
    "world_size": 2,
    "pipeline_model_parallel_size": 2,
    "num_layers": 6,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "micro_batch_size": 4,
    "global_batch_size": 8,
    "train_iters": 30,
    "lr": 2e-3,
    "min_lr": 2e-4,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 5,
    "bcd_num_blocks": 3,
    "bcd_steps_per_block": 5,
}


def test_bf16_follows_fp32(world2: World, text_data: str) -> None:
    """Masters or moments that live in 16 bits, or that a switch rounds: bf16 falls behind fp32."""
    fp32, bf16 = (
        world2.run(worlds.train_run, worlds.run_config(data_path=text_data, bf16=is_bf16, **RECIPE))[0]
        for is_bf16 in (False, True)
    )
    assert fp32["losses"][-1] < 0.9 * fp32["losses"][0], "nothing was learnt: nothing would be compared"
    assert bf16["losses"] == pytest.approx(fp32["losses"], rel=0.02)
    assert statistics.fmean(bf16["losses"]) == pytest.approx(statistics.fmean(fp32["losses"]), rel=0.005)
