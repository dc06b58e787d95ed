"""Check after a switch: the active block's weights change in a step, and frozen weights don't."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core.optimizer import MegatronOptimizer

from megatron.bcd.optim.optimizer_params import own_main_params
from megatron.bcd.optim.owned_parameters import OwnedParameters
from megatron.bcd.runtime import collectives

Fingerprint = tuple[int, int]


class SwitchCheck:
    """Compares this rank's weights with those at the start of a phase, when it is created."""

    def __init__(self, optimizer: MegatronOptimizer, parameters: OwnedParameters, *, block: int, stage: int) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._block = block
        self._stage = stage
        self._has_main_params = any(main_param.numel() for main_param in own_main_params(optimizer))
        self._main_params_at_start = self._main_params()
        self._frozen_at_start = self._frozen()

    def problem(self) -> str | None:
        """What is wrong, the same text on every rank; None if nothing is. A collective over all ranks.

        For use once a phase, after the first step whose learning rate and gradient are not zero. Found are: a stage
        that holds part of the block and on which none of its main parameters changed (always-active ones don't count),
        and a rank whose frozen weights changed.
        """
        ranks = collectives.gather_objects(
            {
                "stage": self._stage,
                "has_main_params": self._has_main_params,
                "has_changed_main_params": self._main_params() != self._main_params_at_start,
                "has_changed_frozen": self._frozen() != self._frozen_at_start,
            }
        )
        stages = {rank["stage"] for rank in ranks if rank["has_main_params"]}
        unchanged = sorted(stages - {rank["stage"] for rank in ranks if rank["has_changed_main_params"]})
        changed_frozen = [index for index, rank in enumerate(ranks) if rank["has_changed_frozen"]]
        if unchanged or not stages:
            return (
                f"block {self._block} is active, but its weights on pipeline stage(s) {unchanged} did not change in a "
                "step"
            )
        if changed_frozen:
            return f"block {self._block} is active, but frozen weights changed on rank(s) {changed_frozen}"
        return None

    def _main_params(self) -> Fingerprint:
        return fingerprint(own_main_params(self._optimizer))

    def _frozen(self) -> Fingerprint:
        return fingerprint(self._parameters.frozen().values())


@torch.no_grad()
def fingerprint(tensors: Iterable[torch.Tensor]) -> Fingerprint:
    """Two sums over the bits of all tensors, of all elements and of every other one; equal if no bit changed."""
    total = every_other = 0
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        total += int(bits.sum(dtype=torch.int64))
        every_other += int(bits[::2].sum(dtype=torch.int64))
    return total, every_other
