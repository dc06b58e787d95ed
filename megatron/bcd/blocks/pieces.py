"""Cut the layers of a model into pieces, which --bcd-schedule breadth-first runs one after the other. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

from megatron.bcd.blocks.ownership import Ownership
from megatron.bcd.blocks.partition import Partition, consecutive


def virtual_pieces(partition: Partition, layers_per_pass: int) -> tuple[range, ...]:
    """Return the layers of each virtual stage, ordered by depth.

    With one stage these are pieces of `layers_per_pass` layers, with several stages the chunks of the layout.
    """
    if partition.num_stages == 1:
        layers = range(partition.num_layers)
        return tuple(layers[start : start + layers_per_pass] for start in layers[::layers_per_pass])
    stages, chunks = range(partition.num_stages), range(partition.num_chunks)
    return tuple(partition.chunk_layers(stage, chunk) for chunk in chunks for stage in stages)


def stage_pieces(partition: Partition, stage: int, layers_per_pass: int) -> tuple[range, ...]:
    """Return the pieces of a stage, with its layers numbered from 0."""
    pieces = virtual_pieces(partition, layers_per_pass)[stage :: partition.num_stages]
    return consecutive([len(layers) for layers in pieces])


def first_trainable_piece(partition: Partition, block: int, pieces: Sequence[range]) -> int:
    """Return the first virtual piece that runs backward in the block's phase."""
    first_layer = len(partition.prefix_layers(block))
    return next((number for number, layers in enumerate(pieces) if first_layer in layers), len(pieces) - 1)


def is_piece_active(partition: Partition, block: int, pieces: Sequence[range], piece: int) -> bool:
    """Return whether the block's phase updates anything in a virtual piece, with or without state.

    Embedding and head belong to the first and the last piece.
    """
    is_first, is_last = piece == 0, piece == len(pieces) - 1
    return (
        any(partition.trains_matrices(layer, block) for layer in pieces[piece])
        or bool({"norms", "biases"} & partition.always_active)
        or (is_first and partition.embedding_active(block))
        or (is_last and (partition.head_active(block) or partition.final_norm_active(block)))
    )


def is_piece_updated(partition: Partition, block: int, pieces: Sequence[range], piece: int) -> bool:
    """Return whether the block's phase updates matrices of a virtual piece at once, without state.

    A tied embedding with a copy on another stage is stepped at the end of the step.
    """
    is_copied = partition.tied and partition.num_stages > 1
    has_embedding = piece == 0 and partition.embedding_always_active
    has_head = piece == len(pieces) - 1 and partition.head_always_active
    is_outside = partition.embedding_update == "factored" and (has_embedding or has_head) and not is_copied
    return is_outside or any(partition.is_stateless(layer, block) for layer in pieces[piece])


def piece_of(owned: Ownership, pieces: Sequence[range]) -> int:
    """Return the virtual piece of a parameter."""
    if owned.layer is None:
        return 0 if owned.module == "embedding" else len(pieces) - 1
    return bisect_right(pieces, owned.layer, key=attrgetter("start")) - 1
