"""Offloaded state: the optimizer state of each block in host memory between its phases.

It also carries state into the next optimizer that is built: of always-active parameters through a switch, and of all
parameters from a checkpoint or from another replica group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron.bcd.config import RunConfig
from megatron.bcd.model.host_layers import LOW_BITS, HostLayers
from megatron.bcd.optim import low_bit_adam
from megatron.bcd.optim.bf16 import Bf16Residual, bf16_residual
from megatron.bcd.optim.param_shard import OffloadedShard, ParamShard
from megatron.bcd.optim.parameters import Parameters
from megatron.bcd.optim.state import MAIN_PARAM
from megatron.bcd.runtime import collectives, device, memory, replicas


class BlockStateStore:
    """Optimizer state of this rank between phases.

    Host memory is allocated when a parameter is first saved, and reused afterwards.
    """

    def __init__(self, config: RunConfig, host_layers: HostLayers) -> None:
        self._places = {
            parameter: kinds[LOW_BITS].view(-1) for parameter, kinds in host_layers.places.items() if LOW_BITS in kinds
        }
        """Preallocated flat host buffers for the main parameters of whole parameters."""
        self._are_shared = host_layers.is_shared_by_all
        """Whether all replicas share the memory of `_places`."""
        self._encodes = config.training.adam_moments_dtype == "int8"
        self.keeps_moments = config.bcd.bcd_optimizer_state == "host"
        self.keeps_main_params = config.bcd.bcd_main_params == "host"
        self.shards: dict[str, OffloadedShard] = {}
        """This rank's shards by parameter. Those of the active block are from the start of its phase."""
        self._moved: set[str] = set()
        """Parameters that the next optimizer shards differently; the same on all replicas."""
        self._passing: set[str] = set()
        """Parameters whose state is dropped as soon as an optimizer has it, if the next one steps them."""

    def save(self, shards: Mapping[str, ParamShard], always_active: Parameters) -> None:
        """Save the state at the end of a phase, and wait until it is in host memory.

        The state of always-active parameters is not copied, because the next optimizer will have it.
        """
        for name, shard in shards.items():
            has_main_param = self.keeps_main_params and shard.has_own_main_param
            if name in always_active:
                self.shards[name] = shard.snapshot()
            elif self.keeps_moments or has_main_param:
                self.shards[name] = self._copy(
                    shard.parameter,
                    slice(shard.start, shard.end),
                    main_param=shard.main_param if has_main_param else None,
                    moments=shard.stored_moments() if self.keeps_moments else {},
                    num_steps=shard.num_steps if self.keeps_moments else 0,
                    previous=self.shards.get(name),
                )
        device.synchronize()
        self._passing = set(always_active)
        self._moved |= {name for name, parameter in always_active.items() if replicas.size(parameter) > 1}

    def set(
        self,
        name: str,
        parameter: torch.nn.Parameter,
        tensors: Mapping[str, torch.Tensor],
        num_steps: int,
        start: int | None = None,
    ) -> None:
        """Set this rank's share of a parameter's state: a shard from `start`, or its part of whole tensors.

        The replicas divide whole tensors evenly. A rank without a shard has no tensors.
        """
        is_sharded = replicas.size(parameter) > 1
        if is_sharded:
            self._moved.add(name)
        if not tensors:
            return
        flat = {key: tensor.reshape(-1) for key, tensor in tensors.items()}
        if start is not None:
            part = slice(start, start + next(iter(flat.values())).numel())
        else:
            part = replicas.shard_slice(parameter.numel(), parameter)
            flat = {key: tensor[part] for key, tensor in flat.items()}
        main_param = flat.pop(MAIN_PARAM, None)
        # 8-bit codes share scales, and other elements will when they are sharded differently
        moments = low_bit_adam.encode(flat) if self._encodes and not is_sharded else flat
        self.shards[name] = self._copy(parameter, part, main_param=main_param, moments=moments, num_steps=num_steps)
        self._passing.add(name)

    def restore(self, shards: Mapping[str, ParamShard], parameters: Parameters) -> None:
        """Copy the offloaded state of `parameters`, if any, into the shards of a new optimizer.

        A collective over the replicas of each parameter that is sharded differently than before.
        """
        moved = parameters.keys() & self._moved
        mine = {name: (self.shards[name].num_steps, self.shards[name].names()) for name in moved if name in self.shards}
        ranks = collectives.gather_objects(mine, replicas.group()) if moved else []
        contents = {name: content for rank in ranks for name, content in rank.items()}
        for name in parameters:
            if name in contents:
                self._restore_moved(name, parameters[name], shards.get(name), *contents[name])
            elif name in shards and name in self.shards:
                shards[name].restore(self.shards[name])
            if name in self._moved | self._passing:
                self.shards.pop(name, None)
        self._moved -= parameters.keys()

    def _restore_moved(
        self, name: str, parameter: torch.nn.Parameter, shard: ParamShard | None, num_steps: int, names: list[str]
    ) -> None:
        offloaded, group, tensors = self.shards.get(name), replicas.group(parameter), {}
        for each in names:
            mine = None if offloaded is None else offloaded.read(each, parameter.detach().view(-1))
            start = 0 if offloaded is None else offloaded.start
            whole = collectives.join_shards(mine, start, like=parameter, group=group, rank=None)
            if shard is not None:
                tensors[each] = whole[shard.start : shard.end].clone()
        if shard is not None:
            main_param = tensors.pop(MAIN_PARAM, None)
            joined = OffloadedShard(
                start=shard.start, end=shard.end, num_steps=num_steps, moments=tensors, main_param=main_param
            )
            shard.restore(joined)

    def joined(self, parameters: Parameters) -> dict[str, OffloadedShard]:
        """Return the main parameters in shared memory, as the replicas together wrote them, by name.

        The shards are whole parameters, although each rank has written only its part. Empty if the ranks also store
        moments, which are not shared. A collective over the replicas.
        """
        if self.keeps_moments or not self._are_shared:
            return {}
        exceptions = {
            name: None
            if (residual := self.shards[name].residual) is None
            else (residual.exception_indices + self.shards[name].start, residual.exception_bits)
            for name, parameter in parameters.items()
            if name in self.shards and parameter in self._places
        }
        by_name = defaultdict[str, list[Any]](list)
        for rank in collectives.gather_objects(exceptions, replicas.group()):
            for name, exception in rank.items():
                by_name[name].append(exception)
        return {name: _whole_shard(parameters[name], self._places[parameters[name]], by_name[name]) for name in by_name}

    def _copy(
        self,
        parameter: torch.nn.Parameter,
        part: slice,
        *,
        main_param: torch.Tensor | None,
        moments: Mapping[str, torch.Tensor],
        num_steps: int,
        previous: OffloadedShard | None = None,
    ) -> OffloadedShard:
        """Copy state of a part of a parameter to host memory, into the buffers of its previous copy if there is one."""
        residual = copy = None
        place = self._places[parameter][part] if parameter in self._places else None
        if main_param is not None and parameter.dtype == torch.bfloat16:
            if place is None and previous is not None and previous.residual is not None:
                place = previous.residual.differences
            out = _buffer(main_param.numel(), torch.int16, place)
            residual = bf16_residual(main_param, parameter.detach().view(-1)[part], out=out)
        elif main_param is not None:
            place = previous.main_param if place is None and previous is not None else place
            copy = _buffer(main_param.numel(), torch.float32, place)
            copy.copy_(main_param, non_blocking=True)
        kept = {}
        for name, moment in moments.items():
            kept[name] = _buffer(moment.numel(), moment.dtype, previous and previous.moments.get(name))
            kept[name].copy_(moment, non_blocking=True)
        return OffloadedShard(
            start=part.start, end=part.stop, num_steps=num_steps, moments=kept, residual=residual, main_param=copy
        )


def _whole_shard(parameter: torch.nn.Parameter, place: torch.Tensor, exceptions: Sequence[Any]) -> OffloadedShard:
    """Return the offloaded state of a whole parameter. `place` contains its main parameter, for bf16 the differences.

    `exceptions` are the indices and bits of a `Bf16Residual`, by rank.
    """
    shard = OffloadedShard(start=0, end=parameter.numel(), num_steps=0, moments={})
    if parameter.dtype != torch.bfloat16:
        return replace(shard, main_param=place)
    indices, bits = (torch.cat(column) for column in zip(*exceptions, strict=True))
    residual = Bf16Residual(differences=place, exception_indices=indices, exception_bits=bits)
    return replace(shard, residual=residual)


def _buffer(num_elements: int, dtype: torch.dtype, previous: torch.Tensor | None) -> torch.Tensor:
    """Return the previous buffer if it fits, otherwise new host memory."""
    if previous is not None and (previous.numel(), previous.dtype) == (num_elements, dtype):
        return previous
    return memory.empty_host_tensor(num_elements, dtype)
