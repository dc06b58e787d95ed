"""What is kept of each block between its phases, and of the parameters that are active in all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.bcd.optim.bf16_residual import Bf16Residual, bf16_residual, restore
from megatron.bcd.optim.param_shard import MAIN_PARAM, ParamShard
from megatron.bcd.runtime import collectives, device, memory


@dataclass(frozen=True, kw_only=True)
class KeptShard:
    """Of one part of a frozen parameter: all tensors flat, in host memory."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    steps: int
    moments: dict[str, torch.Tensor]
    low: Bf16Residual | None
    """bf16: what the weight lacks of its main parameter."""
    main_param: torch.Tensor | None
    """fp16: the whole of it."""

    def num_steps(self) -> int:
        return self.steps

    def names(self) -> set[str]:
        """Of `tensors`."""
        return {*self.moments, *([] if self.low is None and self.main_param is None else [MAIN_PARAM])}

    def tensors(self) -> dict[str, torch.Tensor]:
        """As `Part.tensors`: moments, and the main parameter where it is not the weight itself."""
        tensors = dict(self.moments)
        if self.main_param is not None:
            tensors[MAIN_PARAM] = self.main_param
        if self.low is not None:
            main_param = torch.empty(self.end - self.start, dtype=torch.float32)
            restore(self.low, self.parameter.detach().view(-1)[self.start : self.end].cpu(), main_param=main_param)
            tensors[MAIN_PARAM] = main_param
        return tensors

    @property
    def num_bytes(self) -> int:
        tensors = [*self.moments.values(), *([] if self.main_param is None else [self.main_param])]
        return sum(tensor.nbytes for tensor in tensors) + (0 if self.low is None else self.low.num_bytes)


class BlockStateStore:
    """This rank's kept state. `keep` copies it out of a block's optimizer, `bring_back` into its next one.

    With `moments` (--bcd-optimizer-state host) everything is kept; without (reset) main parameters only. Host memory is
    allocated at a block's first `keep` and written over at later ones.
    """

    def __init__(self, *, moments: bool) -> None:
        self.moments = moments
        self._blocks: dict[int, dict[str, KeptShard]] = {}
        self._always: dict[str, _Whole] = {}

    @property
    def blocks(self) -> Mapping[int, Mapping[str, KeptShard]]:
        """By block and the parameter's name; the active block's is what it began its phase with."""
        return self._blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory, all blocks together."""
        return sum(kept.num_bytes for block in self._blocks.values() for kept in block.values())

    def keep(self, block: int, shards: Mapping[str, ParamShard]) -> None:
        """Of the block's own parameters. Waits once for all copies."""
        before = self._blocks.get(block, {})
        self._blocks[block] = {
            name: self._copy_of(shard, before.get(name))
            for name, shard in shards.items()
            if self.moments or shard.has_own_main_param
        }
        device.synchronize()

    def bring_back(self, block: int, shards: Mapping[str, ParamShard]) -> None:
        """Into a new optimizer of the block; nothing where the block was not kept."""
        for name, kept in self._blocks.get(block, {}).items():
            shard = shards[name]
            assert (shard.start, shard.end) == (kept.start, kept.end), f"{name} is cut in another way than before"
            if kept.low is not None:
                restore(kept.low, shard.weight, main_param=shard.main_param.data.view(-1))
            whole = {} if kept.main_param is None else {MAIN_PARAM: kept.main_param}
            shard.set(kept.moments | whole, num_steps=kept.steps)

    def _copy_of(self, shard: ParamShard, before: KeptShard | None) -> KeptShard:
        low = main_param = None
        flat = shard.main_param.detach().reshape(-1)
        if shard.has_own_main_param and shard.parameter.dtype == torch.bfloat16:
            into = _buffer(flat.numel(), torch.int16, before and before.low and before.low.differences)
            low = bf16_residual(flat, shard.weight, into=into)
        elif shard.has_own_main_param:
            main_param = _buffer(flat.numel(), torch.float32, before and before.main_param)
            main_param.copy_(flat, non_blocking=True)
        moments = {}
        for name, moment in shard.moments().items() if self.moments else ():
            moments[name] = _buffer(moment.numel(), moment.dtype, before and before.moments.get(name))
            moments[name].copy_(moment, non_blocking=True)
        return KeptShard(
            parameter=shard.parameter,
            start=shard.start,
            end=shard.end,
            steps=shard.num_steps() if self.moments else 0,
            moments=moments,
            low=low,
            main_param=main_param,
        )

    def keep_always_active(
        self,
        shards: Mapping[str, ParamShard],
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        group: torch.distributed.ProcessGroup | None,
    ) -> None:
        """Of the parameters that the next block's optimizer will have again.

        Where the distributed optimizer cuts them, `group` is its data-parallel group, and this is a collective of it:
        with the next block they are cut at other places, so each rank takes the whole. Else `group` is None.
        """
        cut = {name: _Whole(steps=shard.num_steps(), tensors=shard.tensors()) for name, shard in shards.items()}
        self._always = cut if group is None else _put_together(cut, shards, parameters, group)

    def bring_back_always_active(self, shards: Mapping[str, ParamShard]) -> None:
        for name, whole in self._always.items():
            if (shard := shards.get(name)) is not None:
                tensors = {state: tensor[shard.start : shard.end] for state, tensor in whole.tensors.items()}
                shard.set(tensors, num_steps=whole.steps)
        self._always = {}


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """Of a whole parameter: flat tensors, on the device or in host memory, for the time of a switch."""

    steps: int
    tensors: dict[str, torch.Tensor]


def _put_together(
    cut: Mapping[str, _Whole],
    shards: Mapping[str, ParamShard],
    parameters: Mapping[str, torch.nn.Parameter],
    group: torch.distributed.ProcessGroup,
) -> dict[str, _Whole]:
    """Each parameter's tensors whole on every rank of the group, in host memory."""
    mine: set[tuple[Any, ...]] = {(one.steps, *one.tensors) for one in cut.values()}
    kinds = mine.union(*collectives.gather_objects(mine, group))
    if not kinds:
        return {}
    assert len(kinds) == 1, f"always-active parameters were not stepped together: {kinds}"
    steps, *names = kinds.pop()
    wholes: dict[str, _Whole] = {}
    for name, parameter in parameters.items():
        wholes[name] = _Whole(steps=steps, tensors={})
        for state in names:
            flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            if name in cut:
                flat[shards[name].start : shards[name].end] = cut[name].tensors[state]
            # each element comes from one rank: as integers, even -0.0 stays what it is
            torch.distributed.all_reduce(flat.view(torch.int32), group=group)
            wholes[name].tensors[state] = flat.cpu()
    return wholes


def _buffer(num_elements: int, dtype: torch.dtype, before: torch.Tensor | None) -> torch.Tensor:
    """Host memory: what was allocated before, where it fits."""
    if before is not None and (before.numel(), before.dtype) == (num_elements, dtype):
        return before
    return memory.empty_in_host_memory(num_elements, dtype)
