"""Optimizer state by parameter name, independent of the parallel sizes: of the active block, of blocks whose state is
kept, and of always-active parameters.

Megatron Core's distributed optimizer splits each parameter's state into flat shards, one per data-parallel rank. For a
checkpoint, the shards of a parameter are gathered on one of the replicas (parameters take turns), and
saved in the shape and sharding of the weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

from megatron.bcd.checkpoint.run_state import StateSummary
from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.optim.block_state import KeptShard
from megatron.bcd.optim.matrix_optimizer import MOMENTUM
from megatron.bcd.optim.param_shard import MAIN_PARAM, ParamShard
from megatron.bcd.runtime import collectives, replicas

ALWAYS = "always"
"""Owner of the always-active parameters."""
MATRICES = "matrices"
"""Owner of the main parameters of all bf16 matrices that rest in some phase, or are Muon's."""
OUTER = "outer"
"""Owner of the outer momenta of replica groups, of all parameters."""
FACTORED = "factored "
"""With a block's number, "no block" or "embedding", owner of the second moments of the rule `factored`."""
_NO_BLOCK, _EMBEDDING = "no block", "embedding"
_MOMENTUM = "momentum "
"""With a block's number, owner of Muon's momenta; all other owners are block numbers. An owner's parameters step
together, and have tensors of the same names."""
Entry: TypeAlias = ShardedTensor | ShardedTensorFactory
Later: TypeAlias = dict[str, Callable[[], torch.Tensor]]
"""What makes a tensor that is to be written, by its key in the checkpoint."""
PREFIX = "optimizer"
_ROW_MEANS, _COLUMN_MEANS = "exp_avg_sq_row", "exp_avg_sq_col"
"""Names of the second moments of the rule `factored` in checkpoints."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One tensor of a parameter's state: whole on one data-parallel rank, or a shard on each."""

    name: str
    tensor: torch.Tensor
    start: int = 0
    is_whole: bool = True
    is_part_of_replicas: bool = False
    """A part of `replicas.shard_slice`, whatever the optimizer shards."""
    num_steps: int = 0

    def names(self) -> set[str]:
        return {self.name}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {self.name: self.tensor.detach().float().reshape(-1)}


@dataclass(frozen=True, kw_only=True)
class _Factors:
    """Second moments of a matrix on its owner; shapes as in `update_rules.split_factors`."""

    num_steps: int
    held: Mapping[str, torch.Tensor]

    def names(self) -> set[str]:
        return set(self.held)


_Held: TypeAlias = Mapping[str, ParamShard | KeptShard | _Part]


def _held(active: ActiveBlock) -> dict[str, _Held]:
    """This rank's share of each owner's state, by owner and parameter name."""
    held: dict[str, _Held] = {str(block): kept for block, kept in active.kept.blocks.items()}
    if active.block is not None:
        held[str(active.block)] = active.own_shards()
    held[ALWAYS] = active.always_active_shards()
    outer: dict[str, _Part] = {}
    for name, tensor in active.outer_momenta.items():
        start = replicas.shard_slice(active.parameters.all()[name].numel()).start
        outer[name] = _Part(name=OUTER, tensor=tensor, start=start, is_whole=False, is_part_of_replicas=True)
    return held | _held_by_matrix_optimizer(active) | {OUTER: outer}


def _held_by_matrix_optimizer(active: ActiveBlock) -> dict[str, _Held]:
    matrices = active.matrices
    if matrices is None:
        return {}
    by_core = {} if active.block is None or active.is_muon else active.parameters.of_block(active.block)
    main_params = {
        name: _Part(name=MAIN_PARAM, tensor=tensor)
        for name, tensor in matrices.main_params().items()
        if name not in by_core
    }
    for name, shard in active.own_shards().items() if active.block is not None else ():
        if name in matrices.matrices and shard.has_own_main_param:
            main_params[name] = _Part(name=MAIN_PARAM, tensor=shard.main_param, start=shard.start, is_whole=False)
    held: dict[str, _Held] = {MATRICES: main_params}
    for block in range(active.partition.num_blocks):
        of_block = active.parameters.of_block(block)
        held[f"{_MOMENTUM}{block}"] = {
            name: _Part(name=MOMENTUM, tensor=tensor) for name, tensor in matrices.momenta.items() if name in of_block
        }
    return held


