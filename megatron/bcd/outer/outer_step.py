"""The outer step (DiLoCo, arXiv 2311.08105): Nesterov momentum on the groups' mean change since the last exchange.

Groups exchange the fp32 values that a phase has trained: main parameters, or the weights in fp32. The ranks with the
same weights share the work. Each has the same part of a parameter in all phases, so outer momenta need not move when
the optimizer shards parameters differently. All groups compute the same bits, because products and sums are separate
operations, which no CPU fuses.

Tensor shapes: E elements of this rank's parts of the trained parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.runtime import collectives, replicas


class TrainedValues:
    """Reads and writes the values that the present phase trains, on every rank that holds the weights."""

    def __init__(self, active: ActiveBlock) -> None:
        self._active = active
        self.parameters = active.parameters.active()
        parts = {name: replicas.shard_slice(parameter.numel()) for name, parameter in self.parameters.items()}
        self.sizes = {name: part.stop - part.start for name, part in parts.items()}
        """Elements of this rank's parts, by name; E together."""

    def parts(self) -> torch.Tensor:
        """Return this rank's parts [E], fp32, in host memory. A collective over ranks with the same weights."""
        self._active.leave_buffers()
        parts = [
            self._active.owner_of(name).main_param(name)[replicas.shard_slice(parameter.numel())].cpu()
            for name, parameter in self.parameters.items()
        ]
        return torch.cat(parts) if parts else torch.empty(0)

    @torch.no_grad()
    def set_parts(self, parts: torch.Tensor) -> None:
        """Set all values on every rank from the parts [E] of each. A collective over ranks with the same weights."""
        split = parts.split(list(self.sizes.values()))
        self._active.leave_buffers()
        for (name, parameter), part in zip(self.parameters.items(), split, strict=True):
            start = replicas.shard_slice(parameter.numel()).start
            value = collectives.join_shards(part, start, like=parameter, group=replicas.group(), rank=None)
            self._active.owner_of(name).set_main_param(name, value)


@dataclass(frozen=True, kw_only=True)
class OuterRule:
    """The rule of the outer step: new value = mean value + outer update - mean change."""

    lr: float
    momentum: float

    @property
    def is_mean(self) -> bool:
        """Whether the new value is the mean of the groups' values: synchronous data parallelism at an interval of 1."""
        return self.lr == 1.0 and self.momentum == 0.0


class OuterStep:
    """Keeps the values since the last exchange, and steps the outer momenta, in host memory."""

    def __init__(self, rule: OuterRule, active: ActiveBlock) -> None:
        self._rule, self._active = rule, active
        self.anchor = torch.empty(0)
        """[E]: values after the last exchange."""
        self.errors: dict[str, torch.Tensor] = {}
        """Rounding errors of this group's changes as sent, by name like outer momenta, in host memory. Empty
        if the compression keeps no errors. They belong to this group alone."""
        self._values = torch.empty(0)

    def _trained(self) -> TrainedValues:
        return TrainedValues(self._active)

    def begin(self) -> None:
        """Begin a phase, when all groups have the same values. A collective."""
        self.anchor = self._trained().parts()

    def change(self) -> torch.Tensor:
        """Return the change [E] since the last exchange. A collective over ranks with the same weights."""
        self._values = self._trained().parts()
        return self._values - self.anchor

    def add_errors(self, change: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Return `change` [E] plus the errors of earlier changes, which is what to send, and the size of each part."""
        sizes = self._trained().sizes
        return change + _join(self.errors, sizes) if self.errors else change, list(sizes.values())

    def num_bytes(self) -> int:
        """Return the bytes of host memory, including the momenta."""
        tensors = [self.anchor, self._values, *self.errors.values(), *self._active.outer_momenta.values()]
        return sum(tensor.nbytes for tensor in tensors)

    @torch.no_grad()
    def apply(
        self, mean_change: torch.Tensor, errors: torch.Tensor | None = None, *, is_alone: bool, keeps_steps: bool
    ) -> None:
        """Set all values from the mean change of all groups. A collective over ranks with the same weights.

        Args:
            mean_change: [E].
            errors: [E], what the groups did not receive of this group's change.
            is_alone: the mean is this group's own change, so that nothing is rounded.
            keeps_steps: add what was trained since `change` was called.
        """
        trained = self._trained()
        if errors is not None:
            self.errors |= _split(errors, trained.sizes)
        reached = self._values.clone() if is_alone else self.anchor + mean_change
        if not self._rule.is_mean:
            reached += self._update(trained, mean_change) - mean_change
        trained.set_parts(trained.parts() + (reached - self._values) if keeps_steps else reached)
        self.anchor = reached
        self._values = torch.empty(0)

    def _update(self, trained: TrainedValues, mean_change: torch.Tensor) -> torch.Tensor:
        """Step the outer momenta and return the update [E]."""
        momenta, mu = self._active.outer_momenta, self._rule.momentum
        momentum = _join(momenta, trained.sizes) * mu + mean_change
        momenta |= _split(momentum, trained.sizes)
        return (momentum * mu + mean_change) * self._rule.lr


def _join(parts: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> torch.Tensor:
    """Return the parts as [E], with zeros for missing ones."""
    return torch.cat([torch.empty(0), *(parts.get(name, torch.zeros(size)) for name, size in sizes.items())])


def _split(values: torch.Tensor, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return copies of the parts of [E], by name."""
    return {name: part.clone() for name, part in zip(sizes, values.split(list(sizes.values())), strict=True)}
