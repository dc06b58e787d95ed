"""LoRA adapters beside the matrices of layers. Runs have none; the planner compares their methods with LoRA."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

from megatron.bcd.blocks.ownership import Ownership, ownership
from megatron.bcd.blocks.partition import Partition

ADAPTERS, SUFFIX_ADAPTERS = "adapters", "suffix adapters"
"""Entries of `AdapterPartition.always_active`: adapters of all layers, or of those from the block's first one on."""
ADAPTER = "_adapter"
"""End of the names of modules that hold adapters."""


@dataclass(frozen=True, kw_only=True)
class AdapterPartition(Partition):
    """A partition of a model with adapters."""

    def trains_adapter(self, layer: int, block: int) -> bool:
        """Return whether the adapters of a layer are trained in the block's phase."""
        is_suffix = SUFFIX_ADAPTERS in self.always_active and layer >= self.blocks[block].first_layer
        return is_suffix or ADAPTERS in self.always_active

    @property
    def has_prefix(self) -> bool:
        return super().has_prefix and ADAPTERS not in self.always_active

    def virtual_stage_active(self, block: int, virtual: int) -> bool:
        chunk, stage = divmod(virtual, self.num_stages)
        has_adapters = any(self.trains_adapter(layer, block) for layer in self.chunk_layers(stage, chunk))
        return has_adapters or super().virtual_stage_active(block, virtual)

    @cached_property
    def behind_prefix(self) -> tuple[tuple[tuple[bool, ...], ...], ...]:
        return tuple(
            tuple(
                tuple(
                    self.trains_matrices(layer, block) or self.trains_adapter(layer, block)
                    for layer in self.chunk_layers(stage, chunk)
                    if layer >= len(self.prefix_layers(block))
                )
                for block in range(self.num_blocks)
            )
            for chunk in range(self.num_chunks)
            for stage in range(self.num_stages)
        )


def with_adapters(plain: Partition, adapters: frozenset[str], *, are_alone: bool) -> Partition:
    """Return the partition with these entries of `always_active`. `are_alone`: no block is trained beside them."""
    if not adapters:
        return plain
    values = {each.name: getattr(plain, each.name) for each in fields(plain)}
    values["always_active"] = plain.always_active | adapters
    return AdapterPartition(**values | ({"has_active_block": False} if are_alone else {}))


@dataclass(frozen=True, kw_only=True)
class AdapterOwnership(Ownership):
    """The ownership of an adapter's parameter."""

    active_in: frozenset[int]
    """Blocks in whose phases it is trained."""

    def is_active(self, block: int) -> bool:
        return block in self.active_in


def ownership_with_adapters(name: str, *, partition: Partition, stage: int) -> Ownership:
    """Return the ownership of a parameter, which may be an adapter's."""
    owned = ownership(name, partition=partition, stage=stage)
    if f"{ADAPTER}." not in name:
        return owned
    assert isinstance(partition, AdapterPartition) and owned.layer is not None
    layer = owned.layer
    active_in = frozenset(each.index for each in partition.blocks if partition.trains_adapter(layer, each.index))
    values = vars(replace(owned, is_always_active=True))
    return AdapterOwnership(**values, active_in=active_in)
