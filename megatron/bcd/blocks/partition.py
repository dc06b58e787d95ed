"""Which layers form which block (docs/concepts.md). Pure.

The layers of a model are divided into pipeline stages, each stage into submodels, and a layout groups the submodels
into blocks. Layers, stages, submodels and blocks are numbered from 0, in depth order over the whole model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from megatron.bcd.blocks import check_partition
from megatron.bcd.blocks.block import Block, Submodel
from megatron.bcd.blocks.layers import consecutive, describe_layers, divide, divide_into_pieces
from megatron.bcd.config import DEFAULT_NUM_BLOCKS


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The whole model divided into submodels, grouped into blocks; made by ``partition``."""

    layout: str
    layers_per_stage: tuple[int, ...]
    submodels: tuple[Submodel, ...]
    blocks: tuple[Block, ...]
    tied: bool
    """Whether the output head is a copy of the embedding."""
    always_active: frozenset[str] = frozenset()
    """What is active in every phase: some of ``norms`` (all), ``biases`` (of layers), ``embedding``, ``head``."""
    frozen: frozenset[str] = frozenset()
    """What no phase trains: some of ``embedding``, ``head`` (tied: both or none), ``norms`` (all)."""
    resting: str = "none"
    """Which layers outside the active block are updated without state: ``none``, ``all``, or ``suffix`` (after the
    block's first layer)."""
    has_active_block: bool = True
    """False with --bcd-num-blocks 0: the one block is empty, all layers rest."""
    num_chunks: int = 1
    """Chunks of the model on every stage (layout ``interleaved``): chunk c of stage s is virtual stage
    c x stages + s. Else each stage is one virtual stage."""

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return sum(self.layers_per_stage)

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return len(self.layers_per_stage)

    @property
    def num_blocks(self) -> int:
        """Blocks of one cycle; with layout ``submodel`` it is ``--bcd-num-blocks`` x stages."""
        return len(self.blocks)

    def stage_layers(self, stage: int) -> Sequence[int]:
        """Every layer that pipeline stage ``stage`` holds, ascending."""
        if self.num_chunks == 1:
            return self.chunk_layers(stage, 0)
        return tuple(layer for chunk in range(self.num_chunks) for layer in self.chunk_layers(stage, chunk))

    def chunk_layers(self, stage: int, chunk: int) -> range:
        """The layers of a chunk of pipeline stage ``stage``, which follow one another."""
        if self.num_chunks == 1:
            return consecutive(self.layers_per_stage)[stage]
        return self.submodels[chunk * self.num_stages + stage].layers

    @property
    def num_virtual_stages(self) -> int:
        """Stages x chunks, in depth order."""
        return self.num_stages * self.num_chunks

    @cached_property
    def block_of_layer(self) -> dict[int, int]:
        """The number of the block that a layer belongs to."""
        return {layer: block.index for block in self.blocks for layer in block.layers}

    def active_layers(self, block: int, stage: int) -> tuple[int, ...]:
        """Layers of pipeline stage ``stage`` that are active while block number ``block`` is."""
        return self.blocks[block].layers_on_stage(stage) if self.has_active_block else ()

    def resting_layers(self, block: int) -> tuple[int, ...]:
        """Layers whose matrices are updated without state while block number ``block`` is active, ascending."""
        return tuple(layer for layer in range(self.num_layers) if self.is_resting(layer, block))

    def is_resting(self, layer: int, block: int) -> bool:
        """Whether a layer is one of ``resting_layers(block)``."""
        if not self.has_active_block:
            return True
        if self.resting == "none":
            return False
        active = self.blocks[block]
        return layer >= (active.first_layer if self.resting == "suffix" else 0) and layer not in active.layers

    @property
    def embedding_always_active(self) -> bool:
        """Whether the embedding is active in every phase; always-active tied heads include it."""
        return "embedding" in self.always_active or (self.tied and "head" in self.always_active)

    @property
    def head_always_active(self) -> bool:
        """Whether the output head is active in every phase; tied, it goes with the embedding."""
        return self.embedding_always_active if self.tied else "head" in self.always_active

    @property
    def norms_always_active(self) -> bool:
        """Whether all norms, the final one too, are active in every phase."""
        return "norms" in self.always_active

    @property
    def has_prefix(self) -> bool:
        """Whether any phase may have a prefix: not where something at the bottom of the model is updated in all."""
        return not (self.resting == "all" or self.embedding_always_active or {"norms", "biases"} & self.always_active)

    def embedding_active(self, block: int) -> bool:
        """Whether the embedding, on the first stage, is active in the block's phase."""
        is_owned = self._owns(self.blocks[block].owns_embedding) and "embedding" not in self.frozen
        return is_owned or self.embedding_always_active

    def final_norm_active(self, block: int) -> bool:
        """Whether the final norm, on the last stage, is active in the block's phase."""
        is_owned = self._owns(self.blocks[block].owns_final_norm) and "norms" not in self.frozen
        return is_owned or self.norms_always_active

    def head_active(self, block: int) -> bool:
        """Whether the output head, on the last stage, is active in the block's phase.

        A tied head is the embedding's copy, active and frozen together with it: the all-reduce of the embedding's
        gradient needs both.
        """
        if self.tied:
            return self.embedding_active(block)
        is_owned = self._owns(self.blocks[block].owns_final_norm) and "head" not in self.frozen
        return is_owned or self.head_always_active

    def _owns(self, is_owned: bool) -> bool:
        return is_owned and self.has_active_block

    def stage_active(self, block: int, stage: int) -> bool:
        """Whether stage ``stage`` holds anything that is updated: layers, resting ones too, embedding, norms, head."""
        return any(
            self.virtual_stage_active(block, chunk * self.num_stages + stage) for chunk in range(self.num_chunks)
        )

    def virtual_stage_active(self, block: int, virtual: int) -> bool:
        """As ``stage_active``, of one chunk of a stage."""
        chunk, stage = divmod(virtual, self.num_stages)
        submodels = self.blocks[block].submodels
        return (
            self._owns(any((submodel.chunk, submodel.stage) == (chunk, stage) for submodel in submodels))
            or any(self.is_resting(layer, block) for layer in self.chunk_layers(stage, chunk))
            or bool({"norms", "biases"} & self.always_active)
            or (virtual == 0 and self.embedding_active(block))
            or (virtual == self.num_virtual_stages - 1 and (self.head_active(block) or self.final_norm_active(block)))
        )

    def first_trainable_virtual_stage(self, block: int) -> int:
        """The first virtual stage that runs backward in the block's phase."""
        first = self.blocks[block].submodels[0]
        return first.chunk * self.num_stages + first.stage if self.has_prefix else 0

    def first_trainable_stage(self, block: int) -> int:
        """The first stage that receives a gradient in the block's phase."""
        return self.blocks[block].first_trainable_stage if self.has_prefix else 0

    def forward_only(self, block: int, stage: int) -> bool:
        """Whether stage ``stage`` holds prefix only, so that it receives no gradient in the block's phase."""
        return stage < self.first_trainable_stage(block)

    def prefix_layers(self, block: int) -> range:
        """Frozen layers before the first active one; empty while the embedding is active."""
        return range(self.blocks[block].first_layer if self.has_prefix else 0)

    def describe_layers(self, block: int) -> str:
        """The block's layers for people, e.g. ``"0-3, 6-9"``."""
        return describe_layers(self.blocks[block].layers) if self.has_active_block else ""

    def describe_extras(self, block: int) -> tuple[str, ...]:
        """What is active beside layers: some of ``embedding``, ``all norms``, ``all biases``, ``final norm``,
        ``head``."""
        held = {
            "embedding": self.embedding_active(block),
            "all norms": self.norms_always_active,
            "all biases": "biases" in self.always_active,
            "final norm": self.final_norm_active(block) and not self.norms_always_active,
            "head": not self.tied and self.head_active(block),
        }
        return tuple(name for name, is_held in held.items() if is_held)

    def describe_untrained(self, visited: Collection[int]) -> tuple[str, ...]:
        """What no phase of the blocks `visited` updates though another block's would, for people."""
        layers = {layer for block in visited for layer in (*self.blocks[block].layers, *self.resting_layers(block))}
        left = describe_layers([layer for layer in range(self.num_layers) if layer not in layers])
        trained = {extra for block in visited for extra in self.describe_extras(block)}
        extras = dict.fromkeys(extra for block in self.blocks for extra in self.describe_extras(block.index))
        return (*([f"layers {left}"] if left else []), *(extra for extra in extras if extra not in trained))


