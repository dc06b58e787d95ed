"""The active block's optimizer state by parameter name, independent of the parallel layout.

Megatron Core's distributed optimizer cuts each parameter's state into flat parts, one per data-parallel rank. For a
checkpoint the parts of a parameter are put together on one rank of the data-parallel group, another one for each
parameter in turn, and saved in the shape and sharding of the weight itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron.bcd.active_set import ActiveSet
from megatron.bcd.models import gpt_of

MASTER = "master"
Entry: TypeAlias = ShardedTensor | ShardedTensorFactory
PREFIX = "optimizer"


@dataclass(frozen=True, kw_only=True)
class Part:
    """What this rank holds of one active parameter's state: elements `start` to `end` of the flat parameter."""

    start: int
    end: int
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    master: torch.Tensor
    """What the optimizer steps; in fp32 it is the weight itself."""

    @property
    def state(self) -> dict[str, Any]:
        return self.optimizer.state[self.master]

    def tensors(self, *, with_master: bool) -> dict[str, torch.Tensor]:
        """By name, flat: Adam's moments, and the master where it is not the weight itself."""
        tensors = {name: value for name, value in self.state.items() if torch.is_tensor(value) and name != "step"}
        if with_master:
            tensors[MASTER] = self.master
        return {name: tensor.detach().reshape(-1) for name, tensor in tensors.items()}

    def num_steps(self) -> int:
        """Steps that this state has seen; PyTorch keeps it by parameter, Apex and Transformer Engine by group."""
        step = self.state.get("step", self.group.get("step", 0))
        return int(step.item()) if torch.is_tensor(step) else int(step)

    def set(self, tensors: Mapping[str, torch.Tensor], *, num_steps: int) -> None:
        """Take over flat tensors of this part, and the number of steps."""
        for name, tensor in tensors.items():
            if name == MASTER:
                self.master.data.copy_(tensor.view_as(self.master))
            else:
                self.state[name] = tensor.to(self.master.device, copy=True).view_as(self.master)
        if not num_steps:  # masters only, of a phase before its first step: Adam sets up where it finds nothing
            return
        if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW):
            self.state["step"] = torch.tensor(float(num_steps), dtype=torch.float32)
        else:
            self.group["step"] = num_steps


def parts(active: ActiveSet) -> dict[torch.nn.Parameter, Part]:
    """This rank's part of every active parameter of which it holds some."""
    found: dict[torch.nn.Parameter, Part] = {}
    for optimizer in active.optimizers():
        if optimizer.is_stub_optimizer:
            continue
        groups = optimizer.optimizer.param_groups
        if isinstance(optimizer, DistributedOptimizer):
            for parameter, (group, order) in optimizer.model_param_group_index_map.items():
                where = optimizer._get_model_param_range_map(parameter)["param"]
                found[parameter] = Part(
                    start=where.start,
                    end=where.end,
                    optimizer=optimizer.optimizer,
                    group=groups[group],
                    master=groups[group]["params"][order],
                )
            continue
        masters = {id(master): group for group in groups for master in group["params"]}
        for parameter in active.active_parameters().values():
            master = getattr(parameter, "main_param", parameter)
            if id(master) in masters:
                found[parameter] = Part(
                    start=0,
                    end=parameter.numel(),
                    optimizer=optimizer.optimizer,
                    group=masters[id(master)],
                    master=master,
                )
    return found


@dataclass(frozen=True, kw_only=True)
class StateSummary:
    """What there is to save, the same on every rank."""

    names: tuple[str, ...]
    """Of the tensors that each active parameter has: exp_avg, exp_avg_sq, master; none before the first step."""
    num_steps: int


