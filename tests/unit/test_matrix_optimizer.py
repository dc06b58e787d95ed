"""Matrices that are stepped without Megatron Core's optimizer, in one process."""

from __future__ import annotations

from typing import Any

import torch

from megatron.bcd.model.host_layers import LOW_BITS
from megatron.bcd.optim.matrix import MatrixRule
from megatron.bcd.optim.matrix_optimizer import MatrixOptimizer
from megatron.bcd.optim.state import MOMENTUM
from megatron.bcd.optim.update_rules import MatrixLayout


class OneRank:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def test_gradients_of_a_tied_head_add_up() -> None:
    """A tied weight's gradient adds the embedding's part to what the head's fused kernel wrote, and an untied one's
    does not."""
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


def test_a_partial_gradient_waits() -> None:
    """A router's gradient is not reduced before its parts on the tensor-parallel ranks are summed."""
    rule = MatrixRule(name="factored", scale=1.0, grad_dtype=torch.float32, num_steps=5)
    for is_partial in (True, False):
        group: Any = OneRank()
        weight: Any = torch.nn.Parameter(torch.ones(3, 2))
        weight.sequence_parallel = is_partial
        optimizer = MatrixOptimizer({"router": (weight, MatrixLayout())}, group=group)
        optimizer.begin([(rule, ["router"], False)])
        optimizer.start_reductions()
        assert [stack.is_reducing for stack in optimizer.stacks] == [not is_partial]


def test_the_state_of_one_layer_moves() -> None:
    """The state of one layer moves to host memory and back without changing a step."""
    names, moved = ["layers.0", "layers.1"], "layers.1"

    def train(*, moves: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        group: Any = OneRank()
        weights: list[Any] = [torch.nn.Parameter(torch.randn(4, 4, dtype=torch.bfloat16)) for _ in names]
        matrices = {name: (weight, MatrixLayout()) for name, weight in zip(names, weights, strict=True)}
        optimizer = MatrixOptimizer(matrices, group=group)
        rule = MatrixRule(name="orthogonal", scale=0.1, grad_dtype=torch.float32, num_steps=5, momentum=0.9)
        optimizer.begin([(rule, names, True)])
        optimizer.param_groups[0]["lr"] = 0.1
        for _ in range(3):
            for weight in weights:
                weight.main_grad.copy_(torch.randn(4, 4))
            if moves:
                optimizer.matrices[moved].offload([MOMENTUM, LOW_BITS])
                assert not optimizer.matrices[moved].state and len(list(optimizer.state_tensors(on_host=False))) == 2
                moved_bytes = sum(tensor.nbytes for tensor in optimizer.state_tensors(on_host=True))
                assert moved_bytes == 16 * (4 + 2), "momentum and low bits"
                optimizer.matrices[moved].begin(rule, is_streamed=False)
                assert not list(optimizer.state_tensors(on_host=True))
            optimizer.step()
        return [optimizer.matrices[name].main_param_reader()() for name in names]

    for stayed, returned in zip(train(moves=False), train(moves=True), strict=True):
        assert torch.equal(stayed, returned)
