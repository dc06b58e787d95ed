"""fp32 main parameters of bf16 matrices at a switch: between Megatron Core's optimizer, which shards them over the
data-parallel ranks while their block is active, and the matrix optimizer, which steps them while it rests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megatron.bcd.optim.matrix_optimizer import MatrixOptimizer
from megatron.bcd.optim.param_shard import ParamShard
from megatron.bcd.runtime import collectives, replicas


def main_params_from_rest(matrices: MatrixOptimizer, shards: Mapping[str, ParamShard], names: Iterable[str]) -> None:
    """Set the active block's main parameters to their values at rest. A collective over the replicas."""
    for name in names:
        value = matrices.take_main_param(name).view(-1)
        if (shard := shards.get(name)) is not None:
            shard.set_main_param(value[shard.start : shard.end])


@torch.no_grad()
def main_params_to_rest(
    matrices: MatrixOptimizer, shards: Mapping[str, ParamShard], names: Iterable[str], *, is_sharded: bool
) -> None:
    """The opposite, at the end of the block's phase: no bit is lost."""
    for name in names:
        value = whole_main_param(matrices.matrices[name].parameter, shards.get(name), is_sharded=is_sharded)
        matrices.set_main_param(name, value)


def whole_main_param(parameter: torch.nn.Parameter, shard: ParamShard | None, *, is_sharded: bool) -> torch.Tensor:
    """The flat main parameter on every rank. A collective over the replicas if it is sharded."""
    if shard is not None and not is_sharded:
        return shard.main_param
    mine, start = (None, 0) if shard is None else (shard.main_param, shard.start)
    return collectives.join_shards(mine, start, like=parameter, group=replicas.group(), rank=None)