def summarize(active: ActiveSet) -> StateSummary:
    """A collective over all ranks: one that holds nothing of the block asks the others."""
    mine = parts(active).values()
    names = {name for part in mine for name in part.tensors(with_master=active.has_own_masters)}
    steps = {part.num_steps() for part in mine}
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, (names, steps))
    all_steps = set().union(*(rank[1] for rank in ranks))
    assert len(all_steps) <= 1, f"one block's parameters were stepped {sorted(all_steps)} times"
    return StateSummary(
        names=tuple(sorted(set().union(*(rank[0] for rank in ranks)))), num_steps=all_steps.pop() if all_steps else 0
    )


def sharded_state(active: ActiveSet, summary: StateSummary) -> dict[str, Entry]:
    """This rank's share of the state for Megatron Core's dist_checkpointing, on the CPU; a collective over the
    data-parallel group."""
    group = parallel_state.get_data_parallel_group()
    sharded = _sharded_weights(active)
    mine = parts(active)
    is_cut = any(isinstance(optimizer, DistributedOptimizer) for optimizer in active.optimizers())
    entries: dict[str, Entry] = {}
    for index, (name, parameter) in enumerate(active.active_parameters().items()):
        owner = index % group.size()
        part = mine.get(parameter)
        tensors = part.tensors(with_master=active.has_own_masters) if part else {}
        for state_name in summary.names:
            whole = _put_together(parameter, part, tensors.get(state_name), owner=owner, group=group, is_cut=is_cut)
            if whole is not None:
                entries[f"{state_name}.{name}"] = _entry(sharded[name], whole, state_name, is_main=True)
    return entries


def _put_together(
    parameter: torch.nn.Parameter,
    part: Part | None,
    tensor: torch.Tensor | None,
    *,
    owner: int,
    group: torch.distributed.ProcessGroup,
    is_cut: bool,
) -> torch.Tensor | None:
    """The whole tensor on rank `owner` of the group, None on the others."""
    if tensor is not None and (group.size() == 1 or not is_cut):
        return tensor.to("cpu", copy=True).view(parameter.shape) if group.rank() == owner else None
    flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if tensor is not None and part is not None:
        flat[part.start : part.end] = tensor
    bits = flat.view(torch.int32)  # each element comes from one rank: as integers, even -0.0 stays what it is
    torch.distributed.reduce(bits, dst=torch.distributed.get_global_rank(group, owner), group=group)
    return flat.cpu().view(parameter.shape) if group.rank() == owner else None


def requested_state(active: ActiveSet, names: tuple[str, ...]) -> dict[str, Entry]:
    """The whole state of this rank's active parameters, to be filled by Megatron Core's dist_checkpointing."""
    sharded = _sharded_weights(active)
    return {
        f"{state_name}.{name}": _entry(
            sharded[name], torch.empty(parameter.shape, dtype=torch.float32), state_name, is_main=False
        )
        for name, parameter in active.active_parameters().items()
        for state_name in names
    }


def take_over(active: ActiveSet, summary: StateSummary, loaded: Mapping[str, torch.Tensor]) -> None:
    """Cut this rank's parts out of what was loaded."""
    if not summary.names:
        return
    names = {parameter: name for name, parameter in active.active_parameters().items()}
    for parameter, part in parts(active).items():
        tensors = {
            state_name: loaded[f"{state_name}.{names[parameter]}"].reshape(-1)[part.start : part.end]
            for state_name in summary.names
        }
        part.set(tensors, num_steps=summary.num_steps)


def _entry(weight: Entry, tensor: torch.Tensor, state_name: str, *, is_main: bool) -> Entry:
    entry = make_sharded_optimizer_tensor(weight, tensor, f"{PREFIX}.{state_name}")
    if is_main:  # data-parallel replicas are one: who holds the whole tensor saves it
        entry = replace(entry, replica_id=(*entry.replica_id[:-1], 0))  # type: ignore[misc]
    return entry


def _sharded_weights(active: ActiveSet) -> dict[str, Entry]:
    """Each layer under its own key: only some layers have state."""
    return gpt_of(active.model).sharded_state_dict(metadata={"non_homogeneous_layers": True})