def _held_factors(active: ActiveBlock) -> dict[str, Mapping[str, _Factors]]:
    """Second moments that this rank holds, by owner and parameter name."""
    if (matrices := active.matrices) is None:
        return {}
    owners = [f"{FACTORED}{which}" for which in (_NO_BLOCK, _EMBEDDING, *range(active.partition.num_blocks))]
    return {
        owner: {
            name: _Factors(num_steps=int(steps), held={_ROW_MEANS: rows, _COLUMN_MEANS: columns})
            for name in _parameters(active, owner)
            if name in matrices.factors
            for rows, columns, steps in [matrices.split_factors(name, matrices.factors[name])]
        }
        for owner in owners
    }


def summarize(active: ActiveBlock, *, is_current: bool) -> dict[str, StateSummary]:
    """Summaries of the owners that have state. A collective over all ranks.

    `is_current` is False if the active block's phase is over: then only what --bcd-optimizer-state keeps is counted.
    """
    by_owner: dict[str, Mapping[str, Any]] = {**_held(active), **_held_factors(active)}
    mine = {
        owner: ({name for one in held.values() for name in one.names()}, {one.num_steps for one in held.values()})
        for owner, held in by_owner.items()
    }
    ranks = collectives.gather_objects(mine)
    summaries = {}
    for owner in sorted(set().union(*ranks)):
        held = [rank[owner] for rank in ranks if owner in rank]
        names, steps = (set().union(*column) for column in zip(*held, strict=True))
        assert len(steps) <= 1, f"parameters of one owner, {owner}, were stepped {sorted(steps)} times"
        summary: StateSummary = {"names": sorted(names), "num_steps": steps.pop() if steps else 0}
        if owner in (str(active.block), f"{_MOMENTUM}{active.block}") and not is_current:
            summary = as_kept(summary, active)
        if summary["names"]:
            summaries[owner] = summary
    return summaries


def block_of(owner: str) -> int | None:
    """The block in whose phases alone these are held on the device; None for other owners."""
    if owner in (ALWAYS, MATRICES, OUTER) or owner.startswith(FACTORED):
        return None
    return int(owner.removeprefix(_MOMENTUM))


def needs_build(owner: str) -> bool:
    """Whether offloaded state of the owner is set through the optimizer of its block."""
    return block_of(owner) is not None and not owner.startswith(_MOMENTUM)


def as_kept(summary: StateSummary, active: ActiveBlock) -> StateSummary:
    """What --bcd-optimizer-state and --bcd-main-params keep of an owner's state at the end of its phase."""
    kept = active.kept
    names = [
        name for name in summary["names"] if (kept.keeps_main_params if name == MAIN_PARAM else kept.keeps_moments)
    ]
    return {"names": names, "num_steps": summary["num_steps"] if kept.keeps_moments else 0}


def sharded_state(
    active: ActiveBlock, summaries: Mapping[str, StateSummary], *, is_constant: Callable[[torch.Tensor], bool]
) -> tuple[dict[str, Entry], Later]:
    """This rank's share of the state for Megatron Core's dist_checkpointing, on the CPU. A collective over the
    replicas.

    What is kept of weights that have no replica, or whose replicas share it, and that are `is_constant` until it is
    written is on the meta device, and made when it is written: in bf16 the main parameters of all blocks take twice the
    bytes of the weights.
    """
    group = replicas.group()
    sharded = _sharded_weights(active)
    parameters = dict(unwrap_model(active.model).named_parameters())
    joined = {str(block): whole for block, whole in active.kept.joined(parameters, group).items()}
    joined.pop(str(active.block), None)  # of its last phase
    held = _held(active)
    entries = _entries_of_factors(active, sharded)
    later: Later = {}
    for owner, summary in summaries.items():
        parameters_of_owner = {} if owner.startswith(FACTORED) else _parameters(active, owner)
        for index, (name, parameter) in enumerate(parameters_of_owner.items()):
            rank = index % group.size()  # holds the whole tensor, and saves it
            shard = joined.get(owner, {}).get(name) or held.get(owner, {}).get(name)
            state_names = _state_names(active, owner, summary, name)
            is_whole = group.size() == 1 or name in joined.get(owner, {})
            is_whole = is_whole and shard is not None and shard.names().issuperset(state_names)
            if is_whole and isinstance(shard, KeptShard) and is_constant(parameter):
                shard = replace(shard, parameter=parameter.detach())  # which may point elsewhere by then
                for state_name in state_names if group.rank() == rank else ():
                    entry = _entry(sharded[name], torch.empty(parameter.shape, device="meta"), state_name)
                    entries[f"{state_name}.{name}"] = entry
                    later[entry.key] = functools.partial(_tensor, shard, state_name)
                continue
            tensors = shard.tensors() if shard else {}
            is_joined_part = isinstance(shard, _Part) and (shard.is_whole or shard.is_part_of_replicas)
            is_shared = active.is_sharded or is_joined_part
            for state_name in state_names:
                tensor = tensors.get(state_name)
                is_joined = tensor is None or (is_shared and group.size() > 1)
                if is_joined:
                    start = 0 if shard is None else shard.start
                    tensor = collectives.join_shards(tensor, start, like=parameter, group=group, rank=rank)
                if group.rank() == rank and tensor is not None:
                    whole = tensor.to("cpu", copy=not is_joined).view(parameter.shape)
                    entries[f"{state_name}.{name}"] = _entry(sharded[name], whole, state_name)
    return entries, later


