"""Interleaved pipelines take the same steps as one rank, and with one block they equal stock bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import worlds
from support.dist import World
from support.pairwise import pairwise
from support.plain_training import plain_training

from megatron.bcd.blocks.partition import partition_from_config
from megatron.bcd.config import RunConfig

Flags = Callable[..., dict[str, Any]]
PIPELINE = {"pipeline_model_parallel_size": 2}
INTERLEAVED = {"bcd_layout": "interleaved", "bcd_num_blocks": 3, "clip_grad": 0.0}
VIRTUAL = "num_virtual_stages_per_pipeline_rank"
TENSOR = {"tensor_model_parallel_size": 2}


def test_one_block_is_stocks_own_schedule(world2: World, text_data: str) -> None:
    """With one block an interleaved pipeline equals plain Megatron training bit for bit, including dropout."""
    # without clipping: one DDP wrapper sums the squares of the gradients in another order than one for each chunk
    flags = {"data_path": text_data, "bcd_num_blocks": 1, "train_iters": 8, "clip_grad": 0.0} | PIPELINE
    flags |= {VIRTUAL: 3, "attention_dropout": 0.1}
    config = worlds.run_config(world_size=2, **flags)
    assert (config.bcd.bcd_layout, config.num_chunks) == ("interleaved", 3)
    ours, stock = world2.run(worlds.train_run, config), world2.run(plain_training, config)
    assert ours[0]["losses"][-1] < ours[0]["losses"][0] - 0.5, "nothing was learnt: nothing would be compared"
    for mine, other in zip(ours, stock, strict=True):
        assert mine["losses"] == other["losses"]
        assert worlds.same_bits(mine["weights"], other["weights"]) == []


def run(world: World, flags: dict[str, Any]) -> list[dict[str, Any]]:
    """Run twelve steps, three per phase, with evaluations."""
    # a rate at which differences in the last bit, of tied gradients summed in another order, do not grow
    lengths = {"bcd_steps_per_block": 3, "train_iters": 12, "eval_iters": 1, "eval_interval": 6, "lr": 1e-3}
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
    assert_same_weights(whole_names(ranks, config_of(flags | PIPELINE)), reference["weights"])


def assert_same_weights(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, weight in expected.items():
        if not name.endswith("linear_qkv.bias"):  # the gradient of a key's bias is rounding, and Adam scales it up
            assert (actual[name] - weight).norm() < 1e-4 * weight.norm(), name


FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "ranks": {
        "pipeline2": PIPELINE,
        "pipeline4": {"pipeline_model_parallel_size": 4},
        "data2": PIPELINE | {"overlap_grad_reduce": True},
        "tensor2": PIPELINE | TENSOR,
    },
    "chunks": {"one": {}, "two": {VIRTUAL: 6, "num_layers": 24}},
    "form": {"gpt": {}, "llama": {"form": "llama"}},
    "head": {"tied": {}, "own": {}},
    "method": {
        "plain": {},
        "host": {"bcd_optimizer_state": "host"},
        "always_active": {"bcd_always_active": "norms,head"},
        "inactive": {"bcd_inactive_update": "orthogonal", "bcd_always_active": "none"},
        "frozen": {"bcd_frozen": "embedding,norms"},
        "head_phase": {"bcd_head_phase": True, "bcd_order": "descending"},
    },
    "memory": {"all": {}, "auto": {"recompute": "auto", "recompute_memory_gib": 1.5e-3, "pipeline_cut": "auto"}},
}


_OF_WEIGHTS = {"num_layers", "form"} | {f"{no}untie_embeddings_and_output_weights" for no in ("", "no_")}
OTHER_HEAD: dict[tuple[str, str], dict[str, Any]] = {
    ("gpt", "own"): {"untie_embeddings_and_output_weights": True},
    ("llama", "tied"): {"no_untie_embeddings_and_output_weights": True},
}
"""Head of a form, by form and head, if it is not the form's default."""


IN_DEFAULT = (
    "pipeline2-one-gpt-own-always_active-all",
    "pipeline4-one-llama-own-host-auto",
    "pipeline2-two-gpt-own-head_phase-auto",
)
CHOSEN = [
    pytest.param(chosen, marks=[pytest.mark.long] * ("-".join(chosen.values()) not in IN_DEFAULT))
    for chosen in pairwise(FACTORS, lambda case: case["method"] != "head_phase" or case["head"] == "own")
]


@pytest.mark.parametrize("chosen", CHOSEN, ids=lambda chosen: "-".join(chosen.values()))
def test_product(world1: World, world2: World, world4: World, initial_weights: Flags, chosen: dict[str, str]) -> None:
    """With each pair of option values an interleaved pipeline takes the steps of one rank."""
    values: dict[str, Any] = {"num_layers": 12}
    for factor, name in chosen.items():
        values |= FACTORS[factor][name]
    values |= OTHER_HEAD.get((chosen["form"], chosen["head"]), {})
    flags = initial_weights(**{"bcd_num_blocks": 3} | {key: values[key] for key in _OF_WEIGHTS & values.keys()})
    flags |= INTERLEAVED | values
    world = world2 if chosen["ranks"] == "pipeline2" else world4
    reference = flags | {"pipeline_model_parallel_size": 1, "recompute": None, "recompute_memory_gib": None}
    reference |= {"tensor_model_parallel_size": 1, "overlap_grad_reduce": False, "pipeline_cut": "even"}
    # sums over tensor slices and replicas in another order, and orthogonalised gradients, grow what is small
    tolerance = 1e-4 if chosen["method"] == "inactive" else 2e-5 if chosen["ranks"] in ("data2", "tensor2") else 1e-6
    actual, expected = run(world, flags), run(world1, reference)[0]
    assert_same(actual, expected, tolerance=tolerance)
    if tolerance == 1e-6:
        whole = whole_names(actual, worlds.run_config(world_size=world.size, **flags))
        assert_same_weights(whole, expected["weights"])


def config_of(flags: dict[str, Any]) -> RunConfig:
    return worlds.run_config(world_size=2, **flags)


def test_resume_elsewhere(world1: World, world2: World, initial_weights: Flags, tmp_path: Path) -> None:
    """One rank resumes from the checkpoint of an interleaved pipeline, with the same losses."""
    flags = initial_weights(bcd_num_blocks=1, num_layers=12) | {"train_iters": 8, "clip_grad": 0.0}
    reference = world1.run(worlds.train_run, worlds.run_config(**flags))[0]["losses"]
    world2.run(worlds.train_run, config_of(flags | PIPELINE | {VIRTUAL: 3, "save": tmp_path, "exit_interval": 5}))
    flags |= {"load": tmp_path, "finetune": None}
    (resumed,) = world1.run(worlds.train_run, worlds.run_config(**flags))
    assert resumed["losses"] == pytest.approx(reference[5:], rel=1e-6)
