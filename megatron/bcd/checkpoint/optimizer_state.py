"""Optimizer state by parameter name, independent of the parallel sizes.

Megatron Core's distributed optimizer splits each parameter's state into flat shards, one for each data-parallel rank.
For a checkpoint, the shards of each parameter are gathered on one replica, in turn, and saved in the shape and sharding
of the weight.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

from megatron.bcd.checkpoint.run_state import StateSummary
from megatron.bcd.checkpoint.shard_writer import expert_key
from megatron.bcd.model.builder import get_frozen_weights, unwrap_model
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.optim.block_state import OffloadedShard
from megatron.bcd.optim.param_shard import MAIN_PARAM
from megatron.bcd.optim.state_groups import (
    COLUMN_MEANS,
    ROW_MEANS,
    FactoredMoments,
    OuterMomenta,
    StateGroup,
    StatePart,
    StatePiece,
    state_groups,
)
from megatron.bcd.runtime import collectives, replicas

Entry: TypeAlias = ShardedTensor | ShardedTensorFactory
Deferred: TypeAlias = dict[str, Callable[[], torch.Tensor]]
"""Functions that make tensors when they are written, by their keys in the checkpoint."""
PREFIX = "optimizer"
_PORTION = 1 << 28
"""Elements of state that are loaded at a time: 1 GiB."""


def summarize(active: ActiveBlock, *, is_current: bool) -> dict[str, StateSummary]:
    """Return summaries of the groups that have state, by key. A collective over all ranks.

    `is_current` is False if the active block's phase is over. Then only what --bcd-optimizer-state keeps is counted.
    """
    groups = state_groups(active)
    mine = {}
    for key, group in groups.items():
        pieces = group.pieces().values()
        mine[key] = {name for piece in pieces for name in piece.names()}, {piece.num_steps for piece in pieces}
    ranks = collectives.gather_objects(mine)
    summaries = {}
    for key in sorted(groups):
        names, steps = (set().union(*column) for column in zip(*(rank[key] for rank in ranks), strict=True))
        assert len(steps) <= 1, f"parameters of one group, {key}, were stepped {sorted(steps)} times"
        summary: StateSummary = {"names": sorted(names), "num_steps": steps.pop() if steps else 0}
        if groups[key].block is not None and groups[key].block == active.block and not is_current:
            summary = after_phase(summary, active)
        if summary["names"]:
            summaries[key] = summary
    return summaries


def after_phase(summary: StateSummary, active: ActiveBlock) -> StateSummary:
    """Return the part of a group's state that --bcd-optimizer-state and --bcd-main-params keep after its phase."""
    store = active.offloaded
    names = [
        name for name in summary["names"] if (store.keeps_main_params if name == MAIN_PARAM else store.keeps_moments)
    ]
    return {"names": names, "num_steps": summary["num_steps"] if store.keeps_moments else 0}


def sharded_state(
    active: ActiveBlock, summaries: Mapping[str, StateSummary], *, is_constant: Callable[[torch.Tensor], bool]
) -> tuple[dict[str, Entry], Deferred]:
    """Return this rank's share of the state for Megatron Core's dist_checkpointing, on the CPU.

    A collective over the replicas.

    In bf16 the main parameters of all blocks take twice the bytes of the weights. They are therefore not all created at
    once: if a weight `is_constant` until it is written, and this rank can read all of its offloaded state, that state
    is created when it is written. Until then its entry is on the meta device. The owner of a matrix in host memory can
    read its state.
    """
    weights, groups = _sharded_weights(active), state_groups(active)
    is_on_host = get_frozen_weights(active.model).is_on_host
    entries: dict[str, Entry] = {}
    deferred: Deferred = {}
    for key, summary in summaries.items():
        group = groups[key]
        pieces, joined = group.pieces(), group.joined(replicas.group())
        for index, (name, parameter) in enumerate(group.parameters.items()):
            piece, names = joined.get(name) or pieces.get(name), group.tensor_names(name, summary["names"])
            rank = index % replicas.size(parameter)  # gathers and saves the parameter
            is_whole = replicas.size(parameter) == 1 or name in joined
            can_wait, saves = False, replicas.rank(parameter) == rank
            has_owner = name in active.matrices.matrices and not isinstance(group, OuterMomenta)
            if has_owner:  # which alone has the state, and saves it
                saves = piece is not None
                is_resting = group.block not in (None, active.block) and is_constant(parameter)
                can_wait = is_resting or (is_on_host(parameter) and not isinstance(group, FactoredMoments))
            elif isinstance(piece, OffloadedShard):
                can_wait = is_whole and piece.names() >= set(names) and is_constant(parameter)
                piece = replace(piece, parameter=parameter.detach())  # the parameter may point elsewhere by then
            if can_wait:
                for state_name in names if saves else ():
                    assert piece is not None
                    entry = _entry(active, name, weights[name], torch.empty(parameter.shape, device="meta"), state_name)
                    entries[f"{state_name}.{name}"] = entry
                    expert = _expert_number(active, name)
                    key = entry.key if expert is None else expert_key(entry.key, expert)
                    deferred[key] = functools.partial(_read, piece, state_name)
                continue
            if has_owner:
                shapes = group.shapes(name, names)
                tensors = {each: _read(piece, each).to("cpu", copy=True).view(shapes[each]) for each in names if piece}
            else:
                tensors = _gather(piece, names, parameter, rank=rank, is_sharded=active.core.is_sharded(parameter))
            for state_name, tensor in tensors.items():
                entries[f"{state_name}.{name}"] = _entry(active, name, weights[name], tensor, state_name)
    return entries, deferred


