"""Find the block that owns a parameter, from the name that Megatron Core's GPTModel gives it. Pure."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from megatron.bcd.blocks.partition import Partition

STACK_ELEMENTS = 1 << 22
"""Maximum number of elements that are stepped together.

Kernels must take longer than their launch, but temporary memory must stay small, and reductions must start early.
"""
EXPERT_STACK_ELEMENTS = 1 << 25
"""That of experts, of which a layer has up to hundreds."""

_FACTORED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters of --bcd-embedding-update. The table of positions is small and keeps Adam."""

_MATRIX, _BIAS = re.compile(r"\.(gate_)?weight\d*$"), re.compile(r"[._]bias\d*$|conv\w*\.weight$")
"""Transformer Engine numbers the experts' matrices that it multiplies together: weight0, weight1 and so on."""

_NORM = re.compile(r"norm|\.ln_")

Module = Literal["embedding", "layer", "final_norm", "head"]


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """The position of a parameter in the model, and the phases in which it is active."""

    module: Module
    layer: int | None
    """Layer number in the whole model; None outside the layers."""
    is_norm: bool
    is_matrix: bool
    """Whether an inactive update may step it. It is a matrix of a layer (--bcd-inactive-update), or a word embedding or
    head with --bcd-embedding-update factored."""
    block: int | None
    """The block that owns it; for a tied head the block of the embedding. None with --bcd-num-blocks 0, if no
    phase trains it (--bcd-frozen), and with --bcd-embedding-update factored."""
    is_always_active: bool
    """Whether it is active in every phase (--bcd-always-active), with optimizer state that outlives the phases."""
    is_frozen: bool = False
    """Whether no phase trains it (--bcd-frozen)."""
    inactive_updates_in: frozenset[int] = frozenset()
    """Blocks in whose phases it is updated without state."""

    def is_active(self, block: int) -> bool:
        """Return whether the parameter is updated with optimizer state in a phase of ``block``."""
        return self.is_always_active or self.block == block

    def has_inactive_update(self, block: int) -> bool:
        """Return whether the parameter is updated without optimizer state in a phase of ``block``."""
        return block in self.inactive_updates_in

    def virtual_stage(self, partition: Partition) -> int:
        if self.layer is None:
            return 0 if self.module == "embedding" else partition.num_virtual_stages - 1
        return bisect_right(partition.virtual_stages, self.layer, key=attrgetter("start")) - 1


def ownership(name: str, *, partition: Partition, stage: int, num_axes: int | None = None) -> Ownership:
    """Return the ownership of the parameter that GPTModel calls ``name`` on pipeline stage ``stage``.

    ``num_axes`` of the parameter decides in layers of transformers, whose names are their own: matrices have two,
    stacks of the matrices of experts three, and vectors that are no norms count as biases.

    If a stage has several chunks, the name starts with ``chunks.`` and the number of the chunk.

    Raises:
        KeyError: no module of the model has a parameter of that name.
    """
    layer, chunk = None, 0
    block: int | None
    if name.startswith("chunks."):
        _, number, name = name.split(".", 2)
        chunk = int(number)
    # layer_norm_weight: inside Transformer Engine's fused linear layers
    is_norm = name.startswith("decoder.") and _NORM.search(name) is not None and num_axes in (None, 1)
    is_always_active = is_norm and "norms" in partition.always_active
    last = next(block.index for block in partition.blocks if block.owns_final_norm)
    module: Module
    if name.startswith("embedding."):
        module, block, is_always_active = "embedding", 0, "embedding" in partition.always_active
    elif name.startswith("output_layer."):
        module, block, is_always_active = "head", 0 if partition.tied else last, "head" in partition.always_active
    elif name.startswith("decoder.final_layernorm."):
        module, block = "final_norm", last
    elif name.startswith("decoder.layers."):
        module, layer = "layer", partition.chunk_layers(stage, chunk)[int(name.split(".")[2])]
        block = partition.layer_block[layer]
        is_bias = not is_norm and (num_axes == 1 or _BIAS.search(name) is not None)
        is_always_active |= is_bias and "biases" in partition.always_active
    else:
        raise KeyError(name)
    kind = "norms" if is_norm else module
    is_frozen = kind in partition.frozen
    is_matrix = num_axes == 3 if _MATRIX.search(name) is None else num_axes in (None, 2, 3)
    is_in_layer = module == "layer" and not is_norm and is_matrix and _BIAS.search(name) is None
    is_outside = partition.embedding_update == "factored" and is_always_active and name in _FACTORED
    return Ownership(
        module=module,
        layer=layer,
        is_norm=is_norm,
        is_matrix=(is_in_layer and not is_always_active) or is_outside,
        block=block if partition.has_active_block and not (is_frozen or is_outside) else None,
        is_always_active=is_always_active and not is_outside,
        is_frozen=is_frozen,
        inactive_updates_in=frozenset(
            each.index
            for each in partition.blocks
            if is_outside or (is_in_layer and layer is not None and partition.has_inactive_update(layer, each.index))
        ),
    )


def sharing_group(owned: Ownership, passes: Partition | None, *, has_moments: bool) -> Hashable:
    """Return the group of a matrix, of which every data-parallel rank should own the same number of elements.

    Breadth-first order steps a chunk at once, a virtual stage of ``passes``. With ``has_moments`` a block has Adam's
    moments, which take most memory, in its phases.
    """
    return owned.block if has_moments else None, owned.virtual_stage(passes) if passes else None


def matrix_owners(sizes: Sequence[int], num_ranks: int, groups: Sequence[Hashable]) -> list[int]:
    """Return the data-parallel rank that steps each matrix of a stage.

    The largest matrices are assigned first, each to the rank with the least of its `sharing_group`, of these to the
    least loaded one.
    """
    load = [0] * num_ranks
    by_group = dict[Hashable, list[int]]()
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        of_group = by_group.setdefault(groups[index], [0] * num_ranks)
        least = min(of_group)
        owner = min((rank for rank in range(num_ranks) if of_group[rank] == least), key=load.__getitem__)
        owners[index] = owner
        load[owner] += sizes[index]
        of_group[owner] += sizes[index]
    return owners


def matrix_stacks(keys: Sequence[Hashable], names: Sequence[str], sizes: Sequence[int]) -> list[list[int]]:
    """Return the indices of the matrices that are stepped together.

    A stack has matrices with one key and at most STACK_ELEMENTS elements, of experts EXPERT_STACK_ELEMENTS, or a single
    matrix. The arguments are in the model's order. Stacks start with the last matrices, whose gradients are ready
    first.
    """
    by_key: dict[Hashable, list[list[int]]] = {}
    for index in reversed(range(len(keys))):
        stacks = by_key.setdefault(keys[index], [[]])
        limit = EXPERT_STACK_ELEMENTS if ".local_experts." in names[index] else STACK_ELEMENTS
        if stacks[-1] and (len(stacks[-1]) + 1) * sizes[index] > limit:
            stacks.append([])
        stacks[-1].append(index)
    return [stack for stacks in by_key.values() for stack in stacks]
