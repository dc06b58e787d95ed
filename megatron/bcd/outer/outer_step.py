"""The outer step (DiLoCo, arXiv 2311.08105): Nesterov momentum on the groups' mean change since the last exchange.

What a phase has trained is exchanged, as fp32 values: main parameters, in fp32 the weights. The ranks that hold the
same weights share the work: each has the same part of a parameter in all phases, so that outer momenta need not move
when the optimizer shards parameters differently. All groups compute the same bits: products and sums are separate
operations, which no CPU fuses.

Tensor shapes: E elements of this rank's parts of what the phase trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron.bcd.optim import bf16
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.runtime import collectives, replicas


class TrainedValues:
    """What the present phase trains, read and written whole: on every rank that holds the weights.

    `rounds_away`: a bf16 weight is its main parameter with halves rounded away from zero
    (--use-precision-aware-optimizer).
    """

    def __init__(self, active: ActiveBlock, *, rounds_away: bool) -> None:
        self._active = active
        self._rounds_away = rounds_away
        self._shards = {**active.own_shards(), **active.always_active_shards()}
        matrices = active.matrices
        self._of_matrices = set() if matrices is None else {matrix.name for matrix in matrices.held}
        self.parameters = active.parameters.active()
        parts = {name: replicas.shard_slice(one.numel()) for name, one in self.parameters.items()}
        self.sizes = {name: part.stop - part.start for name, part in parts.items()}
        """Elements of this rank's parts, by name; E together."""

    def parts(self) -> torch.Tensor:
        """Of this rank, [E], fp32, in host memory. A collective over ranks with the same weights."""
        found = [self._value(name)[replicas.shard_slice(one.numel())].cpu() for name, one in self.parameters.items()]
        return torch.cat(found) if found else torch.empty(0)

    @torch.no_grad()
    def set_parts(self, parts: torch.Tensor) -> None:
        """The opposite: every rank gets all values. A collective over the same ranks."""
        split = parts.split(list(self.sizes.values()))
        for (name, parameter), part in zip(self.parameters.items(), split, strict=True):
            start = replicas.shard_slice(parameter.numel()).start
            part = part.to(parameter.device)
            self._set(name, collectives.join_shards(part, start, like=parameter, group=replicas.group(), rank=None))

    def _value(self, name: str) -> torch.Tensor:
        """Flat, fp32."""
        parameter, shard = self.parameters[name], self._shards.get(name)
        if name in self._of_matrices:
            assert self._active.matrices is not None
            is_fp32 = parameter.dtype == torch.float32
            return (parameter.detach() if is_fp32 else self._active.matrices.whole_main_param(name)).view(-1)
        if not self._active.is_sharded:
            assert shard is not None, f"no optimizer steps {name}"
            return shard.main_param
        mine, start = (None, 0) if shard is None else (shard.main_param, shard.start)
        return collectives.join_shards(mine, start, like=parameter, group=replicas.group(), rank=None)

    def _set(self, name: str, value: torch.Tensor) -> None:
        parameter = self.parameters[name]
        if name in self._of_matrices and parameter.dtype != torch.float32:
            assert self._active.matrices is not None
            self._active.matrices.set_main_param(name, value)
            return
        if self._rounds_away:
            bf16.split(value.view(parameter.shape), weight=parameter.data, low_bits=None)
        else:
            parameter.data.copy_(value.view(parameter.shape))
        if (shard := self._shards.get(name)) is not None:
            shard.set_main_param(value[shard.start : shard.end])


@dataclass(frozen=True, kw_only=True)
class OuterRule:
    """new = mean value + outer update - mean change."""

    lr: float
    momentum: float

    @property
    def is_mean(self) -> bool:
        """The new value is the mean of the groups' values: synchronous data parallelism at an interval of 1."""
        return self.lr == 1.0 and self.momentum == 0.0


class OuterStep:
    """Values since the last exchange, and outer momenta, in host memory."""

    def __init__(self, rule: OuterRule, active: ActiveBlock, *, rounds_away: bool) -> None:
        self._rule, self._active, self._rounds_away = rule, active, rounds_away
        self.anchor = torch.empty(0)
        """[E]: values after the last exchange."""
        self.errors: dict[str, torch.Tensor] = {}
        """What the groups have missed of this group's changes, by name as outer momenta, in host memory; none where the
        compression keeps no errors. It is this group's alone."""
        self._values = torch.empty(0)

    def _trained(self) -> TrainedValues:
        return TrainedValues(self._active, rounds_away=self._rounds_away)

    def begin(self) -> None:
        """From here on changes count: at the start of a phase all groups have the same values. A collective."""
        self.anchor = self._trained().parts()

    def change(self) -> torch.Tensor:
        """[E]: since the last exchange. A collective over ranks with the same weights."""
        self._values = self._trained().parts()
        return self._values - self.anchor

    def to_send(self, change: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """`change` [E] and what the groups have missed of those before; the elements of each parameter's part."""
        sizes = self._trained().sizes
        return change + _joined(self.errors, sizes) if self.errors else change, list(sizes.values())

    def held(self) -> list[torch.Tensor]:
        """All of it but the momenta."""
        return [self.anchor, self._values, *self.errors.values()]

    @torch.no_grad()
    def apply(
        self, mean_change: torch.Tensor, errors: torch.Tensor | None = None, *, is_alone: bool, keeps_steps: bool
    ) -> None:
        """Set all values from the mean change [E] of all groups; `errors` [E]: what they have missed of this group's;
        `is_alone`: it is this group's own, so that nothing is rounded; `keeps_steps`: what has been trained since
        `change` was called stays. A collective over ranks with the same weights."""
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
        """[E]; steps the outer momenta."""
        momenta, mu = self._active.outer_momenta, self._rule.momentum
        momentum = _joined(momenta, trained.sizes) * mu + mean_change
        momenta |= _split(momentum, trained.sizes)
        return (momentum * mu + mean_change) * self._rule.lr


def _joined(parts: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> torch.Tensor:
    """[E]; zeros where there is no part."""
    return torch.cat([torch.empty(0), *(parts.get(name, torch.zeros(size)) for name, size in sizes.items())])


def _split(values: torch.Tensor, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Copies: the parts of [E]."""
    return {name: part.clone() for name, part in zip(sizes, values.split(list(sizes.values())), strict=True)}
