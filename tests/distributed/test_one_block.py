"""Invariant 1: one block that covers everything is plain full-parameter training, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
from support import worlds
from support.dist import World
from support.plain_training import plain_training

CUTS: dict[str, dict[str, Any]] = {name: worlds.CUTS[name] for name in ("data2", "tensor2", "pipeline2")}
CUTS["experts_pipeline2"] = (
    worlds.CUTS["pipeline2"] | worlds.EXPERTS | worlds.SHARED_EXPERT | {"moe_grouped_gemm": True}
)
CUTS["expert_biases"] = worlds.CUTS["one"] | worlds.EXPERT_BIASES


@pytest.mark.parametrize("cut", CUTS)
def test_one_block_is_plain_training(world1: World, world2: World, text_data: str, cut: str) -> None:
    """A run with one block has the losses and weights of a plain training loop, bit for bit."""
    flags = {"data_path": text_data, "bcd_num_blocks": 1, "bcd_steps_per_block": 2, "lr_warmup_iters": 2} | CUTS[cut]
    config = worlds.run_config(**flags)
    world = (world1, world2)[flags.get("world_size", 1) - 1]
    ours, plain = world.run(worlds.train_run, config), world.run(plain_training, config)
    assert ours[0]["losses"][-1] < ours[0]["losses"][0] - 0.5, "nothing was learnt: nothing would be compared"
    for mine, other in zip(ours, plain, strict=True):
        assert mine["losses"] == other["losses"]
        assert worlds.same_bits(mine["weights"], other["weights"]) == []
