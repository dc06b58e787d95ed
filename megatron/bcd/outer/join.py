"""What a group that joins takes of each rank: everything that makes its next step that of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.runtime import memory


def rank_state(active: ActiveBlock) -> dict[str, Any]:
    """Copies in host memory: weights, optimizer state of the phase, what is kept of other blocks, outer momenta."""
    shards = {**active.own_shards(), **active.always_active_shards()}
    tensors = {
        "weights": dict(unwrap_model(active.model).named_parameters()),
        "shards": {name: (shard.main_param, shard.stored_moments(), shard.num_steps) for name, shard in shards.items()},
        "outer_momenta": active.outer_momenta,
    }
    return memory.copy_to_host(tensors) | {
        "kept": active.kept.state(),
        "matrices": None if active.matrices is None else active.matrices.state(),
        "loss_scaler": active.loss_scaler_state(),
    }


def set_rank_state(active: ActiveBlock, state: Mapping[str, Any], build: Callable[[], None]) -> None:
    """Load what `rank_state` returned on the same rank of a group of the same layout. No block may be built; `build`
    makes that of the other group the active one. A collective."""
    state = memory.copy_to_host(state)  # what torchft received can't be written
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
        main_param, moments, num_steps = state["shards"][name]
        shard.set_stored_moments(moments, num_steps=num_steps)
        shard.set_main_param(main_param)
