"""Which block owns a parameter, from the name that Megatron Core's GPTModel gives it. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.bcd.blocks.partition import Partition

STACK_ELEMENTS = 1 << 22
"""Matrices that are stepped together: enough for kernels to be longer than their launch, few enough for their
temporary memory, and for their reduction to begin early."""

_FACTORED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""What --bcd-embedding-update is about: the table of positions has a row for each of few positions, and keeps Adam."""

Module = Literal["embedding", "layer", "final_norm", "head"]


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """Where a parameter lies in the model, and in which phases it is active."""

    module: Module
    layer: int | None
    """Layer number over the whole model; None outside the layers."""
    is_norm: bool
    is_matrix: bool
    """Whether a stateless update may step it: a matrix of a layer (--bcd-inactive-update), or a word embedding or head
    that --bcd-embedding-update factored steps."""
    block: int | None
    """The block that owns it; a tied head belongs to the block of the embedding. None with --bcd-num-blocks 0, if no
    phase trains it (--bcd-frozen), and with --bcd-embedding-update factored."""
    is_always_active: bool
    """Active in every phase (--bcd-always-active), with optimizer state that lives through the phases."""
    is_frozen: bool = False
    """No phase trains it (--bcd-frozen)."""
    stateless_in: frozenset[int] = frozenset()
    """Blocks during whose phases it is updated without state."""

    def is_active(self, block: int) -> bool:
        """Whether the parameter is updated with optimizer state in a phase of ``block``."""
        return self.is_always_active or self.block == block

    def is_stateless(self, block: int) -> bool:
        """Whether the parameter is updated without optimizer state in a phase of ``block``."""
        return block in self.stateless_in


def ownership(name: str, *, partition: Partition, stage: int) -> Ownership:
    """Ownership of the parameter that GPTModel calls ``name`` on pipeline stage ``stage``.

    Where a stage holds several chunks, ``chunks.`` and the chunk's number stand before the name.

    Raises:
        KeyError: no module of the model has a parameter of that name.
    """
    layer, chunk = None, 0
    block: int | None
    if name.startswith("chunks."):
        _, number, name = name.split(".", 2)
        chunk = int(number)
    # layernorm: modules of the local layers; layer_norm_weight: inside Transformer Engine's fused linear layers
    is_norm = name.startswith("decoder.") and ("layernorm" in name or "layer_norm" in name)
    is_always_active = is_norm and partition.norms_always_active
    first = next(block.index for block in partition.blocks if block.owns_embedding)
    last = next(block.index for block in partition.blocks if block.owns_final_norm)
    module: Module
    if name.startswith("embedding."):
        module, block, is_always_active = "embedding", first, partition.embedding_always_active
    elif name.startswith("output_layer."):
        module, block, is_always_active = "head", first if partition.tied else last, partition.head_always_active
    elif name.startswith("decoder.final_layernorm."):
        module, block = "final_norm", last
    elif name.startswith("decoder.layers."):
        module, layer = "layer", partition.chunk_layers(stage, chunk)[int(name.split(".")[2])]
        block = partition.block_of_layer[layer]
        is_always_active |= not is_norm and name.endswith(".bias") and "biases" in partition.always_active
    else:
        raise KeyError(name)
    kind = "norms" if is_norm else module
    is_frozen = kind in partition.frozen
    is_in_layer = module == "layer" and not is_norm and name.endswith(".weight")
    is_outside = partition.embedding_update == "factored" and is_always_active and name in _FACTORED
    return Ownership(
        module=module,
        layer=layer,
        is_norm=is_norm,
        is_matrix=is_in_layer or is_outside,
        block=block if partition.has_active_block and not (is_frozen or is_outside) else None,
        is_always_active=is_always_active and not is_outside,
        is_frozen=is_frozen,
        stateless_in=frozenset(
            each.index
            for each in partition.blocks
            if is_outside or (is_in_layer and layer is not None and partition.is_stateless(layer, each.index))
        ),
    )


def matrix_owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """The data-parallel rank that steps each matrix of a stage: largest first to the least loaded rank."""
    load = [0] * num_ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owners[index] = load.index(min(load))
        load[owners[index]] += sizes[index]
    return owners


def matrix_stacks(keys: Sequence[Hashable], sizes: Sequence[int]) -> list[list[int]]:
    """Matrices that are stepped together: of one key and at most STACK_ELEMENTS elements, or one alone.

    `keys` are of matrices in the model's order; a stack has the last ones first, whose gradients come first.
    """
    by_key: dict[Hashable, list[list[int]]] = {}
    for index in reversed(range(len(keys))):
        stacks = by_key.setdefault(keys[index], [[]])
        if stacks[-1] and (len(stacks[-1]) + 1) * sizes[index] > STACK_ELEMENTS:
            stacks.append([])
        stacks[-1].append(index)
    return [stack for stacks in by_key.values() for stack in stacks]
