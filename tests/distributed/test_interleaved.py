"""Interleaved pipelines take the same steps as one rank. With one block they equal stock bit for bit:
test_one_block.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import worlds
from support.dist import World

from megatron.bcd.blocks.partition import partition_from_config
from megatron.bcd.config import RunConfig

Flags = Callable[..., dict[str, Any]]
PIPELINE = {"pipeline_model_parallel_size": 2}
INTERLEAVED = {"bcd_layout": "interleaved", "bcd_num_blocks": 3, "clip_grad": 0.0}
VIRTUAL = "num_virtual_stages_per_pipeline_rank"


def run(world: World, flags: dict[str, Any]) -> list[dict[str, Any]]:
    """Run eight steps, two per phase, with evaluations."""
    # a rate at which differences in the last bit, of tied gradients summed in another order, do not grow
    lengths = {"bcd_steps_per_block": 2, "train_iters": 8, "eval_iters": 1, "eval_interval": 6, "lr": 1e-3}
    return world.run(worlds.train_run, worlds.run_config(world_size=world.size, **flags | lengths))


def assert_same(ranks: list[dict[str, Any]], reference: dict[str, Any], *, tolerance: float = 1e-6) -> None:
    assert len(set(reference["blocks"])) > 1
    for rank in ranks:
        assert rank["blocks"] == reference["blocks"]
        assert rank["losses"] == pytest.approx(reference["losses"], rel=tolerance)
        assert [loss for *_, loss in rank["evaluations"]] == pytest.approx(
            [loss for *_, loss in reference["evaluations"]], rel=tolerance
        )


def whole_names(ranks: list[dict[str, Any]], config: RunConfig) -> dict[str, torch.Tensor]:
    """Return the weights of all stages by the names that one stage would use; the head's copy keeps its name."""
    cut, result = partition_from_config(config), {}
    for stage, rank in enumerate(ranks):
        for name, weight in rank["weights"].items():
            if name.startswith("chunks."):
                _, chunk, name = name.split(".", 2)
                if name.startswith("decoder.layers."):
                    _, _, index, rest = name.split(".", 3)
                    name = f"decoder.layers.{cut.chunk_layers(stage, int(chunk))[int(index)]}.{rest}"
            result[name] = weight
    return result


def test_as_one_rank(world1: World, world2: World, initial_weights: Flags) -> None:
    """An interleaved pipeline takes the steps of one rank, also if the stages do not divide the microbatches."""
    flags = initial_weights(bcd_num_blocks=3) | INTERLEAVED | {"global_batch_size": 10}
    ranks, reference = run(world2, flags | PIPELINE), run(world1, flags)[0]
    assert_same(ranks, reference)
    assert_same_weights(whole_names(ranks, worlds.run_config(world_size=2, **flags | PIPELINE)), reference["weights"])


def assert_same_weights(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, weight in expected.items():
        if not name.endswith("linear_qkv.bias"):  # the gradient of a key's bias is rounding, and Adam scales it up
            assert (actual[name] - weight).norm() < 1e-4 * weight.norm(), name


UNTIED = {"untie_embeddings_and_output_weights": True}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "always_active": (2, PIPELINE | UNTIED | {"bcd_always_active": "norms,head"}),
    "head_phase": (2, PIPELINE | UNTIED | {"bcd_head_phase": True, "bcd_order": "descending"}),
    "stages4_llama": (
        4,
        {"pipeline_model_parallel_size": 4, "form": "llama", "bcd_optimizer_state": "host"}
        | {"recompute": "auto", "recompute_memory_gib": 1.5e-3, "pipeline_cut": "auto"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_options(world1: World, world2: World, world4: World, initial_weights: Flags, name: str) -> None:
    """With these options, too, an interleaved pipeline takes the steps of one rank."""
    size, values = CASES[name]
    network = {key: values[key] for key in ("form", *UNTIED) if key in values}
    flags = initial_weights(bcd_num_blocks=3, num_layers=12, **network) | INTERLEAVED | values
    reference = flags | {"pipeline_model_parallel_size": 1, "recompute": None, "recompute_memory_gib": None}
    actual = run({2: world2, 4: world4}[size], flags)
    expected = run(world1, reference | {"pipeline_cut": "even"})[0]
    assert_same(actual, expected)
    assert_same_weights(whole_names(actual, worlds.run_config(world_size=size, **flags)), expected["weights"])
