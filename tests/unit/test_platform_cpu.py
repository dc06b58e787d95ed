"""PyTorch's fused Adam, and freed memory that is returned to the system when a phase ends."""

from __future__ import annotations

import ctypes

import psutil
import pytest
import torch

from megatron.bcd.runtime.compat import cpu, megatron_core

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


def adam(optimizer: type[torch.optim.Optimizer], *, fused: bool, cuts: list[int]) -> torch.Tensor:
    """Return the weights after ten steps on the same gradients, stored in parts that end at `cuts`."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(cuts[-1], generator=generator)
    bounds = list(zip([0, *cuts], cuts, strict=False))
    weights = [start[begin:end].clone().requires_grad_() for begin, end in bounds]
    adam_step = optimizer(weights, lr=1e-2, weight_decay=0.1)
    if fused:
        megatron_core.take_fused_adam(adam_step)
    for _ in range(10):
        gradient = torch.randn(cuts[-1], generator=generator)
        for weight, (begin, end) in zip(weights, bounds, strict=True):
            weight.grad = gradient[begin:end].clone()
        adam_step.step()
    return torch.cat([weight.detach() for weight in weights])


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam])
def test_fused_adam(optimizer: type[torch.optim.Optimizer]) -> None:
    """The fused Adam takes PyTorch's steps within 1e-6, and the same ones however the weights are divided."""
    plain, fused = (adam(optimizer, fused=fused, cuts=[10_007]) for fused in (False, True))
    assert not torch.equal(plain, fused), "it is not in use"
    assert torch.allclose(plain, fused, rtol=0, atol=1e-6)
    assert torch.equal(fused, adam(optimizer, fused=True, cuts=[3, 17, 5_001, 10_007]))


def test_freed_memory_is_returned() -> None:
    """Freed memory is returned to the system."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("the C library here is not glibc")
    blocks = [torch.ones(16 * 2**10) for _ in range(1_000)]  # of 64 KiB, on the heap
    last, before = blocks[-1], psutil.Process().memory_info().rss  # behind the others: the heap can't shrink by itself
    del blocks
    cpu.return_freed_memory()
    assert before - psutil.Process().memory_info().rss > 0.8 * 999 * last.nbytes
