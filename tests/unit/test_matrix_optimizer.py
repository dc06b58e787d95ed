"""Matrices that are stepped without Megatron Core's optimizer, in one process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from megatron.bcd.model.host_layers import LOW_BITS
from megatron.bcd.optim import matrix
from megatron.bcd.optim.matrix import FACTORS, MOMENTS, MOMENTUM_SCALE, MatrixRule
from megatron.bcd.optim.matrix_optimizer import MatrixOptimizer
from megatron.bcd.optim.state import MOMENTUM
from megatron.bcd.optim.update_rules import MatrixLayout


def optimizer_of(names: list[str], parameters: list[Any], **options: Any) -> MatrixOptimizer:
    """Return the optimizer of these parameters on one rank."""
    group = mock.Mock(rank=lambda: 0, size=lambda: 1)
    matrices = {name: (each, MatrixLayout()) for name, each in zip(names, parameters, strict=True)}
    return MatrixOptimizer(matrices, group=group, **options)


RULE = MatrixRule(name="factored", scale=1.0, grad_dtype=torch.float32, num_steps=5)


def test_gradients_of_a_tied_head_add_up() -> None:
    """A tied weight's gradient adds the embedding's part to what the head's fused kernel wrote, and an untied one's
    does not."""
    for is_tied, expected in ((True, 3.0), (False, 2.0)):
        weight: Any = torch.nn.Parameter(torch.ones(3, 2))
        optimizer = optimizer_of(["embedding"], [weight])
        optimizer.begin([(RULE, ["embedding"], False)])
        weight.zero_out_wgrad = is_tied
        weight.main_grad.fill_(2.0)
        weight.grad_added_to_main_grad = True
        weight.sum().backward()
        assert weight.main_grad.eq(expected).all() and weight.grad is None


def test_a_partial_gradient_waits() -> None:
    """A router's gradient is not reduced before its parts on the tensor-parallel ranks are summed."""
    for is_partial in (True, False):
        weight: Any = torch.nn.Parameter(torch.ones(3, 2))
        weight.sequence_parallel = is_partial
        optimizer = optimizer_of(["router"], [weight])
        optimizer.begin([(RULE, ["router"], False)])
        optimizer.start_reductions()
        assert [stack.is_reducing for stack in optimizer.stacks] == [not is_partial]


