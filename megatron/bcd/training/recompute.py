"""--recompute auto: what this rank recomputes in each phase."""

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
"""Of a GPU: the driver's context, workspaces of libraries, buffers of collectives (the planner's cluster table)."""


class Recomputation:
    """Decides for every stage and phase when it is built, and tells this rank's layers at the start of a phase."""

    def __init__(self, config: RunConfig, *, model: torch.nn.Module, stage: int, run: RunMemory) -> None:
        """A collective. Without --recompute auto the flags of Megatron-LM hold.

        Raises:
            ValueError: there is neither a GPU nor --recompute-memory-gib; one line.
        """
        self._model, self._stage = model, stage
        self._choices: list[list[Recomputed]] = []
        """By stage and block; empty without --recompute auto."""
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
        """`block` is active from now on."""
        if self._choices:
            choice = self._choices[self._stage][block]
            for number, chunk in enumerate(get_chunks(self._model)):
                chunk.decoder.recompute(choice.granularity, choice.num_whole(number))

    def describe(self, partition: Partition) -> tuple[str, ...]:
        """A line for the run summary."""
        if not self._choices:
            return ()
        by_block = (
            f"block {block.index}: {', '.join(_describe(stage[block.index]) for stage in self._choices)}"
            for block in partition.blocks
        )
        return (f"recomputation by stage, of the layers after the prefix: {'; '.join(by_block)}",)


def memory_limit(config: RunConfig, *, flag: str) -> float:
    """Bytes that a rank's model state and activations may take. A collective. Raises ValueError as `Recomputation`."""
    if config.training.recompute_memory_gib:
        return config.training.recompute_memory_gib * _GIB
    total = min(collectives.gather_objects(memory.total_bytes()))
    if not total:
        raise ValueError(f"{flag} needs --recompute-memory-gib where there is no GPU")
    return total - _FRAMEWORK_GIB * _GIB


def _describe(choice: Recomputed) -> str:
    if choice.granularity == "selective":
        return "attention"
    return f"first {sum(choice.layers)}" if sum(choice.layers) else "none"
