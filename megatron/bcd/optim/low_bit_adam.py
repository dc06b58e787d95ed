"""Adam whose moments are stored in 8-bit codes (--adam-moments-dtype int8).

There is one fp32 scale for each block of BLOCK elements. The codes follow Dettmers et al. (arXiv 2110.02861): an
element is the largest magnitude of its block times an entry of a table, which covers seven decades and is dense near 1.
The first moment has a sign and 127 magnitudes, the second 255 magnitudes.

There are two differences. The table has -1 as well as 1, so that decoding and encoding again gives the same codes and
scales. And a second moment above 0 is never rounded to 0, because the step divides by its root.

A parameter's optimizer state has a flat entry with the name of each moment, torch.int8 for the first and torch.uint8
for the second one, and entries of the scales, with SCALE behind the name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.adam import adam

BLOCK = 256
"""Number of elements that share a scale."""
SCALE = "_scale"
CHUNK = 1 << 18
"""Elements decoded at once on a CPU, so that they stay in its cache; a multiple of BLOCK."""
_CODES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
MOMENTS = tuple(_CODES)
SMALLEST_SCALE = 2.0**-100
"""A block with a smaller scale is stored as zeros: with denormal numbers the codes would not be reproducible."""


def chunk_size(device: torch.device) -> int:
    """Return how many elements to decode at once, which bounds temporary memory.

    GPUs use larger chunks, because each chunk launches kernels.
    """
    return CHUNK if device.type == "cpu" else 16 * CHUNK


def zeros(num_elements: int, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Return both moments of a parameter before its first step. `dtype` is torch.float32 or torch.int8."""
    if dtype == torch.float32:
        return {name: torch.zeros(num_elements, device=device) for name in _CODES}
    state = {}
    for name, codes in _CODES.items():
        state[name] = torch.zeros(num_elements, dtype=codes, device=device)
        state[name + SCALE] = torch.zeros(-(-num_elements // BLOCK), dtype=torch.float32, device=device)
    return state


def load(state: Mapping[str, torch.Tensor], name: str, start: int, end: int) -> torch.Tensor:
    """Return elements `start`, a multiple of BLOCK, to `end` of a moment in fp32."""
    stored = state[name][start:end]
    codes = stored.to(torch.int32)
    values = _magnitudes(stored.device, stored.dtype).index_select(0, codes.abs())
    if stored.dtype == torch.int8:
        values.mul_(codes.sign())
    scales = state[name + SCALE][start // BLOCK : -(-end // BLOCK)]
    return values.mul_(scales.repeat_interleave(BLOCK)[: values.numel()])


def store(state: Mapping[str, torch.Tensor], name: str, start: int, values: torch.Tensor) -> None:
    """Round fp32 `values` to nearest, and write them into a moment from element `start`, a multiple of BLOCK."""
    stored = state[name][start : start + values.numel()]
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    scales.masked_fill_(scales < SMALLEST_SCALE, 0.0)
    state[name + SCALE][start // BLOCK : start // BLOCK + scales.numel()] = scales
    is_zero = (scales == 0.0)[:, None]
    ratios = (blocks / scales[:, None]).masked_fill_(is_zero, 0.0)
    codes = _nearest(stored.device, stored.dtype).index_select(0, _key(ratios.abs_()).view(-1)).view_as(blocks)
    if stored.dtype == torch.int8:
        codes = torch.where(blocks < 0, -codes, codes)
    else:
        codes.masked_fill_((codes == 0) & (blocks > 0) & ~is_zero, 1)
    stored.copy_(codes.view(-1)[: values.numel()])


def encode(moments: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state entries of flat fp32 moments. `read` and `encode` again give the same bits."""
    state: dict[str, torch.Tensor] = {}
    for name, values in moments.items():
        empty = zeros(values.numel(), torch.int8, values.device)
        state |= {entry: empty[entry] for entry in (name, name + SCALE)}
        step = chunk_size(values.device)
        for start in range(0, values.numel(), step):
            store(state, name, start, values[start : start + step])
    return state


def read(state: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a flat fp32 moment from state entries. An entry in fp32 is not copied."""
    stored = state[name]
    if stored.dtype == torch.float32:
        return stored
    size, step = stored.numel(), chunk_size(stored.device)
    chunks = [load(state, name, start, min(start + step, size)) for start in range(0, size, step)]
    return torch.cat(chunks) if chunks else torch.empty(0)


def names(state: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the moments among state entries."""
    return [name for name in state if not name.endswith(SCALE)]


@functools.cache
def _magnitudes(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the magnitude of each code: 0 for code 0, then 127 or 255 ascending values in (0, 1].

    Each decade is divided evenly, into twice as many parts as the decade below. A value is the middle of its part.
    """
    magnitudes = [0.0]
    for decade in range(7):
        parts = 2**decade * (1 if dtype == torch.int8 else 2)
        magnitudes += [10.0 ** (decade - 6) * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
    # signed codes have no spare code for 1, so 1 replaces the largest value
    magnitudes[127 if dtype == torch.int8 else 255 :] = [1.0]
    return torch.tensor(magnitudes, dtype=torch.float32, device=device)


_LOWEST_KEY = (127 - 23) << 10
"""Key of 2^-23. Smaller numbers have code 0."""


def _key(ratios: torch.Tensor) -> torch.Tensor:
    """Return the index into `_nearest` of numbers from 0 to 1: exponent and 10 bits of the fraction. NaN counts as 1.

    A table look-up by the upper bits of the float replaces a search among the magnitudes.
    """
    return (ratios.view(torch.int32) >> 13).sub_(_LOWEST_KEY).clamp_(0, (127 << 10) - _LOWEST_KEY)


@functools.cache
def _nearest(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the code by `_key`. All numbers with one key are within 0.1 %; the code is the nearest to their middle."""
    magnitudes = _magnitudes(torch.device("cpu"), dtype)
    keys = torch.arange(_LOWEST_KEY, (127 << 10) + 1, dtype=torch.int32)
    ratios = ((keys << 13) + (1 << 12)).view(torch.float32)
    codes = torch.bucketize(ratios, (magnitudes[:-1] + magnitudes[1:]) / 2)
    return codes.to(dtype=dtype, device=device)


class LowBitAdam(torch.optim.Optimizer):
    """Adam or AdamW (Kingma and Ba; Loshchilov and Hutter) on fp32 parameters, with bias correction.

    A step decodes a chunk of the moments at a time and computes in fp32. It updates the parameter before it rounds the
    new moments. Steps are counted by group, as in fused optimizers.

    Args:
        param_groups: with lr, betas, eps and weight_decay.
    """

    def __init__(self, param_groups: Iterable[dict[str, Any]], *, decoupled_weight_decay: bool) -> None:
        super().__init__([{"params": []}], {})
        # like Megatron Core's distributed optimizer: in fp32 its shards are views of weights, which torch refuses
        self.param_groups = list(param_groups)
        self._is_decoupled = decoupled_weight_decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            settings = group | {"decoupled_weight_decay": self._is_decoupled}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(zeros(parameter.numel(), torch.int8, parameter.device))
                for weight, gradient, part in parts(parameter.view(-1), parameter.grad.reshape(-1), state):
                    step_part(weight, gradient, part, settings)


def parts(weight: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor]) -> Iterator[Any]:
    """Yield the weights, the gradients in fp32 and the entries of the state of elements to step at once."""
    size = chunk_size(weight.device)
    for start in range(0, weight.numel(), size):
        some, scales = slice(start, start + size), slice(start // BLOCK, (start + size) // BLOCK)
        part = {name: flat[scales if name.endswith(SCALE) else some] for name, flat in state.items()}
        yield weight[some], gradient[some].float(), part


def step_part(
    weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]
) -> None:
    """Step fp32 weights and the entries of their moments; with moments in fp32 by PyTorch's Adam.

    `group` has settings, and `step`, this step's number.
    """
    lr, eps, weight_decay, (beta1, beta2) = (group[name] for name in ("lr", "eps", "weight_decay", "betas"))
    is_decoupled = group["decoupled_weight_decay"]
    if state["exp_avg"].dtype == torch.float32:
        adam(
            [weight], [gradient], [state["exp_avg"]], [state["exp_avg_sq"]], [],
            [torch.full((), group["step"] - 1.0, device=weight.device)],
            fused=weight.is_cuda,  # as `patch_adam` in runtime/compat/megatron_core.py
            amsgrad=False, beta1=beta1, beta2=beta2, lr=lr, weight_decay=weight_decay, eps=eps, maximize=False,
            decoupled_weight_decay=is_decoupled,
        )  # fmt: skip
        return
    step_size = lr / (1 - beta1 ** group["step"])
    correction = math.sqrt(1 - beta2 ** group["step"])
    if weight_decay and is_decoupled:
        weight.mul_(1 - lr * weight_decay)
    elif weight_decay:
        gradient = gradient.add(weight, alpha=weight_decay)
    exp_avg = load(state, "exp_avg", 0, weight.numel()).lerp_(gradient, 1 - beta1)
    exp_avg_sq = load(state, "exp_avg_sq", 0, weight.numel()).mul_(beta2)
    exp_avg_sq.addcmul_(gradient, gradient, value=1 - beta2)
    weight.addcdiv_(exp_avg, exp_avg_sq.sqrt().div_(correction).add_(eps), value=-step_size)
    store(state, "exp_avg", 0, exp_avg)
    store(state, "exp_avg_sq", 0, exp_avg_sq)
