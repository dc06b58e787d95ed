"""Compute directions of weight updates that need no optimizer state or, as `factored_scales`, almost none.

A direction is a function of one gradient matrix, or of each matrix in a stack. Matrices may be sliced over
tensor-parallel ranks. A direction without state has a root mean square of 1, whatever the size of the gradient. Adam's
is 0.2 to 0.4, so a learning rate of about 0.2 of Adam's suits these directions (Liu et al., arXiv 2502.16982, section
2.2).

Shapes: M = rows (outputs), N = columns (inputs); MN also stands for KMN, K matrices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.bcd.runtime.compat.pytorch import compiled

ORTHOGONAL, FACTORED, ADAM = "orthogonal", "factored", "adam"
FACTORED_DECAY = 0.99
"""Decay of the second moments of `factored_scales`; 0.95 trained equally well."""
ROWS_ELEMENTS = 1 << 26
"""Number of elements above which a factored update runs some rows at a time: only word embeddings and heads have more.
Their fp32 values would not fit beside the layers' buffers on a small card."""
NEWTON_SCHULZ_STEPS = 5
_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration: steep at 0. Singular values end between 0.7 and 1.2 (Jordan et al., Muon, 2024)."""
GRAM_RATIO = 2
"""Ratio of a matrix's sides from which --muon-gram-iteration uses the Gram matrix. Above 1.5 it takes less."""
GRAM_STEPS = 3
"""Maximum number of steps before the Gram matrix is computed anew, because its rounding errors grow in each."""
_SMALLEST, _SMALLEST_SQUARE = 1e-12, 1e-24
"""Smallest divisors, for gradients of zeros. They are far below real gradients, whose scale must not matter."""


