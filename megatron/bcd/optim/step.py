"""A step of a phase's optimizer, and the gradient norm of the active block alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron.bcd.optim import loss_scaler
from megatron.bcd.optim.matrix_optimizer import MatrixOptimizer
from megatron.bcd.optim.optimizer_params import ALWAYS_ACTIVE, chained_optimizers
from megatron.bcd.runtime import device


@torch.no_grad()
def clip_and_step(
    optimizer: MegatronOptimizer,
    matrices: MatrixOptimizer | None = None,
    *,
    skip_non_finite: bool,
    on_clipped: Callable[[], None] | None = None,
) -> float | None:
    """Clip the gradient and step the optimizer, and that of matrices. A collective.

    Megatron Core's step with one more check. It is skipped after an overflow in fp16, and with `skip_non_finite` if a
    gradient is not finite. Resting matrices are neither clipped nor part of the norm: their updates have no scale.
    `on_clipped` is called on every rank between clipping and step, unless the step is skipped.

    Returns:
        L2 norm of the gradient before clipping, the same on every rank; None if the step was skipped.
    """
    squares = None if matrices is None else matrices.reduce_gradients()
    if optimizer.prepare_grads():
        return None
    norm = float(optimizer.get_grad_norm())  # the CPU waits for the device
    with_momentum, without = (0.0, 0.0) if squares is None else squares.tolist()
    if matrices is not None:
        norm = math.sqrt(norm**2 + with_momentum)
    if skip_non_finite and not (math.isfinite(norm) and math.isfinite(without)):
        return None
    for each in chained_optimizers(optimizer):
        if not each.is_stub_optimizer and each.get_parameters() and each.config.clip_grad > 0.0:
            clip_grad_by_total_norm_fp32(
                each.get_parameters(),
                max_norm=each.config.clip_grad,
                total_norm=norm,
                use_decoupled_grad=each.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    if on_clipped is not None:
        on_clipped()
    optimizer.step_with_ready_grads()
    if matrices is not None:
        matrices.step(clip_coefficient=_clip_coefficient(norm, optimizer.config.clip_grad))
    return norm


def _clip_coefficient(norm: float, max_norm: float) -> float:
    """As in Megatron Core's `clip_grad_by_total_norm_fp32`."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0.0 else 1.0


@torch.no_grad()
def num_zero_gradients(optimizer: MegatronOptimizer) -> int:
    """Zeros in the gradient of all that Megatron Core's optimizer steps in this phase, the same on every rank.

    A collective between clipping and step. Counted like the norm of a step; matrices that Muon steps or that rest are
    not in this optimizer.
    """
    total = 0
    for each in chained_optimizers(optimizer):
        gradients = _gradients(each, _stepped_main_params(each))
        on_this_rank = sum(gradient.numel() - int(torch.count_nonzero(gradient)) for gradient in gradients)
        count = torch.tensor(on_this_rank, dtype=torch.int64, device=device.current())
        torch.distributed.all_reduce(count, group=each.get_grad_stats_parallel_group())
        total += int(count.item())
    return total


@torch.no_grad()
def block_gradient_norm(optimizer: MegatronOptimizer) -> float:
    """L2 norm of the gradient of the block's own parameters, unscaled and unclipped, the same on every rank.

    A collective over all ranks, for use after a backward pass instead of a step. Like the norm of a step, it counts
    tensor-parallel duplicates and the tied copy once. inf or NaN if the gradient is not finite.
    """
    scaler_state = loss_scaler.get_state(optimizer)
    optimizer.prepare_grads()
    if scaler_state is not None:  # no step follows, so an overflow must not change the loss scale
        loss_scaler.set_state(optimizer, scaler_state)
    sum_of_squares = 0.0
    for each in chained_optimizers(optimizer):
        gradients = _gradients(each, _counted_main_params(each))
        group = each.get_grad_stats_parallel_group()
        sum_of_squares += get_grad_norm_fp32(gradients, grad_stats_parallel_group=group) ** 2
    return math.sqrt(sum_of_squares)


def num_block_parameters(optimizer: MegatronOptimizer) -> int:
    """Number of the block's own parameters over all ranks, counted like `block_gradient_norm`. A collective."""
    total = 0
    for each in chained_optimizers(optimizer):
        on_this_rank = sum(main_param.numel() for main_param in _counted_main_params(each))
        count = torch.tensor(on_this_rank, dtype=torch.int64, device=device.current())
        torch.distributed.all_reduce(count, group=each.get_grad_stats_parallel_group())
        total += int(count.item())
    return total


def _gradients(optimizer: Any, stepped: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that the optimizer will read, of what it steps."""
    is_decoupled = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    gradients = (getattr(tensor, "decoupled_grad" if is_decoupled else "grad", None) for tensor in stepped)
    return [gradient for gradient in gradients if gradient is not None]


def _counted_main_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """Main parameters of the block's own parameters, without those that another rank counts."""
    return _stepped_main_params(optimizer, with_always_active=False)


def _stepped_main_params(optimizer: Any, *, with_always_active: bool = True) -> Iterator[torch.Tensor]:
    """Main parameters that the optimizer steps, without those that another rank counts."""
    for group in [] if optimizer.is_stub_optimizer else optimizer.optimizer.param_groups:
        for main_param in [] if group.get(ALWAYS_ACTIVE) and not with_always_active else group["params"]:
            if param_is_not_shared(main_param) and param_is_not_tensor_parallel_duplicate(
                main_param, getattr(optimizer, "tp_group", None)
            ):
                yield main_param
