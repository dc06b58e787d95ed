"""fp32 main parameters of bf16 matrices at a switch: between Megatron Core's optimizer, which shards them over the
data-parallel ranks while their block is active, and the matrix optimizer, which steps them while it rests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from megatron.core import parallel_state

from megatron.bcd.optim.matrix_optimizer import MatrixOptimizer
from megatron.bcd.optim.param_shard import ParamShard


def main_params_from_rest(matrices: MatrixOptimizer, shards: Mapping[str, ParamShard], names: Iterable[str]) -> None:
    """Set the active block's main parameters to their values at rest. A collective over the data-parallel group."""
    for name in names:
        value = matrices.take_main_param(name).view(-1)
        if (shard := shards.get(name)) is not None:
            shard.main_param.data.view(-1).copy_(value[shard.start : shard.end])


@torch.no_grad()
def main_params_to_rest(
    matrices: MatrixOptimizer, shards: Mapping[str, ParamShard], names: Iterable[str], *, is_sharded: bool
) -> None:
    """The opposite, at the end of the block's phase: no bit is lost."""
    for name in names:
        value = whole_main_param(matrices.matrices[name].parameter, shards.get(name), is_sharded=is_sharded)
        matrices.set_main_param(name, value)


def whole_main_param(parameter: torch.nn.Parameter, shard: ParamShard | None, *, is_sharded: bool) -> torch.Tensor:
    """The flat main parameter on every rank. A collective over the data-parallel group if it is sharded."""
    if shard is not None and not is_sharded:
        return shard.main_param.detach().reshape(-1)
    flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if shard is not None:
        flat[shard.start : shard.end] = shard.main_param.detach().reshape(-1)
    # each element comes from one rank: a sum of integers keeps its bits, even those of -0.0
    torch.distributed.all_reduce(flat.view(torch.int32), group=parallel_state.get_data_parallel_group())
    return flat
