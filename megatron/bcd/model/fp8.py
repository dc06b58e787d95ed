"""Linear products in 8-bit floating point, by PyTorch's scaled products (--fp8-recipe tensorwise).

Inputs, weights and output gradients are rounded right before each product, with one scale a tensor: its largest
magnitude becomes the largest number of the format. A weight's scale stays for all microbatches of an iteration, and in
breadth-first order its copies in FP8 stay while its chunk computes. Sums are in fp32 and results in bf16. Weights,
gradients and optimizer state are those of bf16, so checkpoints, offloading and parallelism do not see the difference.
A tensor of zeros stays zero, and one that is not finite gives NaN.

Shapes: T tokens, I inputs, O outputs of a layer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
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


class Weights:
    """The weights that multiply in FP8. It keeps their scales, and their copies in FP8, while weights do not change.

    Args:
        grad_dtype: format of output gradients.
        is_compiled: whether rounding is compiled.
    """

    def __init__(self, grad_dtype: torch.dtype = torch.float8_e5m2, *, is_compiled: bool = False) -> None:
        self.grad_dtype = grad_dtype
        self.run: Callable[[Any], Any] = compiled if is_compiled else lambda function: function
        self._kinds: tuple[str, ...] = ()
        self._kept: dict[tuple[str, str], Tensor] = {}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep scales in this context, in which weights do not change, or `keep_copies` is called when they do."""
        self._keep("scale")
        try:
            yield
        finally:
            self._keep()

    def keep_copies(self) -> None:
        """Forget what is kept, and from now on keep copies, too: one or two bytes for each weight that is used."""
        self._keep("scale", "copy", "transposed")

    def rounded(self, name: str, weight: Tensor, *, is_transposed: bool = False) -> tuple[Tensor, Tensor]:
        """Return a weight [O, I], or its transposed matrix, in FP8, and its scale."""
        scale = self._once("scale", name, lambda: self.run(_scale)(weight, _FORMAT))
        matrix, kind = (weight.t(), "transposed") if is_transposed else (weight, "copy")
        return self._once(kind, name, lambda: self.run(_rounded)(matrix, scale, _FORMAT)), scale

    def _keep(self, *kinds: str) -> None:
        self._kinds = kinds
        self._kept.clear()

    def _once(self, kind: str, name: str, compute: Callable[[], Tensor]) -> Tensor:
        value = self._kept.get((kind, name))
        if value is None:
            value = compute()
            if kind in self._kinds:
                self._kept[kind, name] = value
        return value


def use_products(model: torch.nn.Module, config: RunConfig) -> Weights:
    """Let the linear layers inside the model's transformer layers multiply in FP8, if the run asks for it.

    Embedding, head, routers, grouped experts and layers whose sizes are no multiples of ALIGNMENT are left as they are.
    """
    if not config.fp8_products:
        return Weights()
    weights = Weights(_GRADIENTS[config.fp8_products], is_compiled=packages.compiles(config.bcd.bcd_compile))
    for name, module in model.named_modules():
        shape = getattr(getattr(module, "weight", None), "shape", ())
        is_router = name.endswith((".gate", ".router"))
        if is_router or ".layers." not in name or any(size % ALIGNMENT for size in shape):
            continue
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            megatron_core.set_linear_function(module, functools.partial(_parallel_linear, weights, name))
        elif isinstance(module, torch.nn.Linear):
            module.forward = functools.partial(_linear, weights, name, module)  # type: ignore[method-assign]
    return weights


def _linear(weights: Weights, name: str, module: torch.nn.Linear, input: Tensor) -> Tensor:
    output = _product(weights, name, input, module.weight)
    return output if module.bias is None else output + module.bias


def _parallel_linear(
    weights: Weights,
    name: str,
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
    output = _product(weights, name, input, weight)
    return output if bias is None else output + bias


def _product(weights: Weights, name: str, input: Tensor, weight: Tensor) -> Tensor:
    """Return input [..., I] x weight [O, I]^T. Rows of zeros, which change no scale, fill up the tokens of experts."""
    rows = input.flatten(0, -2)
    if not len(rows):  # an expert without tokens
        return torch.nn.functional.linear(input, weight)
    if missing := -len(rows) % ALIGNMENT:
        output: Tensor = _Product.apply(torch.nn.functional.pad(rows, (0, 0, 0, missing)), weight, weights, name)
        output = output[: len(rows)]
    else:
        output = _Product.apply(rows, weight, weights, name)
    return output.view(*input.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """input [T, I] x weight [O, I]^T. The factors are saved in bf16, as by a product in bf16."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, weights: Weights, name: str) -> Tensor:
        ctx.save_for_backward(input if ctx.needs_input_grad[1] else None, weight)
        ctx.weights, ctx.name, ctx.scale = weights, name, weights.run(_scale)(input, _FORMAT)
        input_TI = weights.run(_rounded)(input, ctx.scale, _FORMAT), ctx.scale
        return _multiply(input_TI, weights.rounded(name, weight), input.dtype, is_fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (input, weight), grad_TO, rounded = ctx.saved_tensors, grads[0], ctx.weights.run(_rounded)
        dtype = ctx.weights.grad_dtype
        scale = ctx.weights.run(_scale)(grad_TO, dtype)
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            weight_IO = ctx.weights.rounded(ctx.name, weight, is_transposed=True)
            grad_input = _multiply((rounded(grad_TO, scale, dtype), scale), weight_IO, weight.dtype)
        if ctx.needs_input_grad[1]:
            input_IT = rounded(input.t(), ctx.scale, _FORMAT), ctx.scale
            grad_weight = _multiply((rounded(grad_TO.t(), scale, dtype), scale), input_IT, weight.dtype)
        return grad_input, grad_weight, None, None


def _scale(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the fp32 scale by which a tensor in `dtype` has to be multiplied."""
    return tensor.abs().amax().float().clamp(min=_SMALLEST) / torch.finfo(dtype).max


def _rounded(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix in `dtype`, row by row in memory."""
    return matrix.float().div_(scale).to(dtype).contiguous()


def _multiply(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype, *, is_fast: bool = False
) -> Tensor:
    """Return left [M, K] x right [N, K]^T, each with its scale.

    With `is_fast`, usual in forward passes, sums have fewer bits on Hopper.
    """
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
