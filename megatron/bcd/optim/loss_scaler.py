"""State of fp16's dynamic loss scaler, which continues from phase to phase."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core.optimizer import MegatronOptimizer

from megatron.bcd.optim.optimizer_params import chained_optimizers

LossScalerState = dict[str, float]


def get_state(optimizer: MegatronOptimizer | None) -> LossScalerState | None:
    """The loss scale and its counters; None without a loss scaler."""
    scalers = [getattr(each, "grad_scaler", None) for each in chained_optimizers(optimizer)]
    state = scalers[0].state_dict() if scalers and scalers[0] else None
    return {name: float(value) for name, value in state.items()} if state else None


def set_state(optimizer: MegatronOptimizer | None, state: Mapping[str, float]) -> None:
    """Load what `get_state` returned into every chained optimizer."""
    for each in chained_optimizers(optimizer):
        each.grad_scaler.load_state_dict(
            {name: torch.tensor([value]) if name == "scale" else int(value) for name, value in state.items()}
        )
