"""Invariant 10: what the run holds is the closed formula's number of parameters."""

from __future__ import annotations

from typing import Any

import pytest
from support import worlds
from support.dist import World
from support.planned import shape_of, stage_parameters

from megatron.bcd.blocks.partition import partition
from megatron.bcd.config import RunConfig

CUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor2": {"world_size": 2, "tensor_model_parallel_size": 2},
    "pipeline2": {"world_size": 2, "pipeline_model_parallel_size": 2},
    "pipeline2_uneven": {"world_size": 2, "pipeline_model_parallel_size": 2, "num_layers": 7},
    "pipeline2_tensor2": {"world_size": 4, "pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2},
}
VOCABULARY = 257


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
@pytest.mark.parametrize("cut", CUTS)
def test_parameters(world1: World, world2: World, world4: World, text_data: str, cut: str, untied: bool) -> None:
    """A layer that is on no stage or on two, a tied copy that is counted twice, a slice that is counted once."""
    flags = {"data_path": text_data, "num_layers": 6} | CUTS[cut] | {"train_iters": 1}
    config = worlds.run_config(untie_embeddings_and_output_weights=untied, **flags)
    world = {1: world1, 2: world2, 4: world4}[int(flags.get("world_size", 1))]
    outcomes = world.run(worlds.train_run, config)
    shape = shape_of(layers=config.num_layers, hidden=32, vocabulary=VOCABULARY, positions=32, tied=not untied)
    stages = stage_parameters(
        shape,
        partition(
            num_layers=config.num_layers,
            num_stages=config.pipeline_size,
            num_blocks=3,
            layout="spread",
            tied=not untied,
        ),
        padded=worlds.PADDED_VOCABULARY,
    )
    padding = (worlds.PADDED_VOCABULARY - VOCABULARY) * 32 * (2 if untied else 1)
    # the formula of GPT-2: L (12 H^2 + 13 H) + (V + S) H + 2 H, and V H more where the head is its own
    formula = config.num_layers * (12 * 32**2 + 13 * 32) + (VOCABULARY * (1 + untied) + 32) * 32 + 2 * 32
    assert shape.num_parameters == formula
    for outcome in outcomes:
        assert outcome["parameters_per_stage"] == stages
        assert outcome["total_parameters"] - padding == formula
    if config.tensor_size == 1:
        held = [sum(weight.numel() for weight in outcome["weights"].values()) for outcome in outcomes]
        assert tuple(held) == stages


def warnings(config: RunConfig) -> tuple[str, ...]:
    with worlds.started(config) as one:
        return tuple(one.recorder.summary.warnings)


@pytest.mark.parametrize("cut", ["one", "pipeline2"])
def test_a_large_vocabulary(world1: World, world2: World, text_data: str, cut: str) -> None:
    """A share of the embedding that leaves out a stage, or counts one twice."""
    flags = {"data_path": text_data} | CUTS[cut]
    world = world2 if flags.get("world_size") == 2 else world1
    assert set(world.run(warnings, worlds.run_config(**flags))) == {()}
    large = worlds.run_config(**flags, make_vocab_size_divisible_by=12000)
    layers, tokens = 6 * (12 * 32**2 + 13 * 32) + 32 * 32 + 2 * 32, 12000 * 32
    copies = 2 if cut == "pipeline2" else 1  # a tied head has a copy on the last stage
    share = f"{copies * tokens / (layers + copies * tokens):.0%}"
    for (line,) in world.run(warnings, large):
        assert "block 0" in line and share in line, line
