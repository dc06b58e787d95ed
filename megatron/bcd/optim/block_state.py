"""Offloaded state: what is kept of each block in host memory between its phases, and the state of always-active
parameters during a switch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.bcd.optim import low_bit_adam
from megatron.bcd.optim.bf16 import Bf16Residual, bf16_residual
from megatron.bcd.optim.param_shard import MAIN_PARAM, ParamShard
from megatron.bcd.runtime import collectives, device, memory


@dataclass(frozen=True, kw_only=True)
class KeptShard:
    """Offloaded state of elements `start` to `end` of a frozen parameter; all tensors are flat, in host memory."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    num_steps: int
    moments: dict[str, torch.Tensor]
    """As `ParamShard.stored_moments`."""
    residual: Bf16Residual | None
    """In bf16: what the weight lacks of its main parameter."""
    main_param: torch.Tensor | None
    """In fp16: the main parameter."""

    def names(self) -> set[str]:
        """Names of `tensors`."""
        has_main_param = self.residual is not None or self.main_param is not None
        return {*low_bit_adam.names(self.moments), *([MAIN_PARAM] if has_main_param else [])}

    def tensors(self) -> dict[str, torch.Tensor]:
        """As `ParamShard.tensors`: moments, and the main parameter unless it is the weight itself."""
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

    `keeps_moments` is --bcd-optimizer-state host, `keeps_main_params` is --bcd-main-params host. Host memory is
    allocated at a block's first `save` and reused by later ones, without what is kept of the main parameters of
    `places`: that has its place in host memory, flat and of all elements. `are_shared`: all replicas have the
    same ones.
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
        self._blocks: dict[int, dict[str, KeptShard]] = {}
        self._always_active: dict[str, tuple[int, dict[str, torch.Tensor]]] = {}
        """During a switch: the number of steps and the flat tensors of each always-active parameter, whole, on the
        device or in host memory."""

    @property
    def blocks(self) -> Mapping[int, Mapping[str, KeptShard]]:
        """By block and parameter name; the active block's is from the start of its phase."""
        return self._blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory of all blocks."""
        return sum(kept.num_bytes for block in self._blocks.values() for kept in block.values())

    def state(self) -> dict[str, Any]:
        """Copies of all that is kept, in host memory."""
        blocks = {
            block: {name: {**vars(kept), "parameter": None} for name, kept in of_block.items()}
            for block, of_block in self._blocks.items()
        }
        return memory.copy_to_host({"blocks": blocks})

    def set_state(self, state: Mapping[str, Any], parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Load what `state` returned on the same rank of a run of the same layout; `parameters` by name."""
        self._always_active = {}  # the phase's optimizer holds it
        self._blocks = {}
        for block, of_block in state["blocks"].items():
            ones = {name: KeptShard(**{**kept, "parameter": parameters[name]}) for name, kept in of_block.items()}
            self._blocks[block] = {name: self._in_place(kept) for name, kept in ones.items()}

    def _in_place(self, kept: KeptShard) -> KeptShard:
        """With what is kept of the main parameter in its place in host memory, if it has one."""
        place = self._places.get(kept.parameter)
        if place is None:
            return kept
        place = place[kept.start : kept.end]
        if kept.residual is not None:
            return replace(kept, residual=replace(kept.residual, differences=place.copy_(kept.residual.differences)))
        return kept if kept.main_param is None else replace(kept, main_param=place.copy_(kept.main_param))

    def save(self, block: int, shards: Mapping[str, ParamShard], *, without_main_param: Container[str] = ()) -> None:
        """Copy the state of the block's own parameters to host memory, and wait until it is there.

        The main parameters of those in `without_main_param` are kept elsewhere.
        """
        previous = self._blocks.get(block, {})
        with_main_param = {
            name
            for name, shard in shards.items()
            if self.keeps_main_params and shard.has_own_main_param and name not in without_main_param
        }
        self._blocks[block] = {
            name: self._save_shard(shard, previous.get(name), has_main_param=name in with_main_param)
            for name, shard in shards.items()
            if self.keeps_moments or name in with_main_param
        }
        device.synchronize()

    def joined(
        self, parameters: Mapping[str, torch.nn.Parameter], group: torch.distributed.ProcessGroup
    ) -> dict[int, dict[str, KeptShard]]:
        """What all ranks of `group` keep of main parameters in places that they share, by block and name, as if this
        rank kept all; nothing where they keep moments too. A collective over the group."""
        if self.keeps_moments or not self._are_shared:
            return {}
        mine = {
            (block, name): None
            if (residual := shard.residual) is None
            else (residual.exception_indices + shard.start, residual.exception_bits)
            for block, kept in self._blocks.items()
            for name, shard in kept.items()
            if shard.parameter in self._places
        }
        parts = defaultdict[tuple[int, str], list[Any]](list)
        for of_rank in collectives.gather_objects(mine, group):
            for key, part in of_rank.items():
                parts[key].append(part)
        whole = defaultdict[int, dict[str, KeptShard]](dict)
        for (block, name), found in parts.items():
            whole[block][name] = _whole(parameters[name], self._places[parameters[name]], found)
        return whole

    def restore(self, block: int, shards: Mapping[str, ParamShard]) -> None:
        """Copy the state that was saved of the block, if any, into the shards of a new optimizer."""
        for name, kept in self._blocks.get(block, {}).items():
            shard = shards[name]
            assert (shard.start, shard.end) == (kept.start, kept.end), f"{name} is sharded differently than before"
            if kept.residual is not None:
                value = shard.main_param
                kept.residual.restore(shard.weight, main_param=value)
                if shard.is_held:  # else written in place
                    shard.set_main_param(value)
            elif kept.main_param is not None:
                shard.set_main_param(kept.main_param)
            shard.set_stored_moments(kept.moments, num_steps=kept.num_steps)

    def _save_shard(self, shard: ParamShard, previous: KeptShard | None, *, has_main_param: bool) -> KeptShard:
        """Copy a shard into the buffers of its previous copy."""
        residual = main_param = None
        flat = shard.main_param
        place = self._places.get(shard.parameter)
        place = None if place is None else place[shard.start : shard.end]
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
        return KeptShard(
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

        `group` is the data-parallel x context-parallel one if the distributed optimizer shards them, and this a
        collective over it: the next block's optimizer shards them differently, so each rank saves whole parameters.
        Else None.
        """
        states = {name: (shard.num_steps, shard.tensors()) for name, shard in shards.items()}
        if group is not None:
            mine = {name: (num_steps, sorted(tensors)) for name, (num_steps, tensors) in states.items()}
            held = {name: one for rank in collectives.gather_objects(mine, group) for name, one in rank.items()}

            def whole(name: str, tensor_name: str) -> torch.Tensor:
                own, start = (states[name][1][tensor_name], shards[name].start) if name in shards else (None, 0)
                flat = collectives.join_shards(own, start, like=parameters[name], group=group, rank=None)
                return flat.cpu()

            states = {name: (held[name][0], {one: whole(name, one) for one in held[name][1]}) for name in parameters}
        self._always_active = states

    def restore_always_active(self, shards: Mapping[str, ParamShard]) -> None:
        """Copy the state that `save_always_active` saved into the shards of a new optimizer, and drop it."""
        states, self._always_active = self._always_active, {}
        for name, shard in shards.items():
            if name in states:
                num_steps, tensors = states[name]
                sliced = {key: tensor[shard.start : shard.end] for key, tensor in tensors.items()}
                shard.set(sliced, num_steps=num_steps)


def _whole(parameter: torch.nn.Parameter, place: torch.Tensor, exceptions: Sequence[Any]) -> KeptShard:
    residual = None
    if parameter.dtype == torch.bfloat16:
        indices, bits = (torch.cat(column) for column in zip(*exceptions, strict=True))
        residual = Bf16Residual(differences=place, exception_indices=indices, exception_bits=bits)
    main_param = place if residual is None else None
    size = parameter.numel()
    return KeptShard(
        parameter=parameter, start=0, end=size, num_steps=0, moments={}, residual=residual, main_param=main_param
    )


def _buffer(num_elements: int, dtype: torch.dtype, previous: torch.Tensor | None) -> torch.Tensor:
    """The previous buffer if it fits, else new host memory."""
    if previous is not None and (previous.numel(), previous.dtype) == (num_elements, dtype):
        return previous
    return memory.empty_host_tensor(num_elements, dtype)
