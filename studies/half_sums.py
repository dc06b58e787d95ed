"""Run a program whose products of fp16 matrices add up as on a GPU: in fp32, or with --fp16-accumulation in fp16.

    python studies/half_sums.py pretrain_gpt_bcd.py --fp16 --fp16-accumulation ...

A tensor core multiplies 16 elements of each row and column at a time, adds them in fp32, and rounds the sum with what
came before: to fp16 with --fp16-accumulation. Attention adds up in fp32, as PyTorch's flash attention does.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch

DEPTH = 16
"""Elements that a tensor core (mma.m16n8k16) adds before it rounds."""


def product(left: torch.Tensor, right: torch.Tensor, *, is_half: bool) -> torch.Tensor:
    """Return left [M, K] x right [K, N], of which fp16 matrices are added up as on a GPU."""
    if left.dtype != torch.float16:
        return torch.addmm(left.new_zeros(()), left, right, beta=0)
    if not is_half:
        return (left.float() @ right.float()).half()
    total = left.new_zeros(len(left), right.shape[1])
    for start in range(0, left.shape[1], DEPTH):
        part = slice(start, start + DEPTH)
        total.copy_(torch.addmm(total.float(), left[:, part].float(), right[part].float()))
    return total


def main() -> None:
    sys.argv = sys.argv[1:]
    is_half = "--fp16-accumulation" in sys.argv
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", lambda left, right: product(left, right, is_half=is_half), "CPU")
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
