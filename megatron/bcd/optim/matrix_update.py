"""Compute the new weights and state of a stack of matrices on its owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.bcd.model.host_layers import GRADIENT, LOW_BITS
from megatron.bcd.optim import bf16, low_bit_adam, low_bit_momentum, update_rules
from megatron.bcd.optim.matrix import FACTORS, MOMENTUM_SCALE, Stack, join, write_back
from megatron.bcd.optim.state import MOMENTUM
from megatron.bcd.runtime.compat.pytorch import compiled


def update_stack(
    stack: Stack,
    *,
    clip_coefficient: float,
    gradient_scale: float,
    num_steps: int,
    is_compiled: bool,
    on_device: Callable[[float], torch.Tensor],
) -> None:
    """Compute the new weights and state of a stack.

    Clipping applies to gradients that enter a momentum, `gradient_scale` to those that enter a second moment, which
    bounds its update by itself. Other directions do not depend on the scale of a gradient.

    If `stack.is_skipped` is true, weights and state keep their bits. The CPU does not know it, because it would have to
    wait. With `is_compiled` kernels of torch.compile read and write each tensor once; results differ by rounding. They
    take numbers from `on_device`.
    """
    rule, group, is_skipped = stack.rule, stack.param_group, stack.is_skipped
    if rule.name == update_rules.ADAM:
        return _step_adam(stack, clip_coefficient, num_steps)
    is_factored = rule.name == update_rules.FACTORED
    if is_skipped is not None and not is_compiled:
        stack.gradient.masked_fill_(is_skipped, 0.0)
    decay: Any = 1.0 - group["lr"] * group["weight_decay"]
    rate = group["lr"] * rule.scale
    update = None
    if not is_factored:
        clip = on_device(clip_coefficient) if is_compiled else None if clip_coefficient >= 1.0 else clip_coefficient
        update = _orthogonal(stack, clip, is_compiled=is_compiled)
    weights, low_bits, factors = join(stack.weights), stack.state(LOW_BITS), stack.state(FACTORS)
    bits = join(low_bits) if low_bits else None
    means = join(factors) if is_factored else None
    sizes = stack.layout.parts or (weights.shape[1],)
    if means is not None:
        scales = update_rules.factored_scales(
            stack.gradient,
            means,
            stack.layout,
            gradient_scale=gradient_scale,
            is_skipped=is_skipped,
            is_compiled=is_compiled,
        )
    if is_compiled:
        numbers = [on_device(number) for number in (rate, decay)]
        if update is not None:
            compiled(update_rules.subtract)(weights, bits, update, is_skipped, *numbers)
        else:
            subtract = compiled(update_rules.subtract_directions)
            subtract(weights, bits, stack.gradient, *scales, is_skipped, *numbers, sizes)
    else:  # with few temporaries
        if is_skipped is not None:  # the gradient is zero, and a decay of 1 keeps the bits
            decay = torch.full_like(is_skipped, decay, dtype=torch.float32).masked_fill_(is_skipped, 1.0)
        for rows in [slice(None)] if update is not None else update_rules.rows_at_once(stack.gradient, stack.layout):
            value = weights[:, rows] if bits is None else bf16.join(weights[:, rows], bits[:, rows])
            value.mul_(decay)
            if update is not None:
                value.add_(update, alpha=-rate)
            else:
                update_rules.subtract_rows(value, rows, stack.gradient, *scales, sizes, rate=rate)
            if bits is not None:
                bf16.split(value, weight=weights[:, rows], low_bits=bits[:, rows])
            del value
    for stacked, tensors in ((bits, low_bits), (means, factors), (weights, stack.weights)):
        if stacked is not None:
            write_back(stacked, tensors)


def _step_adam(stack: Stack, clip_coefficient: float, num_steps: int) -> None:
    """Step the matrices of a stack with Adam, some elements at a time, which bounds temporary memory."""
    settings = {**stack.rule.adam, "step": num_steps + 1}
    settings |= {name: stack.param_group[name] for name in ("lr", "weight_decay")}
    for matrix, gradients in zip(stack.matrices, stack.gradient.chunk(len(stack.matrices)), strict=True):
        state = {kind: tensor.view(-1) for kind, tensor in matrix.state.items() if kind != GRADIENT}
        parts = low_bit_adam.parts(matrix.parameter.data.view(-1), gradients.view(-1), state)
        for weight, gradient, part in parts:
            if clip_coefficient < 1.0:
                gradient = gradient * clip_coefficient
            written, bits = [weight, *part.values()], part.get(LOW_BITS)
            squares = part["exp_avg_sq"] if matrix.has_signed_squares else None
            before = [] if stack.is_skipped is None else [tensor.clone() for tensor in written]
            value = weight if bits is None else bf16.join(weight, bits, squares)
            if squares is not None and squares.is_floating_point():
                squares.abs_()
            low_bit_adam.step_part(value, gradient, part, settings)
            if bits is not None:
                bf16.split(value, weight=weight, low_bits=bits, squares=squares)
            for tensor, old in zip(written, before, strict=False):
                torch.where(stack.is_skipped, old, tensor, out=tensor)  # type: ignore[call-overload]


def _orthogonal(stack: Stack, clip: float | torch.Tensor | None, *, is_compiled: bool) -> torch.Tensor:
    """Return the directions of a stack, and update its momenta. They are zero where it is skipped, unless compiled."""
    rule, is_skipped = stack.rule, stack.is_skipped
    gradient = stack.gradient if is_compiled else stack.gradient.float()  # directions keep its dtype
    if rule.momentum is not None:
        momenta, scales = stack.state(MOMENTUM), stack.state(MOMENTUM_SCALE)
        stored, groups = join(momenta), join(scales) if scales else None
        step = compiled(_step_momentum) if is_compiled else _step_momentum
        gradient = step(gradient, clip, stored, groups, is_skipped, rule.momentum, rule.nesterov)
        write_back(stored, momenta)
        if groups is not None:
            write_back(groups, scales)
        del stored, groups  # they may be copies
    layout, num_steps = stack.layout, rule.num_steps
    update = update_rules.orthogonal(gradient, layout, num_steps=num_steps, is_compiled=is_compiled)
    if is_skipped is not None and rule.momentum is not None and not is_compiled:
        update.masked_fill_(is_skipped, 0.0)  # the gradient is zero, not the momentum
    return update


def _step_momentum(
    gradient: torch.Tensor,
    clip: float | torch.Tensor | None,
    stored: torch.Tensor,
    scales: torch.Tensor | None,
    is_skipped: torch.Tensor | None,
    decay: float,
    nesterov: bool,
) -> torch.Tensor:
    """Update momenta, where not `is_skipped`, and gradients in place. Return what to orthogonalize, in fp32."""
    gradient = gradient.float()
    if clip is not None:
        gradient.mul_(clip)
    momentum = stored.float() if scales is None else low_bit_momentum.decode(stored, scales)
    # Muon's running mean, as in Megatron Core; PyTorch's SGD sums, which is the same up to the scale
    if is_skipped is None:
        momentum.lerp_(gradient, 1 - decay)
    else:
        momentum = torch.where(is_skipped, momentum, momentum.lerp(gradient, 1 - decay))
    if scales is None:
        momentum = stored.copy_(momentum).float()
    else:
        for tensor, new in zip((stored, scales), low_bit_momentum.encode(momentum), strict=True):
            # compiled code does not divide exactly, so encoding again may change bits
            tensor.copy_(new if is_skipped is None else torch.where(is_skipped, tensor, new))
    return gradient.lerp_(momentum, decay) if nesterov else momentum
