"""A script for `ForkedRuns`: one rank, named in argv, detects a fault while the others wait for it in a collective."""

from __future__ import annotations

import os
import sys

import torch

from megatron.bcd.runtime import distributed
from megatron.bcd.runtime.exit import exit_on_error


def main() -> None:
    with exit_on_error(ValueError, prog="one_rank_refuses.py"):
        distributed.initialize(backend="gloo", timeout_minutes=10, tensor_size=1, pipeline_size=1)
        if os.environ["RANK"] == sys.argv[1]:
            raise ValueError(f"seen by rank {sys.argv[1]}")
        torch.distributed.barrier()
