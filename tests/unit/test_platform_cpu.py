"""What makes PyTorch quick on a CPU: its fused Adam, and freed memory that stays until a phase ends."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from megatron.bcd.runtime.compat import cpu, fused_adam

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


def adam(optimizer: type[torch.optim.Optimizer], *, fused: bool, cuts: list[int]) -> torch.Tensor:
    """Weights after ten steps on the same gradients, held in parts that end at `cuts`."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(cuts[-1], generator=generator)
    bounds = list(zip([0, *cuts], cuts, strict=False))
    weights = [start[begin:end].clone().requires_grad_() for begin, end in bounds]
    one = optimizer(weights, lr=1e-2, weight_decay=0.1)
    if fused:
        fused_adam.take_fused_adam(one)
    for _ in range(10):
        gradient = torch.randn(cuts[-1], generator=generator)
        for weight, (begin, end) in zip(weights, bounds, strict=True):
            weight.grad = gradient[begin:end].clone()
        one.step()
    return torch.cat([weight.detach() for weight in weights])


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam])
def test_fused_adam(optimizer: type[torch.optim.Optimizer]) -> None:
    """Another update; or one that depends on how ranks share the weights, so that a run on other ranks differs."""
    plain, fused = (adam(optimizer, fused=fused, cuts=[10_007]) for fused in (False, True))
    assert not torch.equal(plain, fused), "it is not in use"
    assert torch.allclose(plain, fused, rtol=0, atol=1e-6)
    assert torch.equal(fused, adam(optimizer, fused=True, cuts=[3, 17, 5_001, 10_007]))


def test_other_optimizers_stay() -> None:
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9)
    for optimizer in (sgd, None):
        fused_adam.take_fused_adam(optimizer)
    assert not sgd.param_groups[0]["fused"]


PAGE_FAULTS = """
import resource, sys, torch
from megatron.bcd.runtime.compat import cpu

def step():
    'As in training: tensors that are all alive at its end.'
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    alive = [torch.ones(2 * 2**20) for _ in range(20)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "kept":
    cpu.keep_freed_memory()
step()
later = step()
cpu.return_freed_memory()
print(later, step(), 20 * 8 * 2**20 // resource.getpagesize(), cpu._glibc() is not None)
"""


def test_freed_memory_is_there_for_the_next_step(repo_root: Path) -> None:
    """Fresh pages in every step; or memory that a phase is done with counted in the peak of the next."""
    settings = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if settings.exists() and "[always]" in settings.read_text():
        pytest.skip("pages of 2 MiB are taken everywhere here: there is little to count")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("LD_PRELOAD", "MALLOC_"))}
    later = {}
    for how in ("kept", "plain"):
        command = [sys.executable, "-c", PAGE_FAULTS, how]
        done = subprocess.run(command, cwd=repo_root, env=clean, capture_output=True, text=True, check=True)
        *faults, is_glibc = done.stdout.split()
        if is_glibc != "True":
            pytest.skip("the C library here is not glibc")
        later[how], returned, pages = map(int, faults)
        assert returned > 0.8 * pages
    assert later["kept"] < 0.6 * pages, "a third where glibc finds too small what lies between two others"
    assert later["plain"] > 0.8 * pages, "there is nothing to mend: leave it out"


def test_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback where the C library is another one."""
    monkeypatch.setattr("ctypes.CDLL", lambda name: types.SimpleNamespace())
    cpu._glibc.cache_clear()
    try:
        cpu.keep_freed_memory()
        cpu.return_freed_memory()
    finally:
        cpu._glibc.cache_clear()
