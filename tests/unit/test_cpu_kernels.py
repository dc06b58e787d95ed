"""What stands in for Megatron Core's functions on a CPU computes the same, bit for bit, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from megatron.bcd.runtime.compat import cpu_kernels

DTYPES = [torch.float32, torch.bfloat16]


def gradients(function: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The output of `function`, and the gradients of those inputs that want one."""
    leaves = [one.detach().clone().requires_grad_(one.requires_grad) for one in inputs]
    output = function(*leaves)
    output.backward(torch.linspace(-1, 2, output.numel()).view_as(output).to(output.dtype))
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.requires_grad)]


def same(mine: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(mine) == len(others) and all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "queries"), [(3, 1), (2, 4)])
def test_rotary(dtype: torch.dtype, groups: int, queries: int) -> None:
    """A half that turns the other way, a gradient that does or that is another part's, or one length's cosines for
    another's."""
    sizes = [queries * 8, 8, 8]

    def megatron(mixed: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        query, key, value = mixed.split(sizes, dim=3)
        query = query.reshape(*query.shape[:2], -1, 8)
        turned = [
            rope_utils._apply_rotary_pos_emb_bshd(x, freqs, rotary_interleaved=False, multi_latent_attention=False)
            for x in (query, key)
        ]
        return torch.cat([*turned, value], dim=2)

    def mine(mixed: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        return torch.cat(cpu_kernels._rotated_qkv(mixed, freqs, freqs, sizes), dim=2)

    for length in (5, 7):
        freqs = torch.randn(length, 1, 1, 8)
        mixed = torch.randn(length, 2, groups, sum(sizes)).to(dtype).requires_grad_()
        for _ in range(2):
            assert same(
                gradients(lambda x, f=freqs: mine(x, f), mixed), gradients(lambda x, f=freqs: megatron(x, f), mixed)
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_swiglu(dtype: torch.dtype, biased: bool) -> None:
    """Gate and up exchanged, a gradient that is not silu's, or another result without a graph."""
    x = torch.randn(3, 2, 10).to(dtype).requires_grad_()
    bias = torch.randn(10).to(dtype).requires_grad_()

    def megatron(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * (up + 0.0)

    inputs = [x, bias] if biased else [x]
    assert same(gradients(lambda *given: cpu_kernels._swiglu(*given, *[None] * (2 - len(given))), *inputs),
                gradients(megatron, *inputs))  # fmt: skip
    before = x.detach().clone()
    with torch.no_grad():
        assert torch.equal(cpu_kernels._swiglu(before, None), megatron(x))
    assert torch.equal(before, x), "its input is still wanted"


@pytest.mark.parametrize("trained", [False, True])
def test_rms_norm(trained: bool) -> None:
    """A term of the gradient that is lost, or rounded in another order than PyTorch's."""
    x, weight = torch.randn(9, 2, 48, requires_grad=True), torch.randn(48, requires_grad=trained)
    build = cpu_kernels._torch_norm(lambda cls, hidden, eps: torch.nn.RMSNorm(hidden, eps=eps))
    norm = build(object, 48, eps=1e-3)

    def mine(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    def pytorchs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (48,), weight, 1e-3)

    assert type(norm) is cpu_kernels.RmsNorm
    assert same(gradients(mine, x, weight), gradients(pytorchs, x, weight))


def test_rms_norm_of_16_bits_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares summed up in 16 bits."""
    monkeypatch.setattr(cpu_kernels, "_RmsNormFunction", None)
    norm = cpu_kernels.RmsNorm(48, eps=1e-3).bfloat16()
    x = torch.randn(9, 48).bfloat16()
    assert torch.equal(norm(x), torch.nn.functional.rms_norm(x, (48,), norm.weight, 1e-3))


def test_other_norms_stay() -> None:
    norm = torch.nn.LayerNorm(4)
    assert type(cpu_kernels._torch_norm(lambda cls: norm)(object)) is torch.nn.LayerNorm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 64, 130])
def test_cross_entropy(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is left out at the end of a part, or a gradient for another label."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy as Megatron

    def megatron(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, top = Megatron.calculate_logits_max(logits.detach().clone())
        *wheres, predicted, total, exponentials = Megatron.calculate_predicted_logits(logits, target, top, 0, 50)
        softmax, loss = Megatron.calculate_cross_entropy_loss(exponentials, predicted, total)
        operands = Megatron.prepare_gradient_calculation_operands(softmax, wheres[0])
        upstream = torch.linspace(-1, 2, loss.numel()).view_as(loss)
        return loss.clone(), Megatron.calculate_gradients(operands[0], operands[1], wheres[1], *operands[2:], upstream)

    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 1)
    cross_entropy = cpu_kernels._cross_entropy(lambda *_: pytest.fail("this is what Megatron Core's is replaced for"))
    logits = (4 * torch.randn(rows, 2, 50)).to(dtype).requires_grad_()
    target = torch.randint(50, (rows, 2))
    # logits are a layer's output, which may be overwritten
    loss, gradient = gradients(lambda one: cross_entropy(one * 1, target), logits)
    expected_loss, expected_gradient = megatron(logits, target)
    assert torch.equal(loss, expected_loss)
    assert torch.equal(gradient, expected_gradient.to(dtype))


def test_cross_entropy_of_another_kind_is_megatron_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's part of the logits taken for all of them, or smoothing forgotten."""
    from megatron.core import parallel_state

    cross_entropy = cpu_kernels._cross_entropy(lambda *_: "Megatron Core's")
    logits, target = torch.randn(3, 2, 5), torch.randint(5, (3, 2))
    for ranks, smoothing in ((2, 0.0), (1, 0.1)):
        monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda ranks=ranks: ranks)
        assert cross_entropy(logits, target, smoothing) == "Megatron Core's"


def in_buffer(weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A weight as Megatron Core's wrapper leaves it at the beginning of an iteration, but for what is in the buffer."""
    weight = weight.detach().clone().requires_grad_()
    weight.main_grad = torch.full_like(weight, float("nan"), dtype=dtype)
    weight.grad_added_to_main_grad = False
    return weight


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_linear_writes_its_gradient_into_the_buffer(dtype: torch.dtype) -> None:
    """What was in the buffer before the iteration counted in, or a microbatch that overwrites the one before."""
    linear = cpu_kernels._linear(lambda *_, **__: "Megatron Core's")
    weight, bias = in_buffer(torch.randn(4, 3).to(dtype)), torch.randn(4).to(dtype).requires_grad_()
    expected = torch.zeros_like(weight)
    for _ in range(3):
        x = torch.randn(5, 2, 3).to(dtype).requires_grad_()
        mine = gradients(lambda x, bias: linear(x, weight, bias, False, False, False), x, bias)
        output, of_x, of_weight, of_bias = gradients(lambda x, w, b: x.matmul(w.t()) + b, x, weight, bias)
        expected += of_weight
        assert same(mine, [output, of_x, of_bias])
        assert weight.grad is not None, "the reduction's hook waits for it"
        assert torch.equal(weight.main_grad, expected)


def test_linear_leaves_gradients_that_are_no_single_product() -> None:
    """A tied weight's two gradients, or a buffer of another precision, overwritten by one product."""
    linear = cpu_kernels._linear(lambda *_, **__: "Megatron Core's")
    tied = in_buffer(torch.randn(4, 3))
    tied.zero_out_wgrad = True
    wider = in_buffer(torch.randn(4, 3).bfloat16(), torch.float32)
    for weight in (tied, wider):
        linear(torch.randn(5, 3, dtype=weight.dtype), weight, None, False, False, False).sum().backward()
        assert weight.grad is not None and weight.grad.abs().sum() > 0
        assert not weight.grad_added_to_main_grad and weight.main_grad.isnan().all()


def test_linear_leaves_out_what_nobody_wants() -> None:
    """Behind a frozen prefix the input's gradient is a fifth of a layer's work, for nothing."""
    weight, bias = torch.randn(4, 3, requires_grad=True), torch.randn(4, requires_grad=True)
    linear = cpu_kernels._linear(lambda *_, **__: "Megatron Core's")
    output = linear(torch.randn(5, 2, 3), weight, bias, False, False, False, tp_group=None)
    wanted = {name for name, _ in _nodes(output.grad_fn) if name.startswith("Mm")}
    assert wanted == {"MmBackward0"}
    product = next(node for name, node in _nodes(output.grad_fn) if name == "MmBackward0")
    assert [following is not None for following, _ in product.next_functions] == [False, True]
    for flags in ((True, False, False), (False, True, False), (False, False, True)):
        assert linear(torch.randn(5, 2, 3), weight, bias, *flags, tp_group=None) == "Megatron Core's"


def _nodes(node: Any) -> list[tuple[str, Any]]:
    found = [(node.name(), node)]
    for following, _ in node.next_functions:
        found += _nodes(following) if following is not None else []
    return found


def test_collectives_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reduction left out where there are others, or one that somebody will wait for."""
    sizes = iter([1, 2, 1, 1, 2])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: next(sizes))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: "reduced")
    reduce = cpu_kernels.DistributedForOneRank("torch.distributed").all_reduce
    buffer = torch.zeros(4)
    assert [reduce(buffer), reduce(buffer)] == [None, "reduced"]
    assert reduce(buffer, async_op=True) == "reduced"
    gather = cpu_kernels._unless_in_place(lambda *_, **__: "gathered")
    found = [gather(buffer, buffer[:4]), gather(buffer, buffer.clone()), gather(buffer, buffer)]
    assert found == [None, "gathered", "gathered"]
