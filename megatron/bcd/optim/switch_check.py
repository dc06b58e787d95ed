"""Check after a switch: the active block's weights change in a step, and frozen weights do not."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron.bcd.model.builder import get_host_layers
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.optim.state import ALWAYS
from megatron.bcd.runtime import collectives

Fingerprint = tuple[int, int, int]
"""Number of elements, and two sums over their bits."""
_CHUNK = 1 << 22
"""Elements that are summed at once; even. Torch converts each to eight bytes first."""
_SAMPLE_STRIDE = 4099
"""In host memory every 4099th element is compared, because the CPU reads slowly. The stride is prime, so that every
column of a matrix has elements in the sample."""


def problem(active: ActiveBlock, at_start: dict[str, Fingerprint]) -> str | None:
    """Return a description of the problem, the same on every rank, or None. A collective over all ranks.

    Call it once in a phase, after the first step with a non-zero learning rate and gradient. `at_start` are the
    `fingerprints` before it. There are two problems: on a stage with active or updated inactive layers, none of their
    weights changed (always-active parameters do not count); or on some rank a frozen weight changed.
    """
    now = fingerprints(active)
    has_changed = {kind: now[kind] != before for kind, before in at_start.items() if before[0]}
    ranks = collectives.gather_objects((active.stage, has_changed))
    stages = {kind: {stage for stage, changed in ranks if kind in changed} for kind in ("active", "inactive")}
    idle = {kind: sorted(stages[kind] - {stage for stage, changed in ranks if changed.get(kind)}) for kind in stages}
    changed_frozen = [rank for rank, (_, changed) in enumerate(ranks) if changed.get("frozen")]
    if idle["inactive"]:
        return f"inactive layers on pipeline stage(s) {idle['inactive']} did not change in a step"
    if idle["active"] or not any(stages.values()):
        return (
            f"block {active.block} is active, but its weights on pipeline stage(s) {idle['active']} did not change in "
            "a step"
        )
    if changed_frozen:
        return f"block {active.block} is active, but frozen weights changed on rank(s) {changed_frozen}"
    return None


def fingerprints(active: ActiveBlock) -> dict[str, Fingerprint]:
    """Return numbers of this rank's weights: of the block's, of inactive ones that are updated, and of frozen ones.

    Of parameters in host memory only a sample counts.
    """
    assert active.block is not None
    owned = active.parameters.owned_by(active.block)
    streamed = get_host_layers(active.model).streamed_parameters()
    values: dict[str, list[torch.Tensor]] = {"active": [], "inactive": [], "frozen": []}

    def add(kind: str, parameter: torch.Tensor, value: Iterable[torch.Tensor]) -> None:
        stride = _SAMPLE_STRIDE if parameter in streamed else 1
        values[kind] += [tensor.detach().view(-1)[::stride] for tensor in value]

    for state in active.state():
        if not state.is_resting and state.group != ALWAYS:
            add("active" if state.name in owned else "inactive", state.parameter, state.value)
    for parameter in active.model.parameters():
        if not parameter.requires_grad:
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
