"""Matrices that are stepped without Megatron Core's optimizer, in one process."""

from __future__ import annotations

from typing import Any

import torch

from megatron.bcd.optim.matrix_optimizer import MatrixOptimizer, MatrixRule
from megatron.bcd.optim.update_rules import MatrixLayout


class OneRank:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def test_gradients_of_a_tied_head_add_up() -> None:
    """The embedding's part of a tied weight's gradient that is lost where the head's product has written its own: a
    fused kernel writes into the buffer, and leaves zeros in the gradient, to which autograd adds the embedding's."""
    rule = MatrixRule(name="factored", scale=1.0, grad_dtype=torch.float32, num_steps=5)
    for is_tied, expected in ((True, 3.0), (False, 2.0)):
        group: Any = OneRank()
        weight: Any = torch.nn.Parameter(torch.ones(3, 2))
        optimizer = MatrixOptimizer({"embedding": (weight, MatrixLayout())}, group=group)
        optimizer.begin([(rule, ["embedding"], False)])
        weight.zero_out_wgrad = is_tied
        weight.main_grad.fill_(2.0)
        weight.grad_added_to_main_grad = True
        weight.sum().backward()
        assert weight.main_grad.eq(expected).all() and weight.grad is None
