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
from megatron.bcd.model.builder import get_host_layers, unwrap_model
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.optim.state import COLUMN_MEANS, MAIN_PARAM, ROW_MEANS, ParamState
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
    mine = dict[str, tuple[set[str], set[int], bool]]()
    for state in active.state():
        is_over = state.block is not None and state.block == active.block and not is_current
        names, steps, _ = mine.setdefault(state.group, (set(), set(), is_over))
        if state.tensors:
            names.update(state.tensors)
            steps.add(int(state.num_steps))
    ranks = collectives.gather_objects(mine)
    summaries = {}
    for key in sorted(set().union(*ranks)):
        parts = [rank[key] for rank in ranks if key in rank]
        names, steps = set().union(*(part[0] for part in parts)), set().union(*(part[1] for part in parts))
        assert len(steps) <= 1, f"parameters of one group, {key}, were stepped {sorted(steps)} times"
        summary: StateSummary = {"names": sorted(names), "num_steps": steps.pop() if steps else 0}
        if any(is_over for *_, is_over in parts):
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
    once: if this rank can read the whole state, the weight `is_constant` until it is written, and the state is
    offloaded or in host memory, it is created when it is written. Until then its entry is on the meta device. The
    means of the rule `factored` are small, and not among these.
    """
    weights, is_on_host = _sharded_weights(active), get_host_layers(active.model).is_on_host
    entries: dict[str, Entry] = {}
    deferred: Deferred = {}
    for state in active.state(joins=True):
        if state.group not in summaries:
            continue
        parameter = state.parameter
        saves = replicas.rank(parameter) == state.saver
        can_wait = is_constant(parameter) and (state.is_resting or is_on_host(parameter))
        for name, shape in state.shapes_of(summaries[state.group]["names"]).items():
            read = state.tensors.get(name)
            if state.is_divided:
                shard, group = read and read(), replicas.group(parameter)
                tensor = collectives.join_shards(
                    shard, state.start, like=parameter, group=group, rank=state.saver
                ).cpu()
            elif not saves:
                continue
            elif can_wait and name not in (ROW_MEANS, COLUMN_MEANS):
                tensor = torch.empty(shape, device="meta")
            else:
                tensor = torch.zeros(shape) if read is None else read().to("cpu", copy=True)
            if saves:
                entry = _entry(active, state.name, weights[state.name], tensor.view(shape), name)
                entries[f"{name}.{state.name}"] = entry
                if tensor.is_meta:
                    expert = _expert_number(active, state.name)
                    key = entry.key if expert is None else expert_key(entry.key, expert)
                    deferred[key] = read or functools.partial(torch.zeros, shape)
    return entries, deferred


def _entry(
    active: ActiveBlock, name: str, weight: Entry, tensor: torch.Tensor, state_name: str, *, replica: int = 0
) -> Entry:
    """Return the checkpoint entry of a tensor of a parameter's state, given the entry of its weight.

    `replica` numbers the data-parallel ranks that save or load the tensor.
    """
    if state_name not in (ROW_MEANS, COLUMN_MEANS):
        entry = make_sharded_optimizer_tensor(weight, tensor, f"{PREFIX}.{state_name}")
        return replace(entry, replica_id=(*entry.replica_id[:-1], replica))  # type: ignore[misc]
    # row means [M] or column means [P, N]: sliced over tensor-parallel ranks if rows or columns are. Experts in one
    # parameter have [E, M] and [E, P, N], and are not sliced
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


_EXPERT = re.compile(r"\.local_experts\.(\d+)\.|\.experts\..*weight(\d+)$")
"""An expert's number on this rank, in a parameter's name."""


def _expert_number(active: ActiveBlock, name: str) -> int | None:
    """Return an expert's number in its layer, given a parameter's name; None if it is not an expert's."""
    match, config = _EXPERT.search(name), active.config
    if match is None:
        return None
    first = parallel_state.get_expert_model_parallel_rank() * (config.num_experts or 0) // config.expert_size
    return first + int(match[1] or match[2])


Portion: TypeAlias = list[tuple[ParamState, StateSummary]]
"""States to load, with the summaries of their groups."""


def portions(active: ActiveBlock, summaries: Mapping[str, StateSummary], *, next_block: int) -> list[Portion]:
    """Divide the state of a checkpoint that this run also has, so that a portion has about `_PORTION` elements.

    A collective. Of blocks other than `next_block` only what they keep between phases is loaded. Ranks load portions
    together, so all get equally many, and the last ones may be empty.
    """
    result, size = [Portion()], 0
    for state in active.state():
        if (summary := summaries.get(state.group)) is None:
            continue
        if state.block not in (None, next_block):
            summary = after_phase(summary, active)
        if shapes := state.shapes_of(summary["names"]):
            result[-1].append((state, summary))
            size += sum(shape.numel() for shape in shapes.values())
        if size >= _PORTION:
            result.append([])
            size = 0
    [most] = max(collectives.gather_integers(len(result)))
    return result + [[]] * (most - len(result))


def requested_state(active: ActiveBlock, portion: Portion) -> dict[str, Entry]:
    """Return empty whole tensors of this rank's state, for Megatron Core's dist_checkpointing to fill."""
    weights = _sharded_weights(active)
    return {
        f"{name}.{state.name}": _entry(
            active,
            state.name,
            weights[state.name],
            torch.empty(shape, dtype=torch.float32),
            name,
            replica=replicas.rank(state.parameter),
        )
        for state, summary in portion
        for name, shape in state.shapes_of(summary["names"]).items()
    }


def _sharded_weights(active: ActiveBlock) -> dict[str, Any]:
    """Return the entries of the weights. Each layer has a separate key, because only some layers have state."""
    return unwrap_model(active.model).sharded_state_dict(metadata={"non_homogeneous_layers": True})
