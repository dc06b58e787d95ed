"""What stands in for Megatron Core's functions on a CPU computes the same, bit for bit, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.bcd.platform import lean

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
def test_rotary(dtype: torch.dtype) -> None:
    """A half that turns the other way, a gradient that does, or one length's cosines for another's."""

    def megatron(t: torch.Tensor, freqs: torch.Tensor, **_: Any) -> torch.Tensor:
        low, high = t.chunk(2, dim=-1)
        return t * freqs.cos().to(t.dtype) + torch.cat((-high, low), dim=-1) * freqs.sin().to(t.dtype)

    rotate = lean._rotary(lambda *_, **__: pytest.fail("this is what Megatron Core's is replaced for"))
    for length in (5, 7):
        freqs = torch.randn(length, 1, 1, 8)
        x = torch.randn(length, 2, 3, 8).to(dtype).requires_grad_()
        for _ in range(2):
            assert same(gradients(lambda t, f=freqs: rotate(t, f), x), gradients(lambda t, f=freqs: megatron(t, f), x))


def test_rotary_of_another_kind_is_megatron_cores() -> None:
    """Interleaved or scaled rotation, or one of a part of the head, computed as if it were the plain one."""
    x, freqs = torch.randn(3, 1, 1, 8), torch.randn(3, 1, 1, 8)
    rotate = lean._rotary(lambda *_, **__: "Megatron Core's")
    assert torch.is_tensor(rotate(x, freqs, rotary_interleaved=False, multi_latent_attention=False, mscale=1.0))
    others = [{"rotary_interleaved": True}, {"multi_latent_attention": True}, {"mscale": 2.0}]
    assert [rotate(x, freqs, **other) for other in others] == ["Megatron Core's"] * 3
    assert rotate(x, freqs[..., :4]) == "Megatron Core's"


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
    assert same(gradients(lambda *given: lean._swiglu(*given, *[None] * (2 - len(given))), *inputs),
                gradients(megatron, *inputs))  # fmt: skip
    before = x.detach().clone()
    with torch.no_grad():
        assert torch.equal(lean._swiglu(before, None), megatron(x))
    assert torch.equal(before, x), "its input is still wanted"


def test_linear_leaves_out_what_nobody_wants() -> None:
    """Behind a frozen prefix the input's gradient is a fifth of a layer's work, for nothing."""
    weight, bias = torch.randn(4, 3, requires_grad=True), torch.randn(4, requires_grad=True)
    linear = lean._linear(lambda *_, **__: "Megatron Core's")
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
    reduce = lean.DistributedForOneRank("torch.distributed").all_reduce
    buffer = torch.zeros(4)
    assert [reduce(buffer), reduce(buffer)] == [None, "reduced"]
    assert reduce(buffer, async_op=True) == "reduced"
    gather = lean._unless_in_place(lambda *_, **__: "gathered")
    found = [gather(buffer, buffer[:4]), gather(buffer, buffer.clone()), gather(buffer, buffer)]
    assert found == [None, "gathered", "gathered"]