def _gather(
    piece: StatePiece | None, names: list[str], parameter: torch.Tensor, *, rank: int, is_sharded: bool
) -> dict[str, torch.Tensor]:
    """Return whole tensors of a parameter on one `rank` of the replicas, by name; nothing on the others. A collective.

    Replicas that all have the same tensors need not communicate.
    """
    tensors = piece.tensors() if piece else {}
    is_replicated = not (is_sharded or isinstance(piece, StatePart))
    whole = {}
    for name in names:
        tensor = tensors.get(name)
        is_joined = tensor is None or (replicas.size(parameter) > 1 and not is_replicated)
        if is_joined:
            start, replica_group = 0 if piece is None else piece.start, replicas.group(parameter)
            tensor = collectives.join_shards(tensor, start, like=parameter, group=replica_group, rank=rank)
        if replicas.rank(parameter) == rank and tensor is not None:
            whole[name] = tensor.to("cpu", copy=not is_joined).view(parameter.shape)
    return whole


def _entry(
    active: ActiveBlock, name: str, weight: Entry, tensor: torch.Tensor, state_name: str, *, replica: int = 0
) -> Entry:
    """Return the checkpoint entry of a tensor of a parameter's state, given the entry of its weight.

    `replica` numbers the data-parallel ranks that save or load the tensor.
    """
    if state_name not in (ROW_MEANS, COLUMN_MEANS):
        entry = make_sharded_optimizer_tensor(weight, tensor, f"{PREFIX}.{state_name}")
        return replace(entry, replica_id=(*entry.replica_id[:-1], replica))  # type: ignore[misc]
    # row means [M] or column means [P, N]: sliced over tensor-parallel ranks if rows or columns are
    key, layout = f"{PREFIX}.{state_name}.{weight.key}", active.matrices.matrices[name].layout
    dim = 0 if state_name == ROW_MEANS else 1
    tensor = tensor.detach().to("cpu", copy=True)
    if isinstance(weight, ShardedTensorFactory) and dim == 0:  # rows of a gate and of what it multiplies
        return replace(weight, key=key, data=tensor, replica_id=(*weight.replica_id[:-1], replica))  # type: ignore[misc]
    expert = _expert_number(active, name)
    if expert is not None:  # a layer's experts have one key, and their entries an axis that these lack
        key += f".{expert}"
    rank, size = weight.replica_id[1], 1  # type: ignore[index]
    if layout.group is not None:
        rank, size = layout.group.rank(), layout.group.size()
    is_sliced = layout.sharded_dim == dim
    return ShardedTensor.from_rank_offsets(
        key,
        tensor,
        *([(tensor.dim() - 1, rank, size)] if is_sliced else []),
        replica_id=(weight.replica_id[0], 0 if is_sliced else rank, replica),  # type: ignore[index]
        allow_shape_mismatch=getattr(weight, "allow_shape_mismatch", False),
    )


def _read(piece: StatePiece, state_name: str) -> torch.Tensor:
    return piece.read[state_name]() if isinstance(piece, StatePart) else piece.tensors()[state_name]


_EXPERT = re.compile(r"\.local_experts\.(\d+)\.|\.experts\..*weight(\d+)$")
"""An expert's number on this rank, in a parameter's name."""


def _expert_number(active: ActiveBlock, name: str) -> int | None:
    """Return an expert's number in its layer, given a parameter's name; None if it is not an expert's."""
    match, config = _EXPERT.search(name), active.config
    if match is None:
        return None
    first = parallel_state.get_expert_model_parallel_rank() * (config.num_experts or 0) // config.expert_size
    return first + int(match[1] or match[2])


Portion: TypeAlias = list[tuple[StateGroup, StateSummary, str]]
"""Names of parameters, with their groups and the groups' summaries."""


def portions(active: ActiveBlock, summaries: Mapping[str, StateSummary]) -> list[Portion]:
    """Divide the groups of a checkpoint that this run also has, so that a portion has about `_PORTION` elements.

    A collective. Only layers in host memory are divided. Ranks load portions together, so all get equally many, and
    the last ones may be empty.
    """
    groups = state_groups(active)
    known = [(groups[key], summary) for key, summary in summaries.items() if key in groups]
    result: list[Portion] = [[]]
    size, is_divided = 0, get_frozen_weights(active.model).is_used
    for group, summary in known:
        for name in group.parameters:
            result[-1].append((group, summary, name))
            size += sum(shape.numel() for shape in group.shapes(name, summary["names"]).values())
            if is_divided and size >= _PORTION:
                result.append([])
                size = 0
    [most] = max(collectives.gather_integers(len(result)))
    return result + [[]] * (most - len(result))


def requested_state(active: ActiveBlock, portion: Portion) -> dict[str, Entry]:
    """Return empty whole tensors of this rank's state, for Megatron Core's dist_checkpointing to fill."""
    weights = _sharded_weights(active)
    return {
        f"{state_name}.{name}": _entry(
            active,
            name,
            weights[name],
            torch.empty(shape, dtype=torch.float32),
            state_name,
            replica=replicas.rank(group.parameters[name]),
        )
        for group, summary, name in portion
        for state_name, shape in group.shapes(name, summary["names"]).items()
    }


def set_state(portion: Portion, loaded: Mapping[str, torch.Tensor]) -> None:
    """Set this rank's share of the state from the tensors that `requested_state` asked for."""
    for group, summary, name in portion:
        tensors = {key: loaded[f"{key}.{name}"] for key in group.shapes(name, summary["names"])}
        group.set(name, tensors, summary["num_steps"])


def _sharded_weights(active: ActiveBlock) -> dict[str, Any]:
    """Return the entries of the weights. Each layer has a separate key, because only some layers have state."""
    return unwrap_model(active.model).sharded_state_dict(metadata={"non_homogeneous_layers": True})
