"""Decide what a rank recomputes in each phase (--recompute auto)."""

from __future__ import annotations

import torch

from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import RunConfig
from megatron.bcd.model.builder import get_chunks
from megatron.bcd.planner.activations import Recomputed
from megatron.bcd.planner.run_state import RunMemory
from megatron.bcd.runtime import collectives, memory

_GIB = 2**30
_FRAMEWORK_GIB = 1.0
"""Memory of a GPU for the driver's context, workspaces of libraries and buffers of collectives (the planner's cluster
table)."""


class Recomputation:
    """The recomputation of each stage in each phase. It is decided once, and set in the layers when a phase begins."""

    def __init__(self, config: RunConfig, *, model: torch.nn.Module, stage: int, run: RunMemory) -> None:
        """Decide for all stages and blocks. Collective. Without --recompute auto Megatron-LM's flags apply.

        Raises:
            ValueError: there is neither a GPU nor --recompute-memory-gib.
        """
        self._model, self._stage = model, stage
        self._choices: list[list[Recomputed]] = []
        """Indexed by stage and block; empty without --recompute auto."""
        if config.training.recompute is None:
            return
        limit = memory_limit(config, flag="--recompute auto")
        self._choices = [
            [
                run.activations(stage, block.index).least_recomputation(limit=limit)
                for block in run.state.partition.blocks
            ]
            for stage in range(run.state.partition.num_stages)
        ]

    def begin_phase(self, block: int) -> None:
        """Set what this rank's layers recompute while `block` is active."""
        if self._choices:
            choice = self._choices[self._stage][block]
            for number, chunk in enumerate(get_chunks(self._model)):
                chunk.decoder.recompute(choice.granularity, choice.num_whole(number))

    def describe(self, partition: Partition) -> tuple[str, ...]:
        """Return a line for the run summary, as a tuple; an empty tuple without --recompute auto."""
        if not self._choices:
            return ()
        by_block = (
            f"block {block.index}: {', '.join(_describe(stage[block.index]) for stage in self._choices)}"
            for block in partition.blocks
        )
        return (f"recomputation by stage, of the layers after the prefix: {'; '.join(by_block)}",)


def memory_limit(config: RunConfig, *, flag: str | None) -> float:
    """Return the number of bytes that model state and activations of a rank may take. Collective.

    Raises:
        ValueError: there is neither a GPU nor --recompute-memory-gib. If no `flag` needs them, there is no limit.
    """
    if config.training.recompute_memory_gib:
        return config.training.recompute_memory_gib * _GIB
    total = min(collectives.gather_objects(memory.total_bytes()))
    if not total:
        if flag is None:
            return float("inf")
        raise ValueError(f"{flag}: there is no GPU whose memory would be the limit. Give --recompute-memory-gib.")
    return total - _FRAMEWORK_GIB * _GIB


def _describe(choice: Recomputed) -> str:
    if choice.granularity == "selective":
        return "attention"
    return f"first {sum(choice.layers)}" if sum(choice.layers) else "none"
