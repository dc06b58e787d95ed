"""Cut the layers of a model into chunks, which --bcd-schedule breadth-first runs one after the other. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

from megatron.bcd.blocks.ownership import Ownership
from megatron.bcd.blocks.partition import Partition, consecutive


def virtual_chunks(partition: Partition, layers_per_pass: int) -> tuple[range, ...]:
    """Return the layers of each virtual stage, ordered by depth.

    With one stage these are chunks of `layers_per_pass` layers, with several stages the chunks of the layout.
    """
    if partition.num_stages == 1:
        layers = range(partition.num_layers)
        return tuple(layers[start : start + layers_per_pass] for start in layers[::layers_per_pass])
    stages, chunks = range(partition.num_stages), range(partition.num_chunks)
    return tuple(partition.chunk_layers(stage, chunk) for chunk in chunks for stage in stages)


def stage_chunks(partition: Partition, stage: int, layers_per_pass: int) -> tuple[range, ...]:
    """Return the chunks of a stage, with its layers numbered from 0."""
    chunks = virtual_chunks(partition, layers_per_pass)[stage :: partition.num_stages]
    return consecutive([len(layers) for layers in chunks])


def first_trainable_chunk(partition: Partition, block: int, chunks: Sequence[range]) -> int:
    """Return the first virtual chunk that runs backward in the block's phase."""
    first_layer = len(partition.prefix_layers(block))
    return next((number for number, layers in enumerate(chunks) if first_layer in layers), len(chunks) - 1)


def is_chunk_updated(partition: Partition, block: int, chunks: Sequence[range], chunk: int) -> bool:
    """Return whether the block's phase updates matrices of a virtual chunk at once, without state.

    A tied embedding with a copy on another stage is stepped at the end of the step.
    """
    is_copied = partition.tied and partition.num_stages > 1
    has_embedding = chunk == 0 and partition.embedding_always_active
    has_head = chunk == len(chunks) - 1 and partition.head_always_active
    is_outside = partition.embedding_update == "factored" and (has_embedding or has_head) and not is_copied
    return is_outside or any(partition.has_inactive_update(layer, block) for layer in chunks[chunk])


def chunk_of(owned: Ownership, chunks: Sequence[range]) -> int:
    """Return the virtual chunk of a parameter."""
    if owned.layer is None:
        return 0 if owned.module == "embedding" else len(chunks) - 1
    return bisect_right(chunks, owned.layer, key=attrgetter("start")) - 1
