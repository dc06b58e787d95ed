"""Directions of weight updates that need no optimizer state, each a function of one gradient matrix, or of each one
in a stack of them, whole or sliced over tensor-parallel ranks. Plain PyTorch.

Every direction has a root mean square of 1, whatever the size of the gradient. Adam's is 0.2 to 0.4, so a rate of about
0.2 of Adam's suits them (Liu et al., arXiv 2502.16982, section 2.2).

Shapes: M = rows (outputs), N = columns (inputs); MN may stand for KMN, K matrices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

RULES = ("orthogonal", "normalized", "sign")
NEWTON_SCHULZ_STEPS = 5
_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration: steep at 0, singular values end between 0.7 and 1.2 (Jordan et al., Muon, 2024)."""
_SMALLEST = 1e-12
"""Smallest divisor, for gradients of zeros: far below real gradients, whose scale must not matter."""

SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
"""Megatron's --muon-scale-mode: the factor of an orthogonal matrix. `spectral` gives a root mean square of 1."""


@dataclass(frozen=True, kw_only=True)
class MatrixLayout:
    """What a matrix of Megatron Core is made of, and how it is sliced."""

    parts: tuple[int, ...] = ()
    """Rows per query group of queries, keys and values, which are interleaved by group; empty: the matrix is one."""
    sharded_dim: int | None = None
    """Dimension that is sliced over the tensor-parallel ranks; None: it is whole, or each slice counts as a matrix."""
    group: torch.distributed.ProcessGroup | None = None
    """The tensor-parallel group, where the matrix is sliced."""
    gathers: bool = False
    """Every rank gathers the whole matrix (--muon-tp-mode duplicated)."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the group, in place, and return it."""
        torch.distributed.all_reduce(tensor, group=self.group)
        return tensor


_WHOLE = MatrixLayout()


def direction(
    rule: str,
    gradient_MN: torch.Tensor,
    layout: MatrixLayout = _WHOLE,
    *,
    num_steps: int = NEWTON_SCHULZ_STEPS,
    scale_mode: str = "spectral",
) -> torch.Tensor:
    """The direction of `rule`, one of RULES, in the gradient's dtype. A gradient of zeros gives zeros.

    `num_steps` and `scale_mode`, a key of SCALES, are of `orthogonal`. A collective over the layout's group.
    """
    if rule == "sign":
        return gradient_MN.sign()
    if rule == "normalized":
        return normalize_rows(gradient_MN, layout)
    if not layout.parts:
        return orthogonalize(gradient_MN, layout, num_steps=num_steps, scale_mode=scale_mode)
    # queries, keys and values have no common singular vectors to preserve
    by_group = gradient_MN.unflatten(1, (-1, sum(layout.parts)))
    done: list[torch.Tensor] = []
    for _, parts in itertools.groupby(by_group.split(layout.parts, dim=2), key=lambda part: part.shape):
        of_one_shape = torch.stack(list(parts))
        matrices = of_one_shape.flatten(2, 3).flatten(0, 1)
        directions = orthogonalize(matrices, layout, num_steps=num_steps, scale_mode=scale_mode)
        done += directions.view_as(of_one_shape).unbind()
    return torch.cat(done, dim=2).view_as(gradient_MN)


def normalize_rows(gradient_MN: torch.Tensor, layout: MatrixLayout = _WHOLE) -> torch.Tensor:
    """Each row divided by its root mean square (Glentis et al., SCALE, arXiv 2506.16659)."""
    squares_M1 = gradient_MN.float().square().mean(dim=-1, keepdim=True)
    if layout.sharded_dim == 1 and layout.group is not None:
        squares_M1 = layout.all_reduce(squares_M1) / layout.group.size()
    norms_M1 = squares_M1.sqrt().clamp(min=_SMALLEST)
    if gradient_MN.dtype == torch.float16:  # where the smallest divisor is 0
        return (gradient_MN.float() / norms_M1).to(gradient_MN.dtype)
    return gradient_MN / norms_M1.to(gradient_MN.dtype)


def orthogonalize(
    gradient_MN: torch.Tensor,
    layout: MatrixLayout = _WHOLE,
    *,
    num_steps: int = NEWTON_SCHULZ_STEPS,
    scale_mode: str = "spectral",
) -> torch.Tensor:
    """The nearest matrix whose singular values are about 1, times the scale of `scale_mode` (Muon's Newton-Schulz
    iteration; Ma et al., SWAN, arXiv 2412.13148). Where ranks hold slices, this rank's slice of it.

    Computes in bf16 on a GPU and in fp32 on a CPU. About 20 M^2 N operations where M is the smaller dimension.
    """
    dim, group = layout.sharded_dim, layout.group
    rows, columns = gradient_MN.shape[-2:]
    is_transposed = rows > columns
    if dim is not None and group is not None:
        if layout.gathers:
            slices = [torch.empty_like(gradient_MN) for _ in range(group.size())]
            torch.distributed.all_gather(slices, gradient_MN.contiguous(), group=group)
            whole = orthogonalize(torch.cat(slices, dim=1 + dim), num_steps=num_steps, scale_mode=scale_mode)
            return whole.chunk(group.size(), dim=1 + dim)[group.rank()]
        rows, columns = (rows * group.size(), columns) if dim == 0 else (rows, columns * group.size())
        is_transposed = dim == 0
    matrix = gradient_MN.reshape(-1, *gradient_MN.shape[-2:])
    norm = torch.linalg.vector_norm(matrix, dim=(1, 2), keepdim=True, dtype=torch.float32)
    if dim is not None:
        norm = layout.all_reduce(norm.square()).sqrt()
    matrix = (matrix / norm.clamp_(min=_SMALLEST)).to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    if is_transposed:
        matrix = matrix.mT
    a, b, c = _QUINTIC
    for _ in range(num_steps):
        gram = torch.bmm(matrix, matrix.mT)
        if dim is not None:
            gram = layout.all_reduce(gram)
        matrix = torch.baddbmm(matrix, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), matrix, beta=a)
    if is_transposed:
        matrix = matrix.mT
    return matrix.mul_(SCALES[scale_mode](rows, columns)).to(gradient_MN.dtype).view_as(gradient_MN)