def _entry(weight: Entry, state: torch.Tensor, state_name: str) -> Entry:
    entry = make_sharded_optimizer_tensor(weight, state, f"{PREFIX}.{state_name}")
    return replace(entry, replica_id=(*entry.replica_id[:-1], 0))  # type: ignore[misc]


def _entries_of_factors(active: ActiveBlock, sharded: Mapping[str, Entry]) -> dict[str, Entry]:
    """Second moments that this rank holds."""
    return {
        f"{state_name}.{name}": _entry_of_factors(active, name, sharded[name], tensor, state_name, replica=0)
        for factors in _held_factors(active).values()
        for name, of_matrix in factors.items()
        for state_name, tensor in of_matrix.held.items()
    }


def _entry_of_factors(
    active: ActiveBlock, name: str, weight: Entry, tensor: torch.Tensor, state_name: str, *, replica: int
) -> Entry:
    """Row means [M] or column means [P, N] of a matrix; they are sliced over tensor-parallel ranks if its rows or its
    columns are. `replica` numbers the data-parallel ranks that save or load them."""
    assert active.matrices is not None
    key, layout = f"{PREFIX}.{state_name}.{weight.key}", active.matrices.matrices[name].layout
    dim = 0 if state_name == _ROW_MEANS else 1
    tensor = tensor.detach().to("cpu", copy=True)
    if isinstance(weight, ShardedTensorFactory) and dim == 0:  # rows of a gate and of what it multiplies
        return replace(weight, key=key, data=tensor, replica_id=(*weight.replica_id[:-1], replica))  # type: ignore[misc]
    rank, size = (0, 1) if layout.group is None else (layout.group.rank(), layout.group.size())
    is_sliced = layout.sharded_dim == dim
    return ShardedTensor.from_rank_offsets(
        key,
        tensor,
        *([(tensor.dim() - 1, rank, size)] if is_sliced else []),
        replica_id=(weight.replica_id[0], 0 if is_sliced else rank, replica),  # type: ignore[index]
        allow_shape_mismatch=getattr(weight, "allow_shape_mismatch", False),
    )


def _tensor(shard: KeptShard, state_name: str) -> torch.Tensor:
    return shard.tensors()[state_name]


def _parameters(active: ActiveBlock, owner: str) -> dict[str, torch.nn.Parameter]:
    parameters, block = active.parameters, block_of(owner)
    if owner == MATRICES:
        return parameters.matrices()
    if owner == OUTER:
        return parameters.all()
    if owner.startswith(FACTORED):
        return _factored_matrices(active, owner.removeprefix(FACTORED))
    if block is None:
        return parameters.always_active()
    of_block = parameters.of_block(block)
    if not owner.startswith(_MOMENTUM):
        is_muon_on = active.matrices is not None and active.is_muon
        return {name: one for name, one in of_block.items() if not (is_muon_on and name in parameters.matrices())}
    return {name: one for name, one in of_block.items() if name in parameters.matrices()}


