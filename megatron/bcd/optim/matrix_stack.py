"""Matrices of one shape, rule and owner, up to `ownership.STACK_ELEMENTS`: they share a gradient buffer, its reduction,
and every product and kernel of their update.

Shapes: K = matrices, M = rows, N = columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.bcd.blocks.ownership import matrix_stacks
from megatron.bcd.optim.matrix_direction import MatrixLayout
from megatron.bcd.runtime import device
from megatron.bcd.runtime.compat import pytorch


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix of a layer, or this rank's tensor-parallel slice of it."""

    name: str
    parameter: torch.nn.Parameter
    owner: int
    """Rank among the replicas."""
    layout: MatrixLayout


class Stack:
    """In one phase; all matrices have the same shape, owner and layout."""

    def __init__(self, matrices: Sequence[Matrix], grad_dtype: torch.dtype) -> None:
        self.matrices = matrices
        self.owner, self.layout = matrices[0].owner, matrices[0].layout
        weight = matrices[0].parameter
        self.gradient = torch.zeros((len(matrices), *weight.shape), dtype=grad_dtype, device=weight.device)
        """[K, M, N]; each matrix' `main_grad` is a slice."""
        self._num_missing = len(matrices)
        self.is_reducing = False
        self._reduction: torch.distributed.Work | None = None

    @property
    def weights(self) -> list[torch.Tensor]:
        return [matrix.parameter.data for matrix in self.matrices]

    def zero_grad(self) -> None:
        self.gradient.zero_()
        self._num_missing, self.is_reducing = len(self.matrices), False

    def count_final(self, group: torch.distributed.ProcessGroup) -> None:
        """One more of the gradients is final; the last one starts the reduction."""
        self._num_missing -= 1
        if self._num_missing == 0:
            self.start_reduction(group)

    def start_reduction(self, group: torch.distributed.ProcessGroup) -> None:
        """Average the gradient over the group, on the owner, unless that has begun in this step. A collective."""
        if group.size() > 1 and not self.is_reducing:
            self.gradient.div_(group.size())
            owner = torch.distributed.get_global_rank(group, self.owner)
            self._reduction = torch.distributed.reduce(self.gradient, dst=owner, group=group, async_op=True)
        self.is_reducing = True

    def finish_reduction(self) -> None:
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None


def stacked(matrices: Sequence[Matrix], grad_dtype: torch.dtype) -> list[Stack]:
    """All matrices of one rule in stacks."""
    shapes = [matrix.parameter.shape for matrix in matrices]
    keys = [(matrix.owner, matrix.layout, shape) for matrix, shape in zip(matrices, shapes, strict=True)]
    stacks = matrix_stacks(keys, [shape.numel() for shape in shapes])
    return [Stack([matrices[index] for index in indices], grad_dtype) for indices in stacks]


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """[K, ...]: a copy, or a view of the only one."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def distribute(values: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write back what `joined` has copied of several tensors."""
    if len(tensors) > 1:
        pytorch.copy_each(tensors, values.unbind())


def sum_of_squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    if not gradients:
        return torch.zeros((), device=device.current())
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.stack(norms).square().sum()
