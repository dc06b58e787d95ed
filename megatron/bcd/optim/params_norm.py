"""The norm of all weights (--log-params-norm)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron.bcd.runtime import device


@torch.no_grad()
def params_norm(model: torch.nn.Module, *, held: Mapping[torch.Tensor, torch.Tensor] | None = None) -> float:
    """L2 norm of the weights of the whole model, active and frozen, the same on every rank. A collective.

    As stock Megatron-LM counts: tensor-parallel duplicates and the tied copy once, and where a 16-bit weight has a main
    parameter now, that. The weights must be current on every rank.

    Args:
        model: this rank's.
        held: this rank's shards of main parameters by weight, where the optimizer holds them itself.
    """
    whole, sharded = 0.0, 0.0
    for weight in model.parameters():
        if not (param_is_not_shared(weight) and param_is_not_tensor_parallel_duplicate(weight)):
            continue
        has_main = weight.dtype != torch.float32 and hasattr(weight, "main_param")
        if not has_main:
            whole += _sum_of_squares(weight)
        elif not getattr(weight, "main_param_sharded", False):
            whole += _sum_of_squares(weight.main_param)
        elif (shard := weight.main_param if held is None else held.get(weight)) is not None:
            sharded += _sum_of_squares(shard)
    over_shards = _sum_over(sharded, parallel_state.get_data_parallel_group(with_context_parallel=True))
    return math.sqrt(_sum_over(whole + over_shards, parallel_state.get_model_parallel_group()))


def _sum_of_squares(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) ** 2


def _sum_over(value: float, group: torch.distributed.ProcessGroup) -> float:
    total = torch.tensor(value, dtype=torch.float32, device=device.current())
    torch.distributed.all_reduce(total, group=group)
    return float(total)