def partition(
    *,
    num_layers: int,
    num_stages: int,
    num_blocks: int | None,
    layout: str,
    tied: bool,
    layers_per_stage: Sequence[int] | None = None,
    always_active: frozenset[str] = frozenset(),
    frozen: frozenset[str] = frozenset(),
    resting: str = "none",
    num_parts: int | None = None,
) -> Partition:
    """Divide ``num_layers`` layers on ``num_stages`` pipeline stages into blocks.

    ``num_blocks`` is ``--bcd-num-blocks``; None takes the default: ``DEFAULT_NUM_BLOCKS``, or the number of stages in
    layout ``stage``. ``layers_per_stage`` gives each stage's number of layers, in layout ``interleaved`` that of each
    virtual stage in depth order; None divides evenly. ``always_active`` is ``--bcd-always-active``, ``frozen`` is
    ``--bcd-frozen``, ``resting`` is ``--bcd-resting-layers``, or ``none`` without a resting update. ``num_parts`` is
    ``--num-virtual-stages-per-pipeline-rank``, for layout ``interleaved``; None takes the number of blocks.

    Raises:
        ValueError: the layout does not fit the model; one line that names the flags.
    """
    check_partition.check_sizes(layout=layout, num_layers=num_layers, num_stages=num_stages)
    frozen = check_partition.with_tied_parts(frozen, tied=tied)
    check_partition.check_frozen(frozen, always_active=always_active, tied=tied)
    parts = _submodels_per_stage(num_blocks=num_blocks, num_stages=num_stages, layout=layout)
    submodels: tuple[Submodel, ...] | None = None
    if layout == "interleaved":
        num_parts = parts if num_parts is None else num_parts
        check_partition.check_parts(num_parts, num_layers=num_layers, num_stages=num_stages, num_blocks=parts)
        pieces = _pieces(layers_per_stage, num_layers=num_layers, num_stages=num_stages, num_parts=num_parts)
        submodels = _interleaved(pieces, num_stages=num_stages)
        layers_per_stage = _layers_by_stage(submodels)
    check_partition.check_enough_layers(num_layers=num_layers, num_stages=num_stages, parts=parts, layout=layout)
    if layers_per_stage is None:
        sizes = tuple(len(layers) for layers in divide(num_layers, num_stages))
    else:
        sizes = tuple(layers_per_stage)
        check_partition.check_stages(sizes, num_layers=num_layers, num_stages=num_stages, parts=parts, layout=layout)
    if num_blocks == 0:
        check_partition.check_all_rest(resting=resting, always_active=always_active, layout=layout)
    if submodels is None:
        submodels = _submodels(sizes, parts=None if layout == "strided" else parts)
    return Partition(
        layout=layout,
        layers_per_stage=sizes,
        submodels=submodels,
        blocks=_group(submodels, parts=parts, layout=layout),
        tied=tied,
        always_active=always_active,
        frozen=frozen,
        resting=resting,
        has_active_block=num_blocks != 0,
        num_chunks=1 + max(submodel.chunk for submodel in submodels),
    )


