"""Check after a switch: the active block's weights change in a step, and frozen weights don't."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer

from megatron.bcd.optim.matrix_optimizer import MatrixOptimizer
from megatron.bcd.optim.param_shard import ALWAYS_ACTIVE, all_optimizer_params
from megatron.bcd.runtime import collectives

Fingerprint = tuple[int, int]
_SAMPLED = 4099
"""One element of so many; a prime, so that all columns of a matrix have some."""


class SwitchCheck:
    """Compares this rank's weights with those at the start of a phase, when it is created with all `parameters`."""

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        parameters: Iterable[torch.Tensor],
        matrices: MatrixOptimizer | None,
        *,
        streamed: Collection[torch.Tensor] = (),
        block: int,
        stage: int,
    ) -> None:
        """`streamed`: frozen parameters in host memory, of which a sample must do: the CPU would read them for long."""
        self._optimizer = optimizer
        self._frozen_parameters = [parameter for parameter in parameters if not parameter.requires_grad]
        self._streamed = streamed
        self._matrices = matrices
        self._block = block
        self._stage = stage
        self._has_main_params = any(main_param.numel() for main_param in self._main_params())
        self._main_params_at_start = fingerprint(self._main_params())
        self._has_inactive = any(True for _ in self._inactive())
        self._inactive_at_start = fingerprint(self._inactive())
        self._frozen_at_start = self._frozen()

    def problem(self) -> str | None:
        """What is wrong, the same text on every rank; None if nothing is. A collective over all ranks.

        For use once a phase, after the first step whose learning rate and gradient are not zero. Found are: a stage
        that holds part of the block and on which none of its main parameters changed (always-active ones don't count),
        the same of inactive layers, and a rank whose frozen weights changed.
        """
        ranks = collectives.gather_objects(
            {
                "stage": self._stage,
                "has_main_params": self._has_main_params,
                "has_changed_main_params": fingerprint(self._main_params()) != self._main_params_at_start,
                "has_inactive": self._has_inactive,
                "has_changed_inactive": fingerprint(self._inactive()) != self._inactive_at_start,
                "has_changed_frozen": self._frozen() != self._frozen_at_start,
            }
        )
        stages, unchanged = _unchanged_stages(ranks, "main_params")
        inactive_stages, unchanged_inactive = _unchanged_stages(ranks, "inactive")
        changed_frozen = [index for index, rank in enumerate(ranks) if rank["has_changed_frozen"]]
        if unchanged_inactive:
            return f"inactive layers on pipeline stage(s) {unchanged_inactive} did not change in a step"
        if unchanged or not (stages or inactive_stages):
            return (
                f"block {self._block} is active, but its weights on pipeline stage(s) {unchanged} did not change in a "
                "step"
            )
        if changed_frozen:
            return f"block {self._block} is active, but frozen weights changed on rank(s) {changed_frozen}"
        return None

    def _main_params(self) -> Iterator[torch.Tensor]:
        for one in all_optimizer_params(self._optimizer):
            if not one.group.get(ALWAYS_ACTIVE):
                yield one.main_param
        if self._matrices is not None:
            yield from self._matrices.tensors_to_step(is_of_block=True)

    def _inactive(self) -> Iterator[torch.Tensor]:
        if self._matrices is not None:
            yield from self._matrices.tensors_to_step(is_of_block=False)

    def _frozen(self) -> Fingerprint:
        return fingerprint(
            parameter.detach().view(-1)[::_SAMPLED] if parameter in self._streamed else parameter
            for parameter in self._frozen_parameters
        )


def _unchanged_stages(ranks: list[dict[str, Any]], what: str) -> tuple[set[int], list[int]]:
    """The stages that have it, and those of them on which it changed on no rank."""
    stages = {rank["stage"] for rank in ranks if rank[f"has_{what}"]}
    return stages, sorted(stages - {rank["stage"] for rank in ranks if rank[f"has_changed_{what}"]})


@torch.no_grad()
def fingerprint(tensors: Iterable[torch.Tensor]) -> Fingerprint:
    """Two sums over the bits of all tensors, of all elements and of every other one; equal if no bit changed."""
    total = every_other = 0
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        total += int(bits.sum(dtype=torch.int64))
        every_other += int(bits[::2].sum(dtype=torch.int64))
    return total, every_other
