"""Directions of weight updates that need no optimizer state, each a function of one gradient matrix, or of each one
in a stack of them. Plain PyTorch.

Every direction has a root mean square of 1, whatever the size of the gradient. Adam's is 0.2 to 0.4, so a rate of about
0.2 of Adam's suits them (Liu et al., arXiv 2502.16982, section 2.2).

Shapes: M = rows (outputs), N = columns (inputs); MN may stand for KMN, K matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

RULES = ("orthogonal", "normalized", "sign")
NEWTON_SCHULZ_STEPS = 5
_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration: steep at 0, singular values end between 0.7 and 1.2 (Jordan et al., Muon, 2024)."""
_SMALLEST = 1e-12
"""Smallest divisor, for gradients of zeros: far below real gradients, whose scale must not matter."""

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over the ranks that share a matrix, in place, and returns it."""


def direction(rule: str, gradient_MN: torch.Tensor) -> torch.Tensor:
    """The direction of `rule`, one of RULES, in the gradient's dtype. A gradient of zeros gives zeros."""
    if rule == "orthogonal":
        return orthogonalize(gradient_MN)
    if rule == "normalized":
        return normalize_rows(gradient_MN)
    return gradient_MN.sign()


def normalize_rows(
    gradient_MN: torch.Tensor, *, num_slices: int = 1, all_reduce: AllReduce | None = None
) -> torch.Tensor:
    """Each row divided by its root mean square (Glentis et al., SCALE, arXiv 2506.16659).

    If ranks hold slices of the columns, `num_slices` is their number and `all_reduce` sums over them.
    """
    squares_M1 = gradient_MN.float().square().mean(dim=-1, keepdim=True)
    norms_M1 = ((all_reduce or _nothing)(squares_M1) / num_slices).sqrt()
    norms_M1 = norms_M1.clamp(min=_SMALLEST)
    if gradient_MN.dtype == torch.float16:  # where the smallest divisor is 0
        return (gradient_MN.float() / norms_M1).to(gradient_MN.dtype)
    return gradient_MN / norms_M1.to(gradient_MN.dtype)


def orthogonalize(
    gradient_MN: torch.Tensor,
    *,
    num_steps: int = NEWTON_SCHULZ_STEPS,
    scale: float | None = None,
    sharded_dim: int | None = None,
    all_reduce: AllReduce | None = None,
) -> torch.Tensor:
    """The nearest matrix whose singular values are about 1, times `scale`, default the square root of the larger
    dimension: then the root mean square is about 1 (Muon's Newton-Schulz iteration; Ma et al., SWAN, arXiv 2412.13148).

    Computes in bf16 on a GPU and in fp32 on a CPU. About 20 M^2 N operations where M is the smaller dimension.

    If ranks hold slices of the matrix, `sharded_dim` is the dimension along which it is sliced, `all_reduce` sums over
    these ranks, and the result is this rank's slice; `scale` must then be given.
    """
    matrix = gradient_MN.reshape(-1, *gradient_MN.shape[-2:])
    is_transposed = matrix.shape[1] > matrix.shape[2] if sharded_dim is None else sharded_dim == 0
    norm = torch.linalg.vector_norm(matrix, dim=(1, 2), keepdim=True, dtype=torch.float32)
    if all_reduce is not None:
        norm = all_reduce(norm.square()).sqrt()
    matrix = (matrix / norm.clamp_(min=_SMALLEST)).to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    if is_transposed:
        matrix = matrix.mT
    reduced = all_reduce or _nothing
    a, b, c = _QUINTIC
    for _ in range(num_steps):
        gram = reduced(torch.bmm(matrix, matrix.mT))
        matrix = torch.baddbmm(matrix, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), matrix, beta=a)
    if is_transposed:
        matrix = matrix.mT
    if scale is None:
        scale = math.sqrt(max(gradient_MN.shape[-2:]))
    return matrix.mul_(scale).to(gradient_MN.dtype).view_as(gradient_MN)


def _nothing(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
