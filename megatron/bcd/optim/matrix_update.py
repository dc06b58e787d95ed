"""Compute the new weights and state of a stack of matrices on its owner."""

from __future__ import annotations

import torch

from megatron.bcd.model.frozen_weights import GRADIENT, LOW_BITS
from megatron.bcd.optim import bf16, low_bit_adam, update_rules
from megatron.bcd.optim.matrix import FACTORS, MOMENTUM, Stack, join, write_back


def update_stack(stack: Stack, *, clip_coefficient: float, gradient_scale: float, num_steps: int) -> None:
    """Compute the new weights and state of a stack.

    Clipping applies to gradients that enter a momentum, `gradient_scale` to those that enter a second moment, which
    bounds its update by itself. Other directions do not depend on the scale of a gradient.

    If `stack.is_skipped` is true, weights and state keep their bits: the gradient becomes zero and the decay 1, so
    nothing is added, and other state is restored. The CPU does not know it, because it would have to wait.
    """
    rule, group, is_skipped = stack.rule, stack.param_group, stack.is_skipped
    if rule.name == update_rules.ADAM:
        return _step_adam(stack, clip_coefficient, num_steps)
    decay: float | torch.Tensor = 1.0 - group["lr"] * group["weight_decay"]
    if is_skipped is not None:
        stack.gradient.masked_fill_(is_skipped, 0.0)
        decay = torch.full_like(is_skipped, decay, dtype=torch.float32).masked_fill_(is_skipped, 1.0)
    rate = group["lr"] * rule.scale
    update = None if rule.name == update_rules.FACTORED else _orthogonal(stack, clip_coefficient)
    weights, low_bits = join(stack.weights), stack.state(LOW_BITS)
    bits = join(low_bits) if low_bits else None

    def load(rows: slice) -> torch.Tensor:
        return weights[:, rows] if bits is None else bf16.join(weights[:, rows], bits[:, rows])

    rows = [slice(None)] if update is not None else update_rules.rows_at_once(stack.gradient, stack.layout)
    value: torch.Tensor | None = load(rows[0])  # before a factored direction, because it takes temporary memory
    direction = _factored_direction(stack, gradient_scale) if update is None else None
    for some in rows:
        value = (load(some) if value is None else value).mul_(decay)
        if direction is None:
            value.add_(update, alpha=-rate)
        else:
            direction.subtract_from(value, some, rate=rate)
        if bits is not None:
            bf16.split(value, weight=weights[:, some], low_bits=bits[:, some])
        value = None
    if bits is not None:
        write_back(bits, low_bits)
    write_back(weights, stack.weights)


def _factored_direction(stack: Stack, gradient_scale: float) -> update_rules.FactoredDirection:
    """Return the directions of a stack, and update its means unless it is skipped.

    The number of steps counts a skipped one too, so it stays the same for all matrices of a checkpoint's group.
    """
    by_matrix = stack.state(FACTORS)
    factors = join(by_matrix)
    means = factors[:, :-1]
    before = None if stack.is_skipped is None else means.clone()
    direction = update_rules.FactoredDirection(stack.gradient, factors, stack.layout, gradient_scale=gradient_scale)
    if stack.is_skipped is not None:
        torch.where(stack.is_skipped, before, means, out=means)
    write_back(factors, by_matrix)
    return direction


def _step_adam(stack: Stack, clip_coefficient: float, num_steps: int) -> None:
    """Step the matrices of a stack with Adam, some elements at a time, which bounds temporary memory."""
    settings = {**stack.rule.adam, "step": num_steps + 1}
    settings |= {name: stack.param_group[name] for name in ("lr", "weight_decay")}
    for matrix, gradients in zip(stack.matrices, stack.gradient, strict=True):
        state = {kind: tensor.view(-1) for kind, tensor in matrix.state.items() if kind != GRADIENT}
        parts = low_bit_adam.parts(matrix.parameter.data.view(-1), gradients.view(-1), state)
        for start, weight, gradient, part in parts:
            if clip_coefficient < 1.0:
                gradient = gradient * clip_coefficient
            written, squares, bits = [weight, *part.values()], part["exp_avg_sq"], part.get(LOW_BITS)
            before = [] if stack.is_skipped is None else [tensor.clone() for tensor in written]
            value = weight if bits is None else bf16.join(weight, bits, squares)
            if squares.is_floating_point():
                squares.abs_()
            low_bit_adam.step_part(value, gradient, part, settings, first=start)
            if bits is not None:
                bf16.split(value, weight=weight, low_bits=bits, squares=squares)
            for tensor, old in zip(written, before, strict=False):
                torch.where(stack.is_skipped, old, tensor, out=tensor)  # type: ignore[call-overload]


def _orthogonal(stack: Stack, clip_coefficient: float) -> torch.Tensor:
    rule, gradient = stack.rule, stack.gradient.float()
    if rule.momentum is not None:
        if clip_coefficient < 1.0:
            gradient = gradient * clip_coefficient
        gradient = _apply_momentum(stack, gradient, rule.momentum)
    update = update_rules.orthogonal(gradient, stack.layout, num_steps=rule.num_steps, scale_mode=rule.scale_mode)
    is_skipped = None if rule.momentum is None else stack.is_skipped  # the gradient is zero, not the momentum
    return update if is_skipped is None else update.masked_fill_(is_skipped, 0.0)


def _apply_momentum(stack: Stack, gradient: torch.Tensor, decay: float) -> torch.Tensor:
    momenta = stack.state(MOMENTUM)
    momentum = join(momenta)
    # Muon's running mean, as in Megatron Core; PyTorch's SGD sums, which is the same up to the scale
    if stack.is_skipped is None:
        momentum.copy_(momentum.float().lerp_(gradient, 1 - decay))
    else:
        new = momentum.float().lerp(gradient, 1 - decay)
        momentum.copy_(torch.where(stack.is_skipped, momentum, new))
        del new  # before the direction takes memory
    write_back(momentum, momenta)
    return gradient.lerp(momentum.float(), decay) if stack.rule.nesterov else momentum.float()
