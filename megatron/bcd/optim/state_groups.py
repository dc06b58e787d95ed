"""Groups of optimizer state, as a checkpoint stores them: typed, one object each.

The parameters of a group are stepped together, and their tensors have the same names. A group lists this rank's pieces
by parameter, and sets the state of one parameter from whole tensors.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.optim.block_state import OffloadedShard
from megatron.bcd.optim.low_bit_adam import MOMENTS
from megatron.bcd.optim.matrix import FACTORS, MOMENTUM
from megatron.bcd.optim.param_shard import MAIN_PARAM, ParamShard
from megatron.bcd.optim.parameters import Parameters
from megatron.bcd.optim.update_rules import FACTORED
from megatron.bcd.runtime import replicas

ROW_MEANS, COLUMN_MEANS = "exp_avg_sq_row", "exp_avg_sq_col"
"""Names of the second moments of the rule `factored` in checkpoints."""
OUTER_MOMENTUM = "outer"
"""Name of the outer momentum in checkpoints."""


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """State of one parameter, or of a part of it, that is not in an optimizer of Megatron Core."""

    read: Mapping[str, Callable[[], torch.Tensor]]
    """Functions that return the tensors, by name."""
    start: int = 0
    """First element of the flat parameter."""
    num_steps: int = 0

    def names(self) -> set[str]:
        """Return the names of `tensors`."""
        return set(self.read)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        return {name: read() for name, read in self.read.items()}


StatePiece: TypeAlias = ParamShard | OffloadedShard | StatePart
"""This rank's state of one parameter."""


