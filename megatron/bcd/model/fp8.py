"""Linear products in 8-bit floating point, by PyTorch's scaled products (--fp8-recipe tensorwise).

Inputs, weights and output gradients are rounded right before each product, with one scale a tensor: its largest
magnitude becomes the largest number of the format. Sums are in fp32 and results in bf16. Weights, gradients and
optimizer state are those of bf16, so checkpoints, offloading and parallelism do not see the difference. A tensor of
zeros stays zero, and one that is not finite gives NaN.

Shapes: T tokens, I inputs, O outputs of a layer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from megatron.bcd.config import RunConfig
from megatron.bcd.runtime import packages
from megatron.bcd.runtime.compat import megatron_core
from megatron.bcd.runtime.compat.pytorch import compiled

ALIGNMENT = 16
"""A GPU's scaled product needs multiples of this in both dimensions of its factors."""
_SMALLEST = 1e-30
"""The smallest scale, for tensors of zeros."""
_FORMAT = torch.float8_e4m3fn
"""Format of inputs and weights."""
_GRADIENTS = {"e4m3": torch.float8_e4m3fn, "hybrid": torch.float8_e5m2}
"""Format of output gradients by --fp8-format."""


def use_products(model: torch.nn.Module, config: RunConfig) -> None:
    """Let the linear layers inside the model's transformer layers multiply in FP8.

    Embedding, head, routers, experts and layers whose sizes are no multiples of ALIGNMENT are left as they are.
    """
    settings = (_GRADIENTS[str(config.fp8_products)], packages.compiles(config.bcd.bcd_compile))
    for name, module in model.named_modules():
        shape = getattr(getattr(module, "weight", None), "shape", ())
        is_router = name.endswith((".gate", ".router"))
        if is_router or ".layers." not in name or any(size % ALIGNMENT for size in shape):
            continue
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            megatron_core.set_linear_function(module, functools.partial(_parallel_linear, settings))
        elif isinstance(module, torch.nn.Linear):
            module.forward = functools.partial(_linear, settings, module)  # type: ignore[method-assign]


def _linear(settings: tuple[torch.dtype, bool], module: torch.nn.Linear, input: Tensor) -> Tensor:
    output = _Product.apply(input, module.weight, *settings)
    return output if module.bias is None else output + module.bias


def _parallel_linear(
    settings: tuple[torch.dtype, bool],
    *,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,
    **_others: Any,
) -> Tensor:
    """Return the product of a tensor-parallel slice, with the arguments of Megatron Core's own function."""
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    output = _Product.apply(input, weight, *settings)
    return output if bias is None else output + bias


class _Product(torch.autograd.Function):
    """input [..., I] x weight [O, I]^T. The factors are saved in bf16, as by a product in bf16."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, grad_dtype: torch.dtype, is_compiled: bool) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.run = compiled if is_compiled else lambda function: function
        ctx.scales, ctx.grad_dtype = [ctx.run(_scale)(each, _FORMAT) for each in (input, weight)], grad_dtype
        input_TI, weight_OI = (
            ctx.run(_rounded)(*each, _FORMAT) for each in zip((_rows(input), weight), ctx.scales, strict=True)
        )
        return _multiply(input_TI, weight_OI, input.dtype, is_fast=True).view(*input.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (input, weight), grad_TO, rounded = ctx.saved_tensors, _rows(grads[0]), ctx.run(_rounded)
        scale = ctx.run(_scale)(grad_TO, ctx.grad_dtype)
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            weight_IO = rounded(weight.t(), ctx.scales[1], _FORMAT)
            grad_input = _multiply(rounded(grad_TO, scale, ctx.grad_dtype), weight_IO, input.dtype).view_as(input)
        if ctx.needs_input_grad[1]:
            input_IT = rounded(_rows(input).t(), ctx.scales[0], _FORMAT)
            grad_weight = _multiply(rounded(grad_TO.t(), scale, ctx.grad_dtype), input_IT, weight.dtype)
        return grad_input, grad_weight, None, None


def _rows(tensor: Tensor) -> Tensor:
    """Return [..., N] as [T, N]."""
    return tensor.flatten(0, -2)


def _scale(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the fp32 scale by which a tensor in `dtype` has to be multiplied."""
    return tensor.abs().amax().float().clamp(min=_SMALLEST) / torch.finfo(dtype).max


def _rounded(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a matrix in `dtype`, row by row in memory, and its scale."""
    return (matrix.float() / scale).to(dtype).contiguous(), scale


def _multiply(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype, *, is_fast: bool = False
) -> Tensor:
    """Return left [M, K] x right [N, K]^T. With `is_fast`, usual in forward passes, sums have fewer bits on Hopper."""
    return scaled_mm(
        left[0],
        right[0].t(),
        left[1],
        ScalingType.TensorWise,
        right[1],
        ScalingType.TensorWise,
        output_dtype=dtype,
        use_fast_accum=is_fast,
    )
