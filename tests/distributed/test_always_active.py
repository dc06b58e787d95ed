"""--bcd-always-active: trained in every phase, with one optimizer state for the whole run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import switched_runs, worlds
from support.dist import World

from megatron.bcd.blocks.ownership import ownership
from megatron.bcd.blocks.partition import partition_from_config

HOST = {"bcd_optimizer_state": "host"}
LLAMA = {"form": "llama", "ffn_hidden_size": 88, "group_query_attention": True, "num_query_groups": 2}
LLAMA |= {"world_size": 2, "pipeline_model_parallel_size": 2}
UNTIED = {"untie_embeddings_and_output_weights": True}
# by name: cut, parts, flags
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "one": ("one", "norms", HOST | UNTIED),
    "one_sgd": ("one", "norms,embedding,head", {"optimizer": "sgd"}),
    "pipeline2": ("pipeline2", "embedding", HOST | {"bf16": True}),
    "pipeline2_head": ("pipeline2", "head", UNTIED),
    "submodel": ("submodel", "norms,embedding,head", {"bf16": True} | UNTIED),
    "data2_bf16": ("data2", "norms,embedding", {"bf16": True} | UNTIED),
    "data2": ("data2", "norms,head", HOST),
}


def whole(ranks: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """Always-active state at one event of the run, parts of data-parallel ranks put together: steps and tensors."""
    state: dict[str, Any] = {}
    for rank in ranks:
        for name, (start, end, steps, tensors) in rank["told"][index]["always"].items():
            for key, tensor in tensors.items():
                state.setdefault((name, key), {})[start, end] = (steps, tensor)
    return {
        key: ({steps for steps, _ in parts.values()}, torch.cat([parts[where][1] for where in sorted(parts)]))
        for key, parts in state.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_one_state_for_the_whole_run(world1: World, world2: World, text_data: str, name: str) -> None:
    """Moments, a step count or a main parameter that a switch drops or mixes up."""
    cut, parts, flags = CASES[name]
    ranks = switched_runs.run(world1, world2, cut, data_path=text_data, bcd_always_active=parts, **flags)
    events = ranks[0]["told"]
    for index in range(1, len(events), 2):
        assert (events[index]["when"], events[index + 1]["when"]) == ("end", "begin")
        for stage in [[rank] for rank in ranks] if cut != "data2" else [ranks]:
            before, after = whole(stage, index), whole(stage, index + 1)
            assert before.keys() == after.keys()
            for key, (steps, tensor) in before.items():
                num_steps = 0 if "optimizer" in flags else (index + 1) // 2 * 2
                assert steps == after[key][0] == {num_steps}, key
                assert torch.equal(tensor.view(torch.int32), after[key][1].view(torch.int32)), key
    assert any(whole([rank], 1) for rank in ranks)


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
    cut = partition_from_config(config)
    for stage, trained in enumerate(world2.run(trained_in_first_phase, config)):
        norms = [name for name in trained if "norm" in name]
        assert len(norms) == 4 * 3 + (stage == 1)
        for name, was_trained in trained.items():
            owned = ownership(name, partition=cut, stage=stage)
            assert was_trained == (name in norms or owned.block == 0), name
