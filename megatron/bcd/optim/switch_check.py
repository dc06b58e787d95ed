"""Check after a switch: the active block's weights change in a step, and frozen weights don't."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from megatron.core.optimizer import MegatronOptimizer

from megatron.bcd.optim.matrix_optimizer import MatrixOptimizer
from megatron.bcd.optim.param_shard import ALWAYS_ACTIVE, all_optimizer_params
from megatron.bcd.runtime import collectives

Fingerprint = tuple[int, int, int]
"""Number of elements, and two sums over their bits."""
_SAMPLED = 4099
"""One element of so many; a prime, so that all columns of a matrix have some."""
_CHUNK = 1 << 22
"""Elements that are summed at once; even. Torch makes eight bytes of each first."""


class SwitchCheck:
    """Compares this rank's weights, of all `parameters`, with those when `begin` was called last."""

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
        self._at_start: dict[str, Fingerprint] = {}

    def begin(self) -> None:
        """Remember the present weights."""
        self._at_start = self._fingerprints()

    def problem(self) -> str | None:
        """What is wrong, the same text on every rank; None if nothing is. A collective over all ranks.

        For use once a phase, after the first step whose learning rate and gradient are not zero. Found are: a stage
        that holds part of the block and on which none of its main parameters changed (always-active ones don't count),
        the same of inactive layers, and a rank whose frozen weights changed.
        """
        now = self._fingerprints()
        has_changed = {kind: now[kind] != before for kind, before in self._at_start.items() if before[0]}
        ranks = collectives.gather_objects((self._stage, has_changed))
        stages = {kind: {stage for stage, changed in ranks if kind in changed} for kind in ("active", "inactive")}
        idle = {
            kind: sorted(holding - {stage for stage, changed in ranks if changed.get(kind)})
            for kind, holding in stages.items()
        }
        changed_frozen = [rank for rank, (_, changed) in enumerate(ranks) if changed.get("frozen")]
        if idle["inactive"]:
            return f"inactive layers on pipeline stage(s) {idle['inactive']} did not change in a step"
        if idle["active"] or not any(stages.values()):
            return (
                f"block {self._block} is active, but its weights on pipeline stage(s) {idle['active']} did not change "
                "in a step"
            )
        if changed_frozen:
            return f"block {self._block} is active, but frozen weights changed on rank(s) {changed_frozen}"
        return None

    def _fingerprints(self) -> dict[str, Fingerprint]:
        frozen = (
            parameter.detach().view(-1)[::_SAMPLED] if parameter in self._streamed else parameter
            for parameter in self._frozen_parameters
        )
        inactive = () if self._matrices is None else self._matrices.tensors_to_step(is_of_block=False)
        return {
            "active": fingerprint(self._main_params()),
            "inactive": fingerprint(inactive),
            "frozen": fingerprint(frozen),
        }

    def _main_params(self) -> Iterator[torch.Tensor]:
        for one in all_optimizer_params(self._optimizer):
            if not one.group.get(ALWAYS_ACTIVE):
                yield one.main_param
        if self._matrices is not None:
            yield from self._matrices.tensors_to_step(is_of_block=True)


@torch.no_grad()
def fingerprint(tensors: Iterable[torch.Tensor]) -> Fingerprint:
    """The sums are of all elements and of every other one; equal if no bit changed."""
    count = total = every_other = 0
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        count += bits.numel()
        parts = bits.split(_CHUNK)
        total += int(sum(part.sum(dtype=torch.int64) for part in parts))
        every_other += int(sum(part[::2].sum(dtype=torch.int64) for part in parts))
    return count, total, every_other