def _submodels_per_stage(*, num_blocks: int | None, num_stages: int, layout: str) -> int:
    if num_blocks is not None and num_blocks < 0:
        raise ValueError(f"--bcd-num-blocks {num_blocks}: must be at least 0")
    if layout != "stage":
        return DEFAULT_NUM_BLOCKS if num_blocks is None else max(num_blocks, 1)
    if num_blocks not in (None, num_stages):
        raise ValueError(
            f"--bcd-num-blocks {num_blocks} does not fit --bcd-layout stage, which has a block per pipeline "
            f"stage: give {num_stages} (--pipeline-model-parallel-size) or leave the flag out"
        )
    return 1


def _submodels(layers_per_stage: Sequence[int], *, parts: int | None) -> tuple[Submodel, ...]:
    """``parts`` submodels of every stage; None: each layer is one."""
    num_submodels = sum(layers_per_stage) if parts is None else len(layers_per_stage) * parts
    submodels: list[Submodel] = []
    for stage, held in enumerate(consecutive(layers_per_stage)):
        for part in divide(len(held), len(held) if parts is None else parts):
            index = len(submodels)
            submodels.append(
                Submodel(
                    index=index,
                    stage=stage,
                    layers=held[part.start : part.stop],
                    first=index == 0,
                    last=index == num_submodels - 1,
                )
            )
    return tuple(submodels)


