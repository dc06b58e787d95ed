"""Compares the results of two runs of tools/soak.py: checkpoints and metrics, bit for bit."""

from __future__ import annotations

import json
import warnings
from collections import Counter

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.bcd.checkpoint.safe_loading import only_data

FACTS = ("consumed_samples", "cycle", "phase", "block", "loss", "learning_rate", "grad_norm", "skipped_iterations",
         "global_batch_size", "backward_messages", "validation_loss", "test_loss")  # fmt: skip
KINDS = ("loss", "validation_loss", "test_loss")


def different_tensors(reference: str, other: str) -> list[str]:
    """One line for each tensor (weight or optimizer state) that differs between two checkpoint folders."""
    here, there = _tensors(reference), _tensors(other)
    lines = [f"{name} is in one of the last checkpoints only" for name in sorted(here.keys() ^ there.keys())]
    for name in sorted(here.keys() & there.keys()):
        if not _same_bits(here[name], there[name]):
            distance = (here[name].double() - there[name].double()).abs().max().item()
            lines.append(f"{name} differs by up to {distance:.3g}")
    return lines


def different_metrics(reference: str, other: str) -> list[str]:
    """One line for each iteration whose lines are missing, duplicate or different in two metrics files."""
    expected, found = _lines(reference), _lines(other)
    counts = Counter(_key(line) for line in found)
    counts.subtract(_key(line) for line in expected)
    lines = [
        f"iteration {iteration}: {abs(count)} line(s) with {kind} {'too many' if count > 0 else 'missing'}"
        for (iteration, kind), count in sorted(counts.items())
        if count
    ]
    if lines:
        return lines
    for one, two in zip(expected, found, strict=True):
        facts = [fact for fact in ("iteration", *FACTS) if one.get(fact) != two.get(fact)]
        if facts:
            values = ", ".join(f"{fact} {two.get(fact)} (not {one.get(fact)})" for fact in facts)
            lines.append(f"iteration {one['iteration']}: {values}")
    return lines


def _tensors(folder: str) -> dict[str, torch.Tensor]:
    with only_data(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is enough to read
        stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        tensors = {
            name: torch.zeros(tensor.size, dtype=tensor.properties.dtype)
            for name, tensor in stored.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return tensors


def _same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8))


def _lines(path: str) -> list[dict[str, object]]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _key(line: dict[str, object]) -> tuple[int, str]:
    kind = next((kind for kind in KINDS if kind in line), "no loss")
    return int(str(line["iteration"])), kind
