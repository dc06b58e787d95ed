"""Invariant 4: a step changes the active block and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import worlds
from support.dist import World

from megatron.bcd.config import RunConfig
from megatron.bcd.model.builder import unwrap_model

CUTS = worlds.CUTS | {"norms": worlds.PIPELINE | {"bcd_always_active": "norms"}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "initial_loss_scale": 256},
}
CASES = [("one", "fp32"), ("data2", "bf16"), ("submodel", "fp16")]


def changes_of_every_step(config: RunConfig) -> list[dict[str, Any]]:
    """Return the names that each step changed, and the main parameters that changed and that exist."""
    before: dict[str, Any] = {}
    steps = []

    def remember(run: worlds.RecordedRun) -> None:
        before["weights"] = worlds.weights_of(run.model)
        before["main parameters"] = [main_param.detach().clone() for main_param in worlds.masters_of(run)]

    def compare(run: worlds.RecordedRun) -> None:
        main_params = worlds.masters_of(run)
        changed = [not torch.equal(*pair) for pair in zip(main_params, before["main parameters"], strict=True)]
        named = dict(unwrap_model(run.model).named_parameters())
        steps.append(
            {
                "block": run.results[-1]["block"],
                "changed": worlds.same_bits(worlds.weights_of(run.model), before["weights"]),
                "active": [name for name, parameter in named.items() if parameter.requires_grad],
                "frozen": [name for name, parameter in named.items() if not parameter.requires_grad],
                "main parameters": len(main_params),
                "changed_masters": sum(changed),
            }
        )
        remember(run)

    with worlds.started(config, after_build=remember, after_step=compare) as run:
        run.train()
    return steps


@pytest.mark.parametrize(("cut", "precision"), CASES)
def test_only_the_active_block_changes(world1: World, world2: World, text_data: str, cut: str, precision: str) -> None:
    """A step changes all main parameters of the active block, and no frozen weight."""
    num_blocks = {"stage": 2, "submodel": 6}.get(cut, 3)
    lengths = {"bcd_steps_per_block": 2, "train_iters": 2 * num_blocks + 2, "weight_decay": 0.1}
    flags = {"data_path": text_data} | lengths | CUTS[cut] | PRECISIONS[precision]
    ranks = (world2 if "world_size" in flags else world1).run(changes_of_every_step, worlds.run_config(**flags))
    for steps in ranks:
        assert [step["block"] for step in steps] == [i // 2 % num_blocks for i in range(len(steps))]
        for step in steps:
            assert set(step["changed"]).isdisjoint(step["frozen"])
            assert step["changed_masters"] == step["main parameters"]
            assert bool(step["changed"]) == bool(step["active"])
            if precision == "fp32":
                assert step["changed"] == step["active"]
    for at_once in zip(*ranks, strict=True):
        assert any(step["active"] for step in at_once)
    trained = [{name for step in steps for name in step["active"]} for steps in ranks]
    assert trained == [set(steps[0]["active"] + steps[0]["frozen"]) for steps in ranks], "a weight is never trained"
