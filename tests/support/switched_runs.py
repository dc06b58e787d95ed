"""Runs of a `dist.World` with the optimizer state before and after every switch.

Like `worlds`, found by name in the rank's processes.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.bcd.config import RunConfig
from megatron.bcd.optim.param_shard import ParamShard
from support import worlds
from support.dist import World

CUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "data2": {"world_size": 2},
    "pipeline2": {"world_size": 2, "pipeline_model_parallel_size": 2},
    "submodel": {"world_size": 2, "pipeline_model_parallel_size": 2, "bcd_layout": "submodel"},
}


def copies(parts: dict[str, ParamShard]) -> dict[str, tuple[int, int, int, dict[str, torch.Tensor]]]:
    """By parameter: where the part lies, its steps, and its tensors."""
    return {
        name: (part.start, part.end, part.num_steps, {key: one.clone() for key, one in part.tensors().items()})
        for name, part in parts.items()
    }


def switches(config: RunConfig) -> dict[str, Any]:
    """A run; the state of the block's own and of always-active parameters before and after every switch, by block."""
    told: list[dict[str, Any]] = []

    def look(one: worlds.RecordedRun, when: str) -> None:
        own, always = copies(one.active.own_shards()), copies(one.active.always_active_shards())
        told.append({"when": when, "block": one.active.block, "own": own, "always": always})

    with worlds.started(
        config, before_switch=lambda one: look(one, "end"), after_build=lambda one: look(one, "begin")
    ) as one:
        one.train()
        metrics = [(record.block, record.model_state_bytes, record.host_state_bytes) for record in one.recorder.steps]
        losses = [step["loss"] for step in one.results]
        return {"told": told, "metrics": metrics, "notes": one.recorder.summary.notes, "losses": losses}


def run(world1: World, world2: World, cut: str, **flags: Any) -> list[dict[str, Any]]:
    cut_flags = CUTS[cut]
    base = {"bcd_steps_per_block": 2, "bcd_num_blocks": 2, "num_layers": 4, "hidden_size": 64}
    num_blocks = 4 if cut == "submodel" else 2
    config = worlds.run_config(**base | {"train_iters": 4 * num_blocks + 1} | cut_flags | flags)
    return (world2 if "world_size" in cut_flags else world1).run(switches, config)
