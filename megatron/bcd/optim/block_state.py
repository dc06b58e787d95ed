"""Offloaded state: the optimizer state of each block in host memory between its phases.

It also carries the state of always-active parameters through a switch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.bcd.optim import low_bit_adam
from megatron.bcd.optim.bf16 import Bf16Residual, bf16_residual
from megatron.bcd.optim.param_shard import MAIN_PARAM, ParamShard
from megatron.bcd.runtime import collectives, device, memory


@dataclass(frozen=True, kw_only=True)
class OffloadedShard:
    """Offloaded state of elements `start` to `end` of a frozen parameter. All tensors are flat, in host memory."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    num_steps: int
    moments: dict[str, torch.Tensor]
    """Moments as `ParamShard.stored_moments` returns them."""
    residual: Bf16Residual | None
    """In bf16: the difference between the main parameter and the weight."""
    main_param: torch.Tensor | None
    """In fp16: the main parameter."""

    def names(self) -> set[str]:
        """Return the names of `tensors`."""
        has_main_param = self.residual is not None or self.main_param is not None
        return {*low_bit_adam.names(self.moments), *([MAIN_PARAM] if has_main_param else [])}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the moments, and the main parameter unless it is the weight itself, like `ParamShard.tensors`."""
        tensors = low_bit_adam.decode(self.moments)
        if self.main_param is not None:
            tensors[MAIN_PARAM] = self.main_param
        if self.residual is not None:
            weight = self.parameter.detach().view(-1)[self.start : self.end].cpu()
            tensors[MAIN_PARAM] = torch.empty(self.end - self.start, dtype=torch.float32)
            self.residual.restore(weight, main_param=tensors[MAIN_PARAM])
        return tensors

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        tensors = [*self.moments.values(), *([] if self.main_param is None else [self.main_param])]
        return sum(tensor.nbytes for tensor in tensors) + (0 if self.residual is None else self.residual.num_bytes)


class BlockStateStore:
    """Optimizer state of this rank between phases.

    Host memory is allocated when a parameter is first saved, and reused afterwards.

    Args:
        keeps_moments: --bcd-optimizer-state host.
        keeps_main_params: --bcd-main-params host.
        places: preallocated flat host buffers for the main parameters of whole parameters.
        are_shared: all replicas share the memory of `places`.
    """

    def __init__(
        self,
        *,
        keeps_moments: bool,
        keeps_main_params: bool = True,
        places: Mapping[torch.nn.Parameter, torch.Tensor] | None = None,
        are_shared: bool = False,
    ) -> None:
        self._places, self._are_shared = places or {}, are_shared
        self.keeps_moments = keeps_moments
        self.keeps_main_params = keeps_main_params
        self._blocks: dict[int, dict[str, OffloadedShard]] = {}
        self._always_active: dict[str, tuple[int, dict[str, torch.Tensor]]] = {}
        """During a switch: the number of steps and the flat tensors of each always-active parameter, whole, on the
        device or in host memory."""

    @property
    def blocks(self) -> Mapping[int, Mapping[str, OffloadedShard]]:
        """Offloaded shards by block and parameter name. Those of the active block are from the start of its phase."""
        return self._blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory of all blocks."""
        return sum(shard.num_bytes for shards in self._blocks.values() for shard in shards.values())

    def state(self) -> dict[int, Any]:
        """Return copies of all offloaded state, in host memory."""
        return memory.copy_to_host(
            {
                block: {name: {**vars(shard), "parameter": None} for name, shard in shards.items()}
                for block, shards in self._blocks.items()
            }
        )

    def set_state(self, state: Mapping[int, Any], parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Load the `state` of the same rank of a run with the same layout. `parameters` has all parameters by name."""
        self._always_active = {}  # the phase's optimizer holds it
        self._blocks = {
            block: {
                name: self._move_to_place(OffloadedShard(**{**shard, "parameter": parameters[name]}))
                for name, shard in shards.items()
            }
            for block, shards in state.items()
        }

    def _place(self, shard: OffloadedShard | ParamShard) -> torch.Tensor | None:
        """Return the preallocated buffer of a shard's main parameter, if there is one."""
        place = self._places.get(shard.parameter)
        return None if place is None else place[shard.start : shard.end]

    def _move_to_place(self, shard: OffloadedShard) -> OffloadedShard:
        """Return the shard with its main parameter in the preallocated buffer, if there is one."""
        place = self._place(shard)
        if place is None:
            return shard
        if shard.residual is not None:
            return replace(shard, residual=replace(shard.residual, differences=place.copy_(shard.residual.differences)))
        return shard if shard.main_param is None else replace(shard, main_param=place.copy_(shard.main_param))

    def save(self, block: int, shards: Mapping[str, ParamShard]) -> None:
        """Copy the state of parameters of the block to host memory, and wait until it is there."""
        saved = self._blocks.setdefault(block, {})
        for name, shard in shards.items():
            has_main_param = self.keeps_main_params and shard.has_own_main_param
            if self.keeps_moments or has_main_param:
                saved[name] = self._save_shard(shard, saved.get(name), has_main_param=has_main_param)
        device.synchronize()

    def joined(
        self, block: int, parameters: Mapping[str, torch.nn.Parameter], group: torch.distributed.ProcessGroup
    ) -> Mapping[str, OffloadedShard]:
        """Return a block's main parameters in shared memory, as the ranks of `group` together wrote them, by name.

        The shards are whole parameters, although each rank has written only its part. Empty if the ranks also store
        moments, which are not shared. A collective over the group.
        """
        if self.keeps_moments or not self._are_shared:
            return {}
        exceptions = {
            name: None
            if (residual := shard.residual) is None
            else (residual.exception_indices + shard.start, residual.exception_bits)
            for name, shard in self._blocks.get(block, {}).items()
            if shard.parameter in self._places
        }
        by_name = defaultdict[str, list[Any]](list)
        for rank in collectives.gather_objects(exceptions, group):
            for name, exception in rank.items():
                by_name[name].append(exception)
        return {
            name: _whole_shard(parameters[name], self._places[parameters[name]], exceptions)
            for name, exceptions in by_name.items()
        }

    def restore(self, block: int, shards: Mapping[str, ParamShard]) -> None:
        """Copy the offloaded state of these parameters of the block, if any, into the shards of a new optimizer."""
        saved = self._blocks.get(block, {})
        for name, shard in shards.items():
            if (offloaded := saved.get(name)) is None:
                continue
            is_same = (shard.start, shard.end) == (offloaded.start, offloaded.end)
            assert is_same, f"{name} is sharded differently than before"
            if offloaded.residual is not None:
                value = shard.main_param
                offloaded.residual.restore(shard.weight, main_param=value)
                if shard.stores_low_bits:  # otherwise `value` is the main parameter, written in place
                    shard.set_main_param(value)
            elif offloaded.main_param is not None:
                shard.set_main_param(offloaded.main_param)
            shard.set_stored_moments(offloaded.moments, num_steps=offloaded.num_steps)

    def _save_shard(
        self, shard: ParamShard, previous: OffloadedShard | None, *, has_main_param: bool
    ) -> OffloadedShard:
        """Copy a shard, into the buffers of its previous copy if there is one."""
        residual = main_param = None
        flat = shard.main_param
        place = self._place(shard)
        if has_main_param and shard.parameter.dtype == torch.bfloat16:
            if place is None and previous is not None and previous.residual is not None:
                place = previous.residual.differences
            out = _buffer(flat.numel(), torch.int16, place)
            residual = bf16_residual(flat, shard.weight, out=out)
        elif has_main_param:
            place = previous.main_param if place is None and previous is not None else place
            main_param = _buffer(flat.numel(), torch.float32, place)
            main_param.copy_(flat, non_blocking=True)
        moments = {}
        for name, moment in shard.stored_moments().items() if self.keeps_moments else ():
            moments[name] = _buffer(moment.numel(), moment.dtype, previous and previous.moments.get(name))
            moments[name].copy_(moment, non_blocking=True)
        return OffloadedShard(
            parameter=shard.parameter,
            start=shard.start,
            end=shard.end,
            num_steps=shard.num_steps if self.keeps_moments else 0,
            moments=moments,
            residual=residual,
            main_param=main_param,
        )

    def save_always_active(
        self,
        shards: Mapping[str, ParamShard],
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        group: torch.distributed.ProcessGroup | None,
    ) -> None:
        """Save the state of the always-active `parameters` for the optimizer of the next block.

        `group` is the data-parallel x context-parallel group if the distributed optimizer shards the state, otherwise
        None. The next block's optimizer shards it differently, so each rank saves whole parameters. A collective over
        the group.
        """
        states = {name: (shard.num_steps, shard.tensors()) for name, shard in shards.items()}
        if group is not None:
            mine = {name: (num_steps, sorted(tensors)) for name, (num_steps, tensors) in states.items()}
            contents = {name: each for rank in collectives.gather_objects(mine, group) for name, each in rank.items()}

            def whole(name: str, key: str) -> torch.Tensor:
                shard, start = (states[name][1][key], shards[name].start) if name in shards else (None, 0)
                return collectives.join_shards(shard, start, like=parameters[name], group=group, rank=None).cpu()

            states = {
                name: (contents[name][0], {key: whole(name, key) for key in contents[name][1]}) for name in parameters
            }
        self._always_active = states

    def restore_always_active(self, shards: Mapping[str, ParamShard]) -> None:
        """Copy the state that `save_always_active` saved into the shards of a new optimizer, and drop it."""
        states, self._always_active = self._always_active, {}
        for name, shard in shards.items():
            if name in states:
                num_steps, tensors = states[name]
                sliced = {key: tensor[shard.start : shard.end] for key, tensor in tensors.items()}
                shard.set(sliced, num_steps=num_steps)


def _whole_shard(parameter: torch.nn.Parameter, place: torch.Tensor, exceptions: Sequence[Any]) -> OffloadedShard:
    """Return the offloaded state of a whole parameter. `place` contains its main parameter, for bf16 the differences.

    `exceptions` are the indices and bits of a `Bf16Residual`, by rank.
    """
    residual = None
    if parameter.dtype == torch.bfloat16:
        indices, bits = (torch.cat(column) for column in zip(*exceptions, strict=True))
        residual = Bf16Residual(differences=place, exception_indices=indices, exception_bits=bits)
    main_param = place if residual is None else None
    size = parameter.numel()
    return OffloadedShard(
        parameter=parameter, start=0, end=size, num_steps=0, moments={}, residual=residual, main_param=main_param
    )


def _buffer(num_elements: int, dtype: torch.dtype, previous: torch.Tensor | None) -> torch.Tensor:
    """Return the previous buffer if it fits, otherwise new host memory."""
    if previous is not None and (previous.numel(), previous.dtype) == (num_elements, dtype):
        return previous
    return memory.empty_host_tensor(num_elements, dtype)
