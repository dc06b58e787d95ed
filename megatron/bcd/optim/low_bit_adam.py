"""Adam whose moments are stored in fewer bits (--adam-moments-dtype): bf16, or 8-bit codes with one fp32 scale for each
block of BLOCK elements.

8 bits are those of Dettmers et al. (arXiv 2110.02861): an element is its block's largest magnitude times an entry of a
table, dense near 1, over seven decades. The first moment has a sign and 127 magnitudes, the second 255. There are two
differences. The table has -1 as well as 1, so that encoding what was decoded gives the same codes and scales. And a
second moment above 0 is never rounded to 0, because the step divides by its root.

A moment is stored as the entry of its name in a parameter's optimizer state (torch.bfloat16; torch.int8 and torch.uint8
for the first and second), flat, and in 8 bits a second entry, of its name and SCALE.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

BLOCK = 256
"""Elements with one scale."""
SCALE = "_scale"
CHUNK = 1 << 18
"""Elements decoded at once on a CPU, which then stay in its cache; a multiple of BLOCK."""
_CODES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
_SMALLEST_SCALE = 2.0**-100
"""A block without a larger magnitude is stored as zeros: with denormal numbers, codes would not be reproduced."""


def chunk_size(device: torch.device) -> int:
    """Elements decoded at once, to bound temporary memory. GPUs take larger chunks, because each launches kernels."""
    return CHUNK if device.type == "cpu" else 16 * CHUNK


def zeros(num_elements: int, dtype: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Both moments of a parameter before its first step; `dtype` is bf16 or int8."""
    if dtype == "bf16":
        return {name: torch.zeros(num_elements, dtype=torch.bfloat16, device=device) for name in _CODES}
    state = {}
    for name, codes in _CODES.items():
        state[name] = torch.zeros(num_elements, dtype=codes, device=device)
        state[name + SCALE] = torch.zeros(-(-num_elements // BLOCK), dtype=torch.float32, device=device)
    return state


def load(state: Mapping[str, torch.Tensor], name: str, start: int, end: int) -> torch.Tensor:
    """Elements `start`, a multiple of BLOCK, to `end` of a moment in fp32."""
    stored = state[name][start:end]
    if stored.dtype not in _CODES.values():
        return stored.float()
    codes = stored.to(torch.int32)
    values = _magnitudes(stored.device, stored.dtype).index_select(0, codes.abs())
    if stored.dtype == torch.int8:
        values.mul_(codes.sign())
    scales = state[name + SCALE][start // BLOCK : -(-end // BLOCK)]
    return values.mul_(scales.repeat_interleave(BLOCK)[: values.numel()])


def store(
    state: Mapping[str, torch.Tensor],
    name: str,
    start: int,
    values: torch.Tensor,
    *,
    chance: torch.Tensor | None = None,
) -> None:
    """Write fp32 `values` into a moment from element `start`, a multiple of BLOCK.

    Values are rounded to the nearest, but in bf16 with `chance` (int32, 0 to 0xffff by element) up or down by chance.
    """
    stored = state[name][start : start + values.numel()]
    if stored.dtype not in _CODES.values():
        if chance is not None:
            values = ((values.view(torch.int32) + chance) & -0x10000).view(torch.float32)
        stored.copy_(values)
        return
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    scales.masked_fill_(scales < _SMALLEST_SCALE, 0.0)
    state[name + SCALE][start // BLOCK : start // BLOCK + scales.numel()] = scales
    is_zero = (scales == 0.0)[:, None]
    ratios = (blocks / scales[:, None]).masked_fill_(is_zero, 0.0)
    codes = _nearest(stored.device, stored.dtype).index_select(0, _key(ratios.abs_()).view(-1)).view_as(blocks)
    if stored.dtype == torch.int8:
        codes = torch.where(blocks < 0, -codes, codes)
    else:
        codes.masked_fill_((codes == 0) & (blocks > 0) & ~is_zero, 1)
    stored.copy_(codes.view(-1)[: values.numel()])


def encode(moments: Mapping[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """State entries of flat fp32 moments; `decode` of them and `encode` again gives the same bits."""
    state: dict[str, torch.Tensor] = {}
    for name, values in moments.items():
        empty = zeros(values.numel(), dtype, values.device)
        state |= {entry: empty[entry] for entry in (name, name + SCALE) if entry in empty}
        step = chunk_size(values.device)
        for start in range(0, values.numel(), step):
            store(state, name, start, values[start : start + step])
    return state


def decode(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Flat fp32 moments by name from state entries; what is fp32 is not copied."""
    moments = {}
    for name in names(state):
        moments[name] = state[name]
        if state[name].dtype != torch.float32:
            size, step = state[name].numel(), chunk_size(state[name].device)
            chunks = [load(state, name, start, min(start + step, size)) for start in range(0, size, step)]
            moments[name] = torch.cat(chunks) if chunks else state[name].float()
    return moments


def names(state: Mapping[str, torch.Tensor]) -> list[str]:
    """The moments among state entries."""
    return [name for name in state if not name.endswith(SCALE)]


@functools.cache
def _magnitudes(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """0 and, ascending, the magnitudes of codes 1, 2, ...: 127 or 255 of them in (0, 1].

    Each decade is divided evenly, into twice as many parts as the one below. An entry is the middle of its part.
    """
    magnitudes = [0.0]
    for decade in range(7):
        parts = 2**decade * (1 if dtype == torch.int8 else 2)
        magnitudes += [10.0 ** (decade - 6) * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
    # signed codes have none to spare for 1, so that it replaces the largest
    magnitudes[127 if dtype == torch.int8 else 255 :] = [1.0]
    return torch.tensor(magnitudes, dtype=torch.float32, device=device)


_LOWEST_KEY = (127 - 23) << 10
"""Of 2^-23: what is smaller has code 0."""


def _key(ratios: torch.Tensor) -> torch.Tensor:
    """Index into `_nearest` of numbers from 0 to 1: exponent and 10 bits of the fraction; NaN's is that of 1."""
    return (ratios.view(torch.int32) >> 13).sub_(_LOWEST_KEY).clamp_(0, (127 << 10) - _LOWEST_KEY)


@functools.cache
def _nearest(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The code by `_key`: the nearest of the middle of all numbers with that key, which are within 0.1 %."""
    magnitudes = _magnitudes(torch.device("cpu"), dtype)
    keys = torch.arange(_LOWEST_KEY, (127 << 10) + 1, dtype=torch.int32)
    ratios = ((keys << 13) + (1 << 12)).view(torch.float32)
    codes = torch.bucketize(ratios, (magnitudes[:-1] + magnitudes[1:]) / 2)
    return codes.to(dtype=dtype, device=device)


class LowBitAdam(torch.optim.Optimizer):
    """Adam or AdamW (Kingma and Ba; Loshchilov and Hutter) on fp32 parameters, with bias correction.

    A step computes in fp32, a chunk of elements at a time, from decoded moments, and updates
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
            state.update(zeros(parameter.numel(), self.dtype, parameter.device))
        lr, eps, weight_decay, (beta1, beta2) = (group[name] for name in ("lr", "eps", "weight_decay", "betas"))
        step_size = lr / (1 - beta1 ** group["step"])
        correction = math.sqrt(1 - beta2 ** group["step"])
        weights, gradients = parameter.view(-1), parameter.grad.reshape(-1)
        chunk = chunk_size(parameter.device)
        for start in range(0, weights.numel(), chunk):
            weight, gradient = weights[start : start + chunk], gradients[start : start + chunk].float()
            if weight_decay and self._is_decoupled:
                weight.mul_(1 - lr * weight_decay)
            elif weight_decay:
                gradient = gradient.add(weight, alpha=weight_decay)
            end = start + weight.numel()
            exp_avg = load(state, "exp_avg", start, end).lerp_(gradient, 1 - beta1)
            exp_avg_sq = load(state, "exp_avg_sq", start, end).mul_(beta2)
            exp_avg_sq.addcmul_(gradient, gradient, value=1 - beta2)
            weight.addcdiv_(exp_avg, exp_avg_sq.sqrt().div_(correction).add_(eps), value=-step_size)
            store(state, "exp_avg", start, exp_avg)
            chance = None
            if self.dtype == "bf16":
                first = self._starts.get(parameter, 0) + start
                chance = _hash16(first, weight.numel(), group["step"], weight.device)
            store(state, "exp_avg_sq", start, exp_avg_sq, chance=chance)


def _hash16(first: int, count: int, step: int, device: torch.device) -> torch.Tensor:
    """16 bits as int32 for each of the indices from `first`: the upper ones of a product, mixed twice."""
    bits = torch.arange(first, first + count, dtype=torch.int64, device=device)
    for factor in (0x9E3779B1, 0x85EBCA6B):
        bits.add_(step).bitwise_and_(0x7FFFFFFF).mul_(factor)
        bits.bitwise_xor_(bits >> 17)
    return (bits >> 16).bitwise_and_(0xFFFF).to(torch.int32)
