"""Costs of a plan's actions in forward passes: forward, input gradients and weight gradients take 1 each."""

from __future__ import annotations

from megatron.bcd.pipeline.build import PlanShape
from megatron.bcd.pipeline.chunk_shape import ChunkShape
from megatron.bcd.pipeline.simulate import ActionCosts, action_costs
from megatron.bcd.pipeline.simulate_interleaved import chunk_costs


def unit_costs(shape: PlanShape) -> ActionCosts:
    """The same on every stage, messages 0."""
    ones, twos = (1.0,) * shape.num_stages, (2.0,) * shape.num_stages
    return action_costs(shape, forward=ones, backward=twos, backward_input=ones)


def unit_chunk_costs(shape: ChunkShape, *, message: float = 0.0) -> ActionCosts:
    """The same for every chunk."""
    ones, twos = (1.0,) * shape.num_virtual, (2.0,) * shape.num_virtual
    return chunk_costs(shape, forward=ones, backward=twos, backward_input=ones, message=message)