class StateGroup(ABC):
    """Optimizer state of one kind for some parameters of this stage."""

    key: str
    """Name of the group in a checkpoint's run state."""
    block: int | None = None
    """The block in whose phases alone the state is on the device; None if no block is special."""
    needs_build = False
    """Whether offloaded state can only be restored while the block's optimizer exists."""

    def __init__(self, active: ActiveBlock) -> None:
        self._active = active
        self.parameters = self._select()

    @abstractmethod
    def _select(self) -> Parameters:
        """Return the group's parameters. They are the same on all ranks with the same weights."""

    @abstractmethod
    def pieces(self) -> Mapping[str, StatePiece]:
        """Return this rank's state by parameter."""

    def tensor_names(self, parameter: str, names: list[str]) -> list[str]:
        """Return which of the group's tensor `names` a parameter has.

        The main parameters of matrices are in a separate group, unless Adam steps them by piece.
        """
        is_matrix = parameter in self._active.matrices.matrices and not _has_main_params(self._active)
        return [name for name in names if not (is_matrix and name == MAIN_PARAM)]

    def joined(self, group: torch.distributed.ProcessGroup) -> Mapping[str, OffloadedShard]:
        """Return whole state of parameters if this rank can read the other ranks' state. A collective over `group`."""
        return {}

    @abstractmethod
    def set(self, parameter: str, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
        """Set this rank's state of a parameter from whole tensors."""

    def shapes(self, parameter: str, names: list[str]) -> dict[str, torch.Size]:
        """Return the shapes of a parameter's whole tensors by name."""
        return dict.fromkeys(self.tensor_names(parameter, names), self.parameters[parameter].shape)


class BlockState(StateGroup):
    """Moments and main parameters of the parameters that one block owns."""

    needs_build = True

    def __init__(self, active: ActiveBlock, block: int) -> None:
        self.key, self.block = str(block), block
        super().__init__(active)

    def _select(self) -> Parameters:
        assert self.block is not None
        owned = self._active.parameters.owned_by(self.block)
        muon = self._active.matrices.matrices if self._active.config.is_muon else {}
        return {name: parameter for name, parameter in owned.items() if name not in muon}

    @property
    def _is_active(self) -> bool:
        return self.block == self._active.block

    def pieces(self) -> Mapping[str, StatePiece]:
        assert self.block is not None
        active = self._active
        pieces = active.core.block_shards if self._is_active else active.offloaded.blocks.get(self.block, {})
        parts = dict[str, StatePiece](pieces)
        for name, matrix in active.matrices.matrices.items():
            if name in self.parameters and matrix.adam_state():
                read: dict[str, Callable[[], torch.Tensor]] = {}
                read |= {moment: functools.partial(matrix.read_moment, moment) for moment in MOMENTS}
                if matrix.parameter.dtype == torch.bfloat16 and _has_main_params(active):
                    read[MAIN_PARAM] = matrix.main_param_reader()
                parts[name] = StatePart(read=read, num_steps=active.matrices.num_steps[self.block])
        return parts

    def joined(self, group: torch.distributed.ProcessGroup) -> Mapping[str, OffloadedShard]:
        assert self.block is not None
        if self._is_active:  # what is offloaded is from the block's last phase
            return {}
        return self._active.offloaded.joined(self.block, self._active.parameters.all(), group)

    def set(self, parameter: str, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
        assert self._is_active, f"block {self.block} is not active"
        assert self.block is not None
        optimizer = self._active.matrices
        if parameter in optimizer.matrices:
            optimizer.num_steps[self.block] = num_steps
            optimizer.matrices[parameter].set_adam(tensors)
        _set_shard(self._active.core.block_shards.get(parameter), tensors, num_steps)


class AlwaysActiveState(StateGroup):
    """Moments and main parameters of always-active parameters."""

    key = "always"

    def _select(self) -> Parameters:
        return self._active.parameters.always_active()

    def pieces(self) -> Mapping[str, StatePiece]:
        return self._active.core.always_active_shards

    def set(self, parameter: str, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
        _set_shard(self._active.core.always_active_shards.get(parameter), tensors, num_steps)


class MainParams(StateGroup):
    """Main parameters of the bf16 matrices that the matrix optimizer steps, unless `BlockState` has them."""

    key = "matrices"

    def _select(self) -> Parameters:
        return {} if _has_main_params(self._active) else self._active.parameters.matrices()

    def tensor_names(self, parameter: str, names: list[str]) -> list[str]:
        return names

    def pieces(self) -> Mapping[str, StatePiece]:
        return {
            name: StatePart(read={MAIN_PARAM: matrix.main_param_reader()})
            for name, matrix in self._active.matrices.matrices.items()
            if self.parameters and matrix.is_owner and matrix.parameter.dtype == torch.bfloat16
        }

    def set(self, parameter: str, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
        self._active.matrices.set_main_param(parameter, tensors[MAIN_PARAM])


class Momenta(StateGroup):
    """Momenta of one block's matrices (--optimizer muon)."""

    def __init__(self, active: ActiveBlock, block: int) -> None:
        self.key, self.block = f"momentum {block}", block
        super().__init__(active)

    def _select(self) -> Parameters:
        assert self.block is not None
        matrices = self._active.parameters.matrices()
        owned = self._active.parameters.owned_by(self.block)
        return {name: parameter for name, parameter in owned.items() if name in matrices}

    def pieces(self) -> Mapping[str, StatePiece]:
        matrices = self._active.matrices.matrices
        return {
            name: StatePart(read={MOMENTUM: functools.partial(_flat, momentum)})
            for name in self.parameters
            if name in matrices and (momentum := matrices[name].get(MOMENTUM)) is not None
        }

    def set(self, parameter: str, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
        self._active.matrices.matrices[parameter].set_momentum(tensors[MOMENTUM])


class FactoredMoments(StateGroup):
    """Second moments of the rule `factored`: means of rows and of columns, on each matrix's owner alone.

    `which` names the block that owns the matrices; "no block" if none does, "embedding" for embedding and head.
    """

    def __init__(self, active: ActiveBlock, which: str) -> None:
        self.key, self._which = f"factored {which}", which
        super().__init__(active)

    def _select(self) -> Parameters:
        parameters = self._active.parameters
        if self._which == "embedding":
            return parameters.outside_layers()
        if self._active.config.bcd.bcd_inactive_update != FACTORED:  # the checkpoint may be of a run with this rule
            return {}
        return parameters.stateless_owned_by(None if self._which == "no block" else int(self._which))

    def pieces(self) -> Mapping[str, StatePiece]:
        parts = dict[str, StatePiece]()
        for name in self.parameters:
            matrix = self._active.matrices.matrices[name]
            if (factors := matrix.get(FACTORS)) is not None:
                rows, columns, num_steps = matrix.split_factors(factors)
                read = {ROW_MEANS: rows.detach, COLUMN_MEANS: columns.detach}
                parts[name] = StatePart(read=read, num_steps=int(num_steps))
        return parts

    def shapes(self, parameter: str, names: list[str]) -> dict[str, torch.Size]:
        matrix = self._active.matrices.matrices[parameter]
        rows, columns, _ = matrix.split_factors(matrix.zero_factors())
        return {ROW_MEANS: rows.shape, COLUMN_MEANS: columns.shape}

    def set(self, parameter: str, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
        matrix = self._active.matrices.matrices[parameter]
        matrix.set_factors(tensors[ROW_MEANS], tensors[COLUMN_MEANS], num_steps=num_steps)


class OuterMomenta(StateGroup):
    """Momenta of the outer step of replica groups. Each replica has a part of every parameter."""

    key = "outer"

    def _select(self) -> Parameters:
        return self._active.parameters.all()

    def pieces(self) -> Mapping[str, StatePiece]:
        return {
            name: StatePart(
                read={OUTER_MOMENTUM: functools.partial(_flat, momentum)},
                start=replicas.shard_slice(self.parameters[name].numel()).start,
            )
            for name, momentum in self._active.outer_momenta.items()
        }

    def set(self, parameter: str, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
        momentum = tensors[OUTER_MOMENTUM].reshape(-1)
        self._active.outer_momenta[parameter] = momentum[replicas.shard_slice(momentum.numel())].clone()


def state_groups(active: ActiveBlock) -> dict[str, StateGroup]:
    """Return all groups that a run of this configuration can have, by key."""
    blocks = range(active.partition.num_blocks)
    groups = [
        *(BlockState(active, block) for block in blocks),
        AlwaysActiveState(active),
        MainParams(active),
        *(Momenta(active, block) for block in blocks),
        *(FactoredMoments(active, which) for which in ("no block", "embedding", *map(str, blocks))),
        OuterMomenta(active),
    ]
    return {group.key: group for group in groups}


def _has_main_params(active: ActiveBlock) -> bool:
    """Return whether the block's matrices have main parameters in `BlockState`, as in a checkpoint of full Adam."""
    return active.config.steps_block_by_piece and not active.config.is_muon


def _set_shard(shard: ParamShard | None, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
    if shard is not None:
        parts = {name: tensor.reshape(-1)[shard.start : shard.end] for name, tensor in tensors.items()}
        shard.set(parts, num_steps=num_steps)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float().reshape(-1)