@dataclass(frozen=True, kw_only=True)
class MatrixLayout:
    """The parts of a matrix of Megatron Core, and how it is sliced."""

    parts: tuple[int, ...] = ()
    """Rows of queries, keys and values in each query group, which are interleaved; empty if the matrix is one part."""
    sharded_dim: int | None = None
    """Dimension that is sliced over the tensor-parallel ranks; None if every rank has the whole matrix."""
    group: torch.distributed.ProcessGroup | None = None
    """The tensor-parallel group, if the matrix is sliced."""
    tensor_mode: str = "distributed"
    """--muon-tp-mode, how a slice is orthogonalised. `blockwise` treats the slice as a whole matrix, `distributed`
    reduces the products."""
    is_gram_iterated: bool = False
    """--muon-gram-iteration, whether wide and tall matrices are orthogonalised by steps of their Gram matrix."""

    @property
    def num_slices(self) -> int:
        """Number of ranks with a slice of the matrix."""
        return 1 if self.group is None else self.group.size()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the group, in place, and return it."""
        torch.distributed.all_reduce(tensor, group=self.group)
        return tensor


_WHOLE = MatrixLayout()


def orthogonal(
    gradient_MN: torch.Tensor,
    layout: MatrixLayout = _WHOLE,
    *,
    num_steps: int = NEWTON_SCHULZ_STEPS,
    is_compiled: bool = False,
) -> torch.Tensor:
    """Orthogonalize each part of the layout. A gradient of zeros gives zeros.

    The result has the gradient's dtype, or with `is_compiled` that of the products. A collective over the layout's
    group.
    """
    if layout.tensor_mode == "blockwise":
        layout = replace(layout, sharded_dim=None, group=None)
    if not layout.parts:
        return orthogonalize(gradient_MN, layout, num_steps=num_steps, is_compiled=is_compiled)
    # queries, keys and values have no common singular vectors to preserve
    by_group = gradient_MN.unflatten(1, (-1, sum(layout.parts)))
    results: list[torch.Tensor] = []
    for _, parts in itertools.groupby(by_group.split(layout.parts, dim=2), key=lambda part: part.shape):
        stacked = torch.stack(list(parts))
        matrices = stacked.flatten(2, 3).flatten(0, 1)
        directions = orthogonalize(matrices, layout, num_steps=num_steps, is_compiled=is_compiled)
        results += directions.view_as(stacked).unbind()
    return torch.cat(results, dim=2).view_as(gradient_MN)


def orthogonalize(
    gradient_MN: torch.Tensor,
    layout: MatrixLayout = _WHOLE,
    *,
    num_steps: int = NEWTON_SCHULZ_STEPS,
    is_compiled: bool = False,
) -> torch.Tensor:
    """Return the nearest matrix whose singular values are about 1, scaled to a root mean square of 1.

    Uses Muon's Newton-Schulz iteration (Ma et al., SWAN, arXiv 2412.13148). If the matrix is sliced, returns this
    rank's slice. Computes in bf16 on a GPU and in fp32 on a CPU. Takes 20 M^2 N + 10 M^3 operations if M is the smaller
    dimension; through the Gram matrix 8 M^2 N + 28 M^3, on a GPU in fp16, which rounds less than bf16.
    """
    dim, group = layout.sharded_dim, layout.group
    rows, columns = gradient_MN.shape[-2:]
    is_transposed = rows > columns
    if dim is not None and group is not None:
        rows, columns = (rows * group.size(), columns) if dim == 0 else (rows, columns * group.size())
        is_transposed = dim == 0
    matrix = gradient_MN.reshape(-1, *gradient_MN.shape[-2:])
    norm = torch.linalg.vector_norm(matrix, dim=(1, 2), keepdim=True, dtype=torch.float32)
    if dim is not None:
        norm = layout.all_reduce(norm.square()).sqrt()
    short, long = (columns, rows) if is_transposed else (rows, columns)  # a slice may have them swapped
    uses_gram = layout.is_gram_iterated and long >= GRAM_RATIO * short
    dtype = (torch.float16 if uses_gram else torch.bfloat16) if matrix.is_cuda else torch.float32
    matrix = torch.div(matrix, norm.clamp_(min=_SMALLEST), out=torch.empty_like(matrix, dtype=dtype))
    if is_transposed:
        matrix = matrix.mT
    a, b, c = _QUINTIC
    while num_steps > 0:
        at_once = min(GRAM_STEPS, num_steps) if uses_gram else 1
        num_steps -= at_once
        gram = torch.bmm(matrix, matrix.mT)
        if dim is not None:
            gram = layout.all_reduce(gram)
        if uses_gram:
            matrix = torch.bmm(_product_of_steps(gram, at_once), matrix)
        else:
            matrix = torch.baddbmm(matrix, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), matrix, beta=a)
    if is_transposed:
        matrix = matrix.mT
    matrix = matrix.mul_(math.sqrt(max(rows, columns))).view_as(gradient_MN)
    return matrix if is_compiled else matrix.to(gradient_MN.dtype)


def _product_of_steps(gram_KMM: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Return the matrices [K, M, M] that multiply as much as `num_steps` Newton-Schulz steps, given X X^T.

    All are polynomials of X X^T, so they commute.
    """
    a, b, c = _QUINTIC
    product = None
    for step in range(num_steps):
        factor = torch.baddbmm(gram_KMM, gram_KMM, gram_KMM, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        product = factor if product is None else torch.bmm(factor, product)
        if step + 1 < num_steps:
            gram_KMM = torch.bmm(torch.bmm(factor, gram_KMM), factor)
    assert product is not None
    return product


def num_factors(rows: int, columns: int, num_parts: int = 1) -> int:
    """Return the number of elements in the second moments of a matrix with `num_parts` parts."""
    return rows + num_parts * columns + 1


def split_factors(
    factors: torch.Tensor, rows: int, num_parts: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of [..., F]: row means [..., M], column means by part [..., P, N], number of steps [..., 1]."""
    return factors[..., :rows], factors[..., rows:-1].unflatten(-1, (num_parts, -1)), factors[..., -1:]


def rows_at_once(gradient_KMN: torch.Tensor, layout: MatrixLayout = _WHOLE) -> Sequence[slice]:
    """Return the rows that a factored update computes at a time: all, or `ROWS_ELEMENTS` elements."""
    num_matrices, num_rows, num_columns = gradient_KMN.shape
    if len(layout.parts) > 1 or num_matrices * num_rows * num_columns <= ROWS_ELEMENTS:
        return [slice(0, num_rows)]
    at_once = max(1, ROWS_ELEMENTS // (num_matrices * num_columns))
    return [slice(start, min(start + at_once, num_rows)) for start in range(0, num_rows, at_once)]


def factored_scales(
    gradient_KMN: torch.Tensor,
    factors_KF: torch.Tensor,
    layout: MatrixLayout = _WHOLE,
    *,
    gradient_scale: float = 1.0,
    is_skipped: torch.Tensor | None = None,
    is_compiled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales of rows, [K, M], and of columns by part, [K, P, N]: times the gradient, they are its directions.

    The directions are those of Adafactor without momentum. Sources: Shazeer and Stern, arXiv 1804.04235; Lv et al.,
    AdaLomo, arXiv 2310.10195. The second moment of an element is its row's mean square times its column's mean square,
    divided by the mean of the matrix. These are running means with bias correction. A direction has a root mean square
    of at most 1, and is zero where the gradient is zero.

    The running means are in `factors_KF`, F = `num_factors`, which start as zeros and are updated. `gradient_scale`
    multiplies the gradients first. Where `is_skipped`, a boolean on the device, is true, the means stay; the number of
    steps counts on, so it stays the same for all matrices of a checkpoint's group.

    Compiled, no fp32 value of the matrix is in memory, otherwise those of `rows_at_once`. A collective over the
    layout's group.
    """
    run: Callable[..., Any] = compiled if is_compiled else lambda function: function
    sizes = layout.parts or (gradient_KMN.shape[1],)
    rows = [slice(None)] if is_compiled else rows_at_once(gradient_KMN, layout)
    if not is_compiled and len(rows) == 1 and not gradient_KMN.is_cuda:
        gradient_KMN = gradient_KMN.float()  # a CPU's kernels would convert it each time
    row_squares_KM, column_squares_KPN = run(_squares)(gradient_KMN, sizes)
    num_slices = [1, 1]
    if layout.sharded_dim is not None:  # means over the sliced dimension need the other ranks
        num_slices[layout.sharded_dim] = layout.num_slices
        layout.all_reduce(column_squares_KPN if layout.sharded_dim == 0 else row_squares_KM)
    # compiled code would be made anew for each scale
    row_scales_KM, column_scales_KPN = (run(_scales) if gradient_scale == 1.0 else _scales)(
        factors_KF, row_squares_KM, column_squares_KPN, is_skipped, sizes, layout.sharded_dim, (*num_slices,),
        gradient_scale,
    )  # fmt: skip
    squares_KP = run(_direction_squares)(gradient_KMN, row_scales_KM, column_scales_KPN, sizes, rows)
    if layout.sharded_dim is not None:
        layout.all_reduce(squares_KP).div_(layout.num_slices)
    limit = compiled(_limit, has_dynamic_shapes=True) if is_compiled else _limit
    limit(column_scales_KPN, squares_KP)
    return row_scales_KM, column_scales_KPN


def _squares(gradient_KMN: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of squares of rows, [K, M], and the mean squares of columns by part, [K, P, N]."""
    row_squares = torch.linalg.vector_norm(gradient_KMN, dim=2, dtype=torch.float32).square_()
    return row_squares, _column_norms(_parts(gradient_KMN, sizes)).square_()


def _scales(
    factors_KF: torch.Tensor,
    row_squares_KM: torch.Tensor,
    column_squares_KPN: torch.Tensor,
    is_skipped: torch.Tensor | None,
    sizes: Sequence[int],
    sharded_dim: int | None,
    num_slices: Sequence[int],
    gradient_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Update the means and return the inverse roots of second moments: of rows, [K, M], and columns, [K, P, N]."""
    rows_KM, columns_KPN, steps_K1 = split_factors(factors_KF, row_squares_KM.shape[1], len(sizes))
    before = None if is_skipped is None else factors_KF[:, :-1].clone()
    new = (1 - FACTORED_DECAY) * gradient_scale**2
    factors_KF[:, :-1].mul_(FACTORED_DECAY)
    rows_KM.add_(row_squares_KM, alpha=new / (columns_KPN.shape[2] * num_slices[1]))
    columns_KPN.add_(column_squares_KPN, alpha=new / num_slices[0])
    steps_K1.add_(1)
    correction_K1 = torch.expm1(steps_K1 * math.log(FACTORED_DECAY)).mul_(-(gradient_scale**2))  # 1 - decay^steps
    # the mean of a matrix is the mean of its row means, and also of its column means; a rank has all of one kind
    mean_KP = rows_KM.mean(1, keepdim=True) if sharded_dim == 1 else columns_KPN.mean(2)
    if len(sizes) > 1:
        by_part = zip(mean_KP.unbind(1), sizes, strict=True)
        mean_KP = torch.cat([mean[:, None].expand(-1, size) for mean, size in by_part], dim=1)
    relative = rows_KM.unflatten(1, (-1, sum(sizes))) / mean_KP.clamp(min=_SMALLEST_SQUARE)[:, None]
    row_scales_KM = relative.clamp_(min=_SMALLEST_SQUARE).rsqrt_().flatten(1)
    column_scales_KPN = (columns_KPN / correction_K1[..., None]).clamp_(min=_SMALLEST_SQUARE).rsqrt_()
    if is_skipped is not None:
        factors_KF[:, :-1].copy_(torch.where(is_skipped, before, factors_KF[:, :-1]))
    return row_scales_KM, column_scales_KPN


def _direction_squares(
    gradient_KMN: torch.Tensor,
    row_scales_KM: torch.Tensor,
    column_scales_KPN: torch.Tensor,
    sizes: Sequence[int],
    rows: Sequence[slice],
) -> torch.Tensor:
    """Return the mean squares of the directions by part, [K, P], computing some `rows` at a time."""
    if len(rows) == 1:
        norms_KPN = _column_norms(_parts(gradient_KMN * row_scales_KM[..., None], sizes))
    else:
        scaled = (gradient_KMN[:, some] * row_scales_KM[:, some, None] for some in rows)
        squares_KN = sum(torch.linalg.vector_norm(values, dim=1).square_() for values in scaled)
        norms_KPN = (squares_KN / gradient_KMN.shape[1]).sqrt_()[:, None]
    return (norms_KPN * column_scales_KPN).square_().mean(2)


def _limit(column_scales_KPN: torch.Tensor, squares_KP: torch.Tensor) -> None:
    """Scale directions down to a root mean square of 1, in place."""
    column_scales_KPN.div_(squares_KP.sqrt().clamp_(min=1.0)[..., None])


def subtract_rows(
    value_KMN: torch.Tensor,
    rows: slice,
    gradient_KMN: torch.Tensor,
    row_scales_KM: torch.Tensor,
    column_scales_KPN: torch.Tensor,
    sizes: Sequence[int],
    *,
    rate: float,
) -> None:
    """Subtract `rate` x the directions of some rows from the fp32 values of these rows."""
    scaled = gradient_KMN[:, rows] * row_scales_KM[:, rows, None]
    sizes = sizes if len(sizes) > 1 else (scaled.shape[1],)
    parts = zip(_parts(value_KMN, sizes), _parts(scaled, sizes), column_scales_KPN.unbind(1), strict=True)
    for value, part, scale_KN in parts:
        value.addcmul_(part, scale_KN[:, None, None], value=-rate)


def subtract_directions(
    weight_KMN: torch.Tensor,
    low_bits_KMN: torch.Tensor | None,
    gradient_KMN: torch.Tensor,
    row_scales_KM: torch.Tensor,
    column_scales_KPN: torch.Tensor,
    is_skipped: torch.Tensor | None,
    rate: torch.Tensor,
    decay: torch.Tensor,
    sizes: Sequence[int],
) -> None:
    """Multiply the weights by `decay` and subtract `rate` x the directions, unless `is_skipped`. To be compiled.

    `rate` and `decay` are fp32 scalars: code for Python numbers would be compiled anew for each.
    """
    place_M = torch.arange(gradient_KMN.shape[1], device=gradient_KMN.device) % sum(sizes)
    part_M = sum((place_M >= end).long() for end in itertools.accumulate(sizes[:-1]))  # 0 without parts
    column_scales = column_scales_KPN[:, part_M] if len(sizes) > 1 else column_scales_KPN
    direction = gradient_KMN * row_scales_KM[..., None] * column_scales
    subtract(weight_KMN, low_bits_KMN, direction, is_skipped, rate, decay)


def subtract(
    weight: torch.Tensor,
    low_bits: torch.Tensor | None,
    direction: torch.Tensor,
    is_skipped: torch.Tensor | None,
    rate: torch.Tensor,
    decay: torch.Tensor,
) -> None:
    """Multiply the weights by `decay` and subtract `rate` x `direction`, unless `is_skipped`. To be compiled."""
    before = weight
    if low_bits is not None:  # as `bf16.join` and `split`, whose 16-bit views the compiler could not fuse
        before = ((weight.view(torch.int16).to(torch.int32) << 16) + low_bits).view(torch.float32)
    value = before * decay - rate * direction.float()
    if is_skipped is not None:
        value = torch.where(is_skipped, before, value)
    if low_bits is None:
        weight.copy_(value)
    else:
        bits = value.view(torch.int32)
        low = bits.to(torch.int16)  # wraps around
        weight.view(torch.int16).copy_((bits - low) >> 16)
        low_bits.copy_(low)


def _parts(matrix_KMN: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    """Return views [K, groups, rows of a group, N] of each part."""
    return matrix_KMN.unflatten(1, (-1, sum(sizes))).split(list(sizes), dim=2)


def _column_norms(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the root mean squares of the columns of each part, [K, P, N], in fp32."""
    norms = [torch.linalg.vector_norm(part, dim=(1, 2), dtype=torch.float32) for part in parts]
    sizes = [math.prod(part.shape[1:3]) for part in parts]
    return torch.stack([norm.mul_(size**-0.5) for norm, size in zip(norms, sizes, strict=True)], dim=1)
