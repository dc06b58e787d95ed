"""A small indexed dataset that is the same everywhere: random walks over 250 tokens, each ended by token 256."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

SHA256 = "7f16925065d6d2fed70699d73d5ed1bff5d899cf07ccacb6e3a856b811ddf7cb"


def write(folder: Path) -> str:
    """Write 200 documents of 20 to 199 tokens and return their prefix."""
    prefix = folder / "walks"
    draw = numpy.random.default_rng(5)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for _ in range(200):
        length = int(draw.integers(20, 200))
        tokens = (draw.integers(0, 250) + numpy.cumsum(draw.integers(0, 4, length))) % 250
        tokens[-1] = 256
        builder.add_document(torch.from_numpy(tokens), [length])
    builder.finalize(f"{prefix}.idx")
    assert hashlib.sha256(Path(f"{prefix}.bin").read_bytes()).hexdigest() == SHA256, "NumPy draws other numbers"
    return str(prefix)
