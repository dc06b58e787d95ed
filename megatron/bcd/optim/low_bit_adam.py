"""Adam whose moments are stored in bf16 or in 8 bits (--adam-moments-dtype), in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megatron.bcd.optim import low_bit_moments


class LowBitAdam(torch.optim.Optimizer):
    """Adam or AdamW (Kingma and Ba; Loshchilov and Hutter) on fp32 parameters, with bias correction.

    A step computes in fp32, a chunk of elements at a time, from moments that `low_bit_moments` decodes, and updates
    the parameter before the new moments are rounded. Steps are counted by group, as fused optimizers do.

    In bf16 the second moment is rounded by chance: most steps change it by less than half a bf16 step, and rounded to
    the nearest it would not follow gradients that shrink. The chance is a hash of the step and of the element's index
    in the whole parameter: a resumed run repeats it, and both copies of a tied embedding have the same.

    Args:
        param_groups: with lr, betas, eps and weight_decay.
        starts: index in the whole parameter of a shard's first element; 0 where it is absent.
        dtype: bf16 or int8.
    """

    def __init__(
        self,
        param_groups: Iterable[dict[str, Any]],
        *,
        starts: Mapping[torch.Tensor, int],
        dtype: str,
        decoupled_weight_decay: bool,
    ) -> None:
        super().__init__([{"params": []}], {})
        # as Megatron Core's distributed optimizer does: in fp32 its shards are views of weights, which torch refuses
        self.param_groups = list(param_groups)
        self.dtype = dtype
        self._starts = starts
        self._is_decoupled = decoupled_weight_decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, group)

    def _step_parameter(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None and parameter.dtype == torch.float32
        state = self.state[parameter]
        if not state:
            state.update(low_bit_moments.zeros(parameter.numel(), self.dtype, parameter.device))
        lr, eps, weight_decay, (beta1, beta2) = (group[name] for name in ("lr", "eps", "weight_decay", "betas"))
        step_size = lr / (1 - beta1 ** group["step"])
        correction = math.sqrt(1 - beta2 ** group["step"])
        weights, gradients = parameter.view(-1), parameter.grad.reshape(-1)
        chunk = low_bit_moments.chunk_size(parameter.device)
        for start in range(0, weights.numel(), chunk):
            weight, gradient = weights[start : start + chunk], gradients[start : start + chunk].float()
            if weight_decay and self._is_decoupled:
                weight.mul_(1 - lr * weight_decay)
            elif weight_decay:
                gradient = gradient.add(weight, alpha=weight_decay)
            end = start + weight.numel()
            exp_avg = low_bit_moments.load(state, "exp_avg", start, end).lerp_(gradient, 1 - beta1)
            exp_avg_sq = low_bit_moments.load(state, "exp_avg_sq", start, end).mul_(beta2)
            exp_avg_sq.addcmul_(gradient, gradient, value=1 - beta2)
            weight.addcdiv_(exp_avg, exp_avg_sq.sqrt().div_(correction).add_(eps), value=-step_size)
            low_bit_moments.store(state, "exp_avg", start, exp_avg)
            chance = None
            if self.dtype == "bf16":
                first = self._starts.get(parameter, 0) + start
                chance = _hash16(first, weight.numel(), group["step"], weight.device)
            low_bit_moments.store(state, "exp_avg_sq", start, exp_avg_sq, chance=chance)


def _hash16(first: int, count: int, step: int, device: torch.device) -> torch.Tensor:
    """16 bits as int32 for each of the indices from `first`: the upper ones of a product, mixed twice."""
    bits = torch.arange(first, first + count, dtype=torch.int64, device=device)
    for factor in (0x9E3779B1, 0x85EBCA6B):
        bits.add_(step).bitwise_and_(0x7FFFFFFF).mul_(factor)
        bits.bitwise_xor_(bits >> 17)
    return (bits >> 16).bitwise_and_(0xFFFF).to(torch.int32)