def test_the_state_of_one_layer_moves() -> None:
    """The state of one layer moves to host memory and back without changing a step."""
    names, moved = ["layers.0", "layers.1"], "layers.1"

    def train(*, moves: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        weights: list[Any] = [torch.nn.Parameter(torch.randn(4, 4, dtype=torch.bfloat16)) for _ in names]
        optimizer = optimizer_of(names, weights)
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


RULES: dict[str, dict[str, Any]] = {
    "factored": {"name": "factored"},
    "orthogonal": {"name": "orthogonal"},
    "muon": {"name": "orthogonal", "momentum": 0.9, "nesterov": True},
    "muon8": {"name": "orthogonal", "momentum": 0.9, "nesterov": True},
    "adam": {
        "name": "adam",
        "adam": {"betas": (0.9, 0.95), "eps": 1e-8, "decoupled_weight_decay": True},
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_experts_in_one_parameter(monkeypatch: pytest.MonkeyPatch, rule: str, dtype: torch.dtype) -> None:
    """A parameter [E, M, N] is stepped as E matrices, bit for bit, also some experts at a time and after its state has
    gone through a checkpoint. A step that is skipped changes neither weights nor state."""
    experts, shape = ["0", "1", "2"], (6, 4)
    monkeypatch.setattr(matrix, "EXPERT_STACK_ELEMENTS", 2 * 6 * 4)

    def train(names: list[str], *, resumes: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        whole = torch.randn(3, *shape).to(dtype)
        parameters: list[Any] = [torch.nn.Parameter(each.clone()) for each in (whole if len(names) > 1 else [whole])]
        kinds = {"factored": [FACTORS], "orthogonal": [], "adam": [MOMENTS]}.get(rule, [MOMENTUM]) + [LOW_BITS]
        groups = {name: {kind: (kind, 0) for kind in kinds} for name in names}
        for step in range(4):
            if step == 0 or (step == 2 and resumes):
                before = None if step == 0 else [*optimizer.state()]  # noqa: F821
                moments_dtype = torch.int8 if rule == "muon8" else torch.float32
                optimizer = optimizer_of(names, parameters, groups=groups, moments_dtype=moments_dtype)
                for state, new in zip(before or [], optimizer.state(), strict=bool(before)):
                    tensors = {name: read().view(new.shapes[name]).clone() for name, read in state.tensors.items()}
                    new.set(tensors, int(state.num_steps))
                optimizer.begin([(MatrixRule(grad_dtype=dtype, scale=0.1, **RULES[rule]), names, True)])
                optimizer.param_groups[0] |= {"lr": 0.1, "weight_decay": 0.1}
            gradient = torch.randn(3, *shape).to(dtype)
            for parameter, each in zip(parameters, gradient if len(names) > 1 else [gradient], strict=True):
                parameter.main_grad.copy_(each)
            for stack in optimizer.stacks:
                stack.is_skipped = torch.tensor(step == 3)
            kept = {name: optimizer.matrices[name].main_param_reader()().clone() for name in names}
            optimizer.step(norm=1.0)
            changed = [not torch.equal(kept[name], optimizer.matrices[name].main_param_reader()()) for name in names]
            assert changed == [step != 3] * len(names)
        result: dict[str, list[torch.Tensor]] = {}
        for state in optimizer.state():
            for name, read in state.tensors.items():
                result.setdefault(name, []).append(read().reshape(-1))
        return {name: torch.cat(tensors) for name, tensors in result.items()}

    wanted = train(experts, resumes=False)
    for resumes in (False, True):
        stepped = train(["experts"], resumes=resumes)
        assert stepped.keys() == wanted.keys() and all(torch.equal(stepped[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("rule", ["factored", "orthogonal"])
def test_experts_in_one_buffer_are_not_copied(rule: str) -> None:
    """Experts that lie in one buffer are stepped there, bit for bit as experts apart, and what is between stays."""
    names = [f"decoder.layers.0.mlp.experts.local_experts.{expert}.linear_fc1.weight" for expert in range(3)]
    buffer = torch.randn(3, 2, 6, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    between = buffer[:, 1].clone()

    def train(values: list[torch.Tensor], *, is_view: bool) -> list[torch.Tensor]:
        parameters: list[Any] = [torch.nn.Parameter(each) for each in values]
        optimizer = optimizer_of(names, parameters)
        optimizer.begin([(MatrixRule(name=rule, grad_dtype=torch.bfloat16), names, False)])
        optimizer.param_groups[0] |= {"lr": 0.1, "weight_decay": 0.1}
        [stack] = optimizer.stacks
        assert (matrix.join(stack.weights).data_ptr() == parameters[0].data_ptr()) == is_view
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            for parameter in parameters:
                parameter.main_grad.copy_(torch.randn(6, 4, generator=generator))
            optimizer.step()
        return [optimizer.matrices[name].main_param_reader()() for name in names]

    apart = train([each.clone() for each in buffer[:, 0]], is_view=False)
    assert all(map(torch.equal, train([*buffer[:, 0]], is_view=True), apart))
    assert torch.equal(buffer[:, 1], between)


def test_experts_that_divide_no_scale_are_refused() -> None:
    """8-bit momenta of experts in host memory need matrices of a multiple of 256 elements."""
    weight: Any = torch.nn.Parameter(torch.ones(2, 6, 4))
    places = {weight: {MOMENTUM_SCALE: torch.zeros(1)}}
    with pytest.raises(ValueError, match=r"^--muon-momentum-dtype int8: experts has experts of 24 elements"):
        optimizer_of(["experts"], [weight], moments_dtype=torch.int8, places=places)
