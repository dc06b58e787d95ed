"""Check after a switch: the active block's weights change in a step, and frozen weights do not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch

from megatron.bcd.optim.state import ALWAYS, ParamState
from megatron.bcd.runtime import collectives

Fingerprint = tuple[int, int, int]
"""Number of elements, and two sums over their bits."""
_CHUNK = 1 << 22
"""Elements that are summed at once; even. Torch converts each to eight bytes first."""
_SAMPLE_STRIDE = 4099
"""In host memory every 4099th element is compared, because the CPU reads slowly. The stride is prime, so that every
column of a matrix has elements in the sample."""


class SwitchCheck:
    """Compares this rank's weights with those at the last call of `begin`.

    Args:
        state: lists the optimizer state of the stage.
        parameters: all parameters of the stage.
        owned: names of the block's parameters.
        streamed: parameters in host memory, of which a sample is compared.
        block: number of the active block, for messages.
        stage: this pipeline stage.
    """

    def __init__(
        self,
        state: Callable[[], Iterable[ParamState]],
        parameters: Iterable[torch.Tensor],
        *,
        owned: Collection[str],
        streamed: Collection[torch.Tensor],
        block: int,
        stage: int,
    ) -> None:
        self._state, self._owned, self._streamed = state, owned, streamed
        self._frozen_parameters = [parameter for parameter in parameters if not parameter.requires_grad]
        self._block, self._stage = block, stage
        self._at_start: dict[str, Fingerprint] = {}

    def begin(self) -> None:
        """Remember the current weights."""
        self._at_start = self._fingerprints()

    def problem(self) -> str | None:
        """Return a description of the problem, the same on every rank, or None. A collective over all ranks.

        Call it once in a phase, after the first step with a non-zero learning rate and gradient. There are two
        problems: on a stage with active or updated inactive layers, none of their weights changed (always-active
        parameters do not count); or on some rank a frozen weight changed.
        """
        now = self._fingerprints()
        has_changed = {kind: now[kind] != before for kind, before in self._at_start.items() if before[0]}
        ranks = collectives.gather_objects((self._stage, has_changed))
        stages = {kind: {stage for stage, changed in ranks if kind in changed} for kind in ("active", "inactive")}
        idle = {
            kind: sorted(stages[kind] - {stage for stage, changed in ranks if changed.get(kind)}) for kind in stages
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
        values: dict[str, list[torch.Tensor]] = {"active": [], "inactive": [], "frozen": []}

        def add(kind: str, parameter: torch.Tensor, value: Iterable[torch.Tensor]) -> None:
            stride = _SAMPLE_STRIDE if parameter in self._streamed else 1
            values[kind] += [tensor.detach().view(-1)[::stride] for tensor in value]

        for state in self._state():
            if not state.is_resting and state.group != ALWAYS:
                add("active" if state.name in self._owned else "inactive", state.parameter, state.value)
        for parameter in self._frozen_parameters:
            add("frozen", parameter, [parameter])
        return {kind: fingerprint(tensors) for kind, tensors in values.items()}


@torch.no_grad()
def fingerprint(tensors: Iterable[torch.Tensor]) -> Fingerprint:
    """Return numbers that change if a bit of the tensors does: the number of elements, and two sums of their bits.

    The sums are over all elements, and over every other element.
    """
    count = total = every_other = 0
    for tensor in tensors:
        bits = tensor.detach().reshape(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        count += bits.numel()
        parts = bits.split(_CHUNK)
        total += int(sum(part.sum(dtype=torch.int64) for part in parts))
        every_other += int(sum(part[::2].sum(dtype=torch.int64) for part in parts))
    return count, total, every_other
