"""Invariant 2: from the same initial weights every parallel layout takes the same steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support import worlds
from support.dist import World

Flags = Callable[..., dict[str, Any]]
PIPELINE = {"pipeline_model_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2}
CUTS: dict[str, dict[str, Any]] = {"data2": {}, "tensor2": TENSOR}
LAYOUTS = (
    {"bcd_layout": "spread", "bcd_num_blocks": 3},
    {"bcd_layout": "stage", "bcd_num_blocks": None},
    {"bcd_layout": "submodel", "bcd_num_blocks": 3},
)
# fp32 sums in another order, after two cycles of Adam: a wrong gradient shows in the first digits
TOLERANCE = 2e-5


def run(world: World, flags: dict[str, Any], **kwargs: Any) -> list[dict[str, Any]]:
    """Two steps per block for two cycles, whatever the number of blocks, with evaluation once in each cycle."""
    stages = kwargs.get("blocks_of_stages") or flags.get("pipeline_model_parallel_size", 1)
    layout, num_blocks = flags.get("bcd_layout", "spread"), flags.get("bcd_num_blocks") or 1
    steps = 4 * {"spread": num_blocks, "stage": stages, "submodel": num_blocks * stages}[layout]
    lengths = {"bcd_steps_per_block": 2, "train_iters": steps, "eval_iters": 1, "eval_interval": steps // 2}
    return world.run(worlds.train_run, worlds.run_config(world_size=world.size, **flags | lengths), **kwargs)


def assert_same_run(ranks: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    assert len(set(reference["blocks"])) * 4 == len(reference["losses"])
    for rank in ranks:
        assert rank["blocks"] == reference["blocks"]
        assert rank["losses"] == pytest.approx(reference["losses"], rel=TOLERANCE)
        assert rank["grad_norms"] == pytest.approx(reference["grad_norms"], rel=50 * TOLERANCE)
        assert [split for _, split, _ in rank["evaluations"]] == ["validation"] * 3
        evaluations = [loss for *_, loss in reference["evaluations"]]
        assert [loss for *_, loss in rank["evaluations"]] == pytest.approx(evaluations, rel=TOLERANCE)


@pytest.fixture(scope="module")
def one_rank(world1: World, initial_weights: Flags) -> dict[str, Any]:
    return run(world1, initial_weights(bcd_num_blocks=3))[0]


@pytest.mark.parametrize("name", CUTS)
def test_layout_of_one_stage(world2: World, initial_weights: Flags, one_rank: dict[str, Any], name: str) -> None:
    """A gradient of one data or tensor rank that is not reduced, or not averaged, in some block."""
    assert_same_run(run(world2, initial_weights(bcd_num_blocks=3) | CUTS[name]), one_rank)


def test_pipeline_of_one_block(world1: World, world2: World, initial_weights: Flags) -> None:
    """A pipeline that changes plain training: a lost tied gradient, a wrong microbatch count or loss divisor."""
    flags = initial_weights(bcd_num_blocks=1)
    assert_same_run(run(world2, flags | PIPELINE), run(world1, flags)[0])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout["bcd_layout"])
def test_pipeline_of_every_layout(world1: World, world2: World, initial_weights: Flags, layout: dict[str, Any]) -> None:
    """A stage that trains layers of another block, or gets a wrong gradient behind or before a frozen stage."""
    flags = initial_weights(**layout)
    # tensor slices of the checkpoint must not depend on the blocks, and one stage takes the two stages' blocks
    reference = run(world1, flags | {"bcd_num_blocks": layout["bcd_num_blocks"] or 1}, blocks_of_stages=2)
    assert_same_run(run(world2, flags | PIPELINE), reference[0])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout["bcd_layout"])
def test_pipeline_with_data_parallel(
    world2: World, world4: World, initial_weights: Flags, layout: dict[str, Any]
) -> None:
    """A reduction over the wrong group, or a rank without active parameters that leaves one out."""
    flags = initial_weights(**layout) | PIPELINE
    assert_same_run(run(world4, flags), run(world2, flags)[0])


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
def test_pipeline_with_tensor_parallel(world2: World, world4: World, initial_weights: Flags, untied: bool) -> None:
    """Slices of the embedding or the head that are summed or read with the wrong neighbour."""
    flags = initial_weights(bcd_num_blocks=3, untie_embeddings_and_output_weights=untied) | PIPELINE
    assert_same_run(run(world4, flags | TENSOR), run(world2, flags)[0])
