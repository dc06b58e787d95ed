"""Invariant 1: one block that covers everything is plain full-parameter training, bit for bit. Adam is PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import worlds
from support.dist import World
from support.plain_training import plain_training

from megatron.bcd.config import RunConfig

CUTS: dict[str, dict[str, Any]] = {name: worlds.CUTS[name] for name in ("data2", "tensor2", "pipeline2")}
CUTS["experts_pipeline2"] = (
    worlds.CUTS["pipeline2"] | worlds.EXPERTS | worlds.SHARED_EXPERT | {"moe_grouped_gemm": True}
)
# without clipping: one DDP wrapper sums the squares of the gradients in another order than one for each chunk
CUTS["interleaved"] = worlds.CUTS["pipeline2"] | {"num_virtual_stages_per_pipeline_rank": 3, "clip_grad": 0.0}
CUTS["interleaved"] |= {"attention_dropout": 0.1}
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


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"no_decoupled_weight_decay": True},
    "adamw": {},
}


def reference(config: RunConfig, parameters: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
    """Build PyTorch's optimizer with Megatron's parameter groups: no weight decay on vectors."""
    groups = [
        {"params": [parameter for parameter in parameters.values() if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [item for item in parameters.values() if item.dim() == 1], "weight_decay": 0.0},
    ]
    kind = torch.optim.AdamW if config.optimizer.decoupled_weight_decay else torch.optim.Adam
    return kind(groups, lr=1.0)


def beside_a_reference(config: RunConfig) -> list[str]:
    """Step PyTorch's optimizer on copies with the same gradients; return the weights that differ in the end."""
    copies: dict[str, torch.Tensor] = {}
    optimizer: Any = None

    def step_copies(run: worlds.RecordedRun) -> None:
        nonlocal optimizer
        parameters = run.active.parameters.active()
        if optimizer is None:
            copies.update({name: parameter.detach().clone() for name, parameter in parameters.items()})
            optimizer = reference(config, copies)
        for name, parameter in parameters.items():
            copies[name].grad = parameter.main_grad.clone()
        for group in optimizer.param_groups:
            group["lr"] = run.active.core.optimizer.param_groups[0]["lr"]  # type: ignore[union-attr]
        optimizer.step()

    with worlds.started(config, after_schedule=step_copies) as run:
        run.train()
        weights = worlds.weights_of(run.model)
        return worlds.same_bits(
            {name: weights[name] for name in copies}, {name: copy.detach() for name, copy in copies.items()}
        )


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_is_pytorchs(world1: World, text_data: str, kind: str) -> None:
    """Adam steps as PyTorch's does, bit for bit, with both kinds of weight decay."""
    flags = {"data_path": text_data, "train_iters": 4, "bcd_steps_per_block": 9, "clip_grad": 0, "weight_decay": 0.1}
    config = worlds.run_config(**flags, **OPTIMIZERS[kind], hidden_size=64, lr_warmup_iters=1)
    assert world1.run(beside_a_reference, config) == [[]]