def _factored_matrices(active: ActiveBlock, which: str) -> dict[str, torch.nn.Parameter]:
    """None if the rule of this run is another one than the checkpoint's."""
    if which == _EMBEDDING:
        return active.parameters.outside_layers()
    block = None if which == _NO_BLOCK else int(which)
    return active.parameters.stateless_of(block) if active.has_factored_layers else {}


def _state_names(active: ActiveBlock, owner: str, summary: StateSummary, name: str) -> list[str]:
    """Names of a parameter's tensors: main parameters of matrices have an owner of their own."""
    if owner == MATRICES or active.matrices is None or name not in active.matrices.matrices:
        return summary["names"]
    return [state_name for state_name in summary["names"] if state_name != MAIN_PARAM]


def requested_state(active: ActiveBlock, summaries: Mapping[str, StateSummary]) -> dict[str, Entry]:
    """Whole tensors for the state of this rank's parameters, for Megatron Core's dist_checkpointing to fill."""
    sharded = _sharded_weights(active)
    factors = {
        f"{state_name}.{name}": _entry_of_factors(
            active, name, sharded[name], tensor, state_name, replica=replicas.group().rank()
        )
        for owner in summaries
        if owner.startswith(FACTORED) and active.matrices is not None
        for name in _parameters(active, owner)
        for state_name, tensor in zip((_ROW_MEANS, _COLUMN_MEANS), active.matrices.new_factors(name)[:2], strict=True)
    }
    return factors | {
        f"{state_name}.{name}": make_sharded_optimizer_tensor(
            sharded[name], torch.empty(parameter.shape, dtype=torch.float32), f"{PREFIX}.{state_name}"
        )
        for owner, summary in summaries.items()
        if not owner.startswith(FACTORED)
        for name, parameter in _parameters(active, owner).items()
        for state_name in _state_names(active, owner, summary, name)
    }


def set_state(active: ActiveBlock, summaries: Mapping[str, StateSummary], loaded: Mapping[str, torch.Tensor]) -> None:
    """Copy this rank's shards of the active block, of always-active parameters and of the matrix optimizer from what
    was loaded."""
    held = _held(active)
    for owner, summary in summaries.items():
        if owner == OUTER:
            for name, parameter in _parameters(active, owner).items():
                part = replicas.shard_slice(parameter.numel())
                active.outer_momenta[name] = loaded[f"{OUTER}.{name}"].reshape(-1)[part].clone()
            continue
        if owner.startswith(FACTORED):
            for name in _parameters(active, owner):
                assert active.matrices is not None
                means = (loaded[f"{state_name}.{name}"] for state_name in (_ROW_MEANS, _COLUMN_MEANS))
                active.matrices.set_factors(name, *means, num_steps=summary["num_steps"])
            continue
        if owner == MATRICES or owner.startswith(_MOMENTUM):
            _set_matrices(active, owner, loaded)
            continue
        for name, shard in held[owner].items():
            assert isinstance(shard, ParamShard), f"{owner} is not active"
            tensors = {
                state_name: loaded[f"{state_name}.{name}"].reshape(-1)[shard.start : shard.end]
                for state_name in _state_names(active, owner, summary, name)
            }
            shard.set(tensors, num_steps=summary["num_steps"])


def _set_matrices(active: ActiveBlock, owner: str, loaded: Mapping[str, torch.Tensor]) -> None:
    matrices, shards = active.matrices, active.own_shards() if active.block is not None else {}
    assert matrices is not None, "the summary is of a run with a matrix optimizer"
    for name, parameter in _parameters(active, owner).items():
        if owner != MATRICES:
            matrices.set_momentum(name, loaded[f"{MOMENTUM}.{name}"])
        elif name in shards:  # Megatron Core's optimizer steps it now
            shard = shards[name]
            shard.set_main_param(loaded[f"{MAIN_PARAM}.{name}"].reshape(-1)[shard.start : shard.end])
        elif name not in active.parameters.of_block(-1 if active.block is None else active.block) or active.is_muon:
            matrices.set_main_param(name, loaded[f"{MAIN_PARAM}.{name}"].view(parameter.shape))


def _sharded_weights(active: ActiveBlock) -> dict[str, Entry]:
    """Each layer under a key of its own, because only some layers have state."""
    return unwrap_model(active.model).sharded_state_dict(metadata={"non_homogeneous_layers": True})
