"""Costs of a plan's passes in forward passes: forward, input gradients and weight gradients take 1 each."""

from __future__ import annotations

from megatron.bcd.pipeline.plan import PlanShape
from megatron.bcd.pipeline.simulate import ActionCosts, action_costs


def unit_costs(shape: PlanShape, *, message: float = 0.0) -> ActionCosts:
    """The same on every virtual stage."""
    ones, twos = (1.0,) * shape.num_virtual, (2.0,) * shape.num_virtual
    return action_costs(shape, forward=ones, backward=twos, backward_input=ones, message=message)