def _pieces(sizes: Sequence[int] | None, *, num_layers: int, num_stages: int, num_parts: int) -> Sequence[range]:
    """The layers of every virtual stage, in depth order."""
    if sizes is None:
        by_part = divide_into_pieces(num_layers, parts=num_parts, stages=num_stages)
        return [layers for pieces in by_part for layers in pieces]
    if len(sizes) != num_stages * num_parts or sum(sizes) != num_layers or min(sizes) < 1:
        raise ValueError(
            f"layers per virtual pipeline stage {list(sizes)}: must be {num_stages * num_parts} numbers "
            f"(--pipeline-model-parallel-size {num_stages} x {num_parts} chunks on every stage), each at least 1, with "
            f"the sum {num_layers} (--num-layers)"
        )
    return consecutive(sizes)


def _interleaved(pieces: Sequence[range], *, num_stages: int) -> tuple[Submodel, ...]:
    """A submodel for each virtual stage; on a single stage all parts are one chunk."""
    return tuple(
        Submodel(
            index=index,
            stage=index % num_stages,
            layers=layers,
            first=index == 0,
            last=index == len(pieces) - 1,
            chunk=index // num_stages if num_stages > 1 else 0,
        )
        for index, layers in enumerate(pieces)
    )


def _layers_by_stage(submodels: Sequence[Submodel]) -> list[int]:
    stages = range(1 + max(submodel.stage for submodel in submodels))
    return [sum(len(one.layers) for one in submodels if one.stage == stage) for stage in stages]


def _group(submodels: tuple[Submodel, ...], *, parts: int, layout: str) -> tuple[Block, ...]:
    if layout == "spread":
        return tuple(Block(index=index, submodels=submodels[index::parts]) for index in range(parts))
    if layout == "interleaved":
        num_stages = 1 + max(submodel.stage for submodel in submodels)
        return tuple(
            Block(index=index, submodels=tuple(one for one in submodels if one.index // num_stages % parts == index))
            for index in range(parts)
        )
    if layout == "strided":
        strided: list[list[Submodel]] = [[] for _ in range(parts)]
        for _, on_stage in groupby(submodels, key=lambda submodel: submodel.stage):
            for place, submodel in enumerate(on_stage):
                strided[place % parts].append(submodel)
        return tuple(Block(index=index, submodels=tuple(held)) for index, held in enumerate(strided))
    # A stage is one submodel in layout `stage`, so both other layouts have one submodel per block.
    return tuple(Block(index=submodel.index, submodels=(submodel,)) for submodel in submodels)
