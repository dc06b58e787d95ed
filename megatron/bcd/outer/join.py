"""What a group that joins takes of each rank: everything that makes its next step that of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.optim.active_block import ActiveBlock


def rank_state(active: ActiveBlock) -> dict[str, Any]:
    """Copies in host memory: weights, optimizer state of the phase, what is kept of other blocks, outer momenta."""
    shards = {**active.own_shards(), **active.always_active_shards()}
    return {
        "weights": {name: _copy(one) for name, one in unwrap_model(active.model).named_parameters()},
        "shards": {
            name: {
                "main_param": _copy(shard.main_param),
                "moments": {key: _copy(moment) for key, moment in shard.stored_moments().items()},
                "num_steps": shard.num_steps,
            }
            for name, shard in shards.items()
        },
        "kept": active.kept.state(),
        "matrices": None if active.matrices is None else active.matrices.state(),
        "loss_scaler": active.loss_scaler_state(),
        "outer_momenta": {name: _copy(one) for name, one in active.outer_momenta.items()},
    }


def set_rank_state(active: ActiveBlock, state: Mapping[str, Any], build: Callable[[], None]) -> None:
    """Load what `rank_state` returned on the same rank of a group of the same layout. No block may be built; `build`
    makes that of the other group the active one. A collective."""
    parameters = dict(unwrap_model(active.model).named_parameters())
    for name, value in state["weights"].items():
        parameters[name].data.copy_(value)
    active.kept.set_state(state["kept"], parameters)
    if active.matrices is not None:
        active.matrices.set_state(state["matrices"])
    active.remember_loss_scaler(state["loss_scaler"])
    active.outer_momenta = dict(state["outer_momenta"])
    build()
    for name, shard in {**active.own_shards(), **active.always_active_shards()}.items():
        held = state["shards"][name]
        shard.set_stored_moments(held["moments"], num_steps=held["num_steps"])
        shard.set_main_param(held["main_param"])


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
