"""Which layers form which block (docs/concepts.md). Pure.

The layers of a model are divided into pipeline stages, each stage into submodels, and a layout groups the submodels
into blocks. Layers, stages, submodels and blocks are numbered from 0, in depth order over the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from megatron.bcd.config import DEFAULT_NUM_BLOCKS, LAYOUTS, RunConfig


def divide(total: int, parts: int) -> tuple[range, ...]:
    """Divide ``range(total)`` into ``parts`` contiguous ranges, as even as possible, larger ones first.

    Parts are empty where ``parts`` exceeds ``total``. Raises ValueError if ``parts`` < 1 or ``total`` < 0.
    """
    if parts < 1 or total < 0:
        raise ValueError(f"cannot divide {total} layers into {parts} parts: at least 0 layers, 1 part")
    size, larger = divmod(total, parts)
    return _consecutive([size + (part < larger) for part in range(parts)])


def describe_layers(layers: Sequence[int]) -> str:
    """Ascending layer numbers in short form: ``(0, 1, 2, 5)`` becomes ``"0-2, 5"``, none becomes ``""``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@dataclass(frozen=True, kw_only=True)
class Submodel:
    """Consecutive layers inside one pipeline stage."""

    index: int
    """Place in depth order over the whole model."""
    stage: int
    """Pipeline stage that holds all of it."""
    layers: range
    """Layer numbers over the whole model; never empty."""
    first: bool
    """First submodel of the model: owns the embedding."""
    last: bool
    """Last submodel of the model: owns the final norm and an untied output head."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """The submodels that are updated together, in depth order."""

    index: int
    submodels: tuple[Submodel, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Layer numbers of the block, ascending."""
        return tuple(layer for submodel in self.submodels for layer in submodel.layers)

    @property
    def first_layer(self) -> int:
        """The first active layer while this block is active."""
        return self.submodels[0].layers.start

    @property
    def first_trainable_stage(self) -> int:
        """The pipeline stage that holds the first active layer."""
        return self.submodels[0].stage

    @property
    def owns_embedding(self) -> bool:
        """Whether the embedding (tied: and with it the head's copy) belongs to this block."""
        return self.submodels[0].first

    @property
    def owns_final_norm(self) -> bool:
        """Whether the final norm (untied: and the output head) belongs to this block."""
        return self.submodels[-1].last

    def layers_on_stage(self, stage: int) -> tuple[int, ...]:
        """Layer numbers of the block that pipeline stage ``stage`` holds; empty if it holds none."""
        held = (submodel for submodel in self.submodels if submodel.stage == stage)
        return tuple(layer for submodel in held for layer in submodel.layers)

    def on_stage(self, stage: int) -> bool:
        """Whether pipeline stage ``stage`` holds a submodel of the block."""
        return any(submodel.stage == stage for submodel in self.submodels)


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
    resting: str = "none"
    """Which layers outside the active block are updated without state: ``none``, ``all``, or ``suffix`` (after the
    block's first layer)."""
    has_active_block: bool = True
    """False with --bcd-num-blocks 0: the one block is empty, all layers rest."""

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

    def stage_layers(self, stage: int) -> range:
        """Every layer that pipeline stage ``stage`` holds."""
        return _consecutive(self.layers_per_stage)[stage]

    def active_layers(self, block: int, stage: int) -> tuple[int, ...]:
        """Layers of pipeline stage ``stage`` that are active while block number ``block`` is."""
        return self.blocks[block].layers_on_stage(stage) if self.has_active_block else ()

    def resting_layers(self, block: int) -> tuple[int, ...]:
        """Layers whose matrices are updated without state while block number ``block`` is active, ascending."""
        if not self.has_active_block:
            return tuple(range(self.num_layers))
        active = self.blocks[block]
        first = {"none": self.num_layers, "all": 0, "suffix": active.first_layer}[self.resting]
        return tuple(layer for layer in range(first, self.num_layers) if layer not in active.layers)

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
        return self._owns(self.blocks[block].owns_embedding) or self.embedding_always_active

    def final_norm_active(self, block: int) -> bool:
        """Whether the final norm, on the last stage, is active in the block's phase."""
        return self._owns(self.blocks[block].owns_final_norm) or self.norms_always_active

    def head_active(self, block: int) -> bool:
        """Whether the output head, on the last stage, is active in the block's phase.

        A tied head is the embedding's copy, active and frozen together with it: the all-reduce of the embedding's
        gradient needs both.
        """
        if self.tied:
            return self.embedding_active(block)
        return self._owns(self.blocks[block].owns_final_norm) or self.head_always_active

    def _owns(self, is_owned: bool) -> bool:
        return is_owned and self.has_active_block

    def stage_active(self, block: int, stage: int) -> bool:
        """Whether stage ``stage`` holds anything that is updated: layers, resting ones too, embedding, norms, head."""
        resting = self.resting_layers(block)
        return (
            self._owns(self.blocks[block].on_stage(stage))
            or any(layer in resting for layer in self.stage_layers(stage))
            or bool({"norms", "biases"} & self.always_active)
            or (stage == 0 and self.embedding_active(block))
            or (stage == self.num_stages - 1 and (self.head_active(block) or self.final_norm_active(block)))
        )

    def first_trainable_stage(self, block: int) -> int:
        """The first stage that receives a gradient in the block's phase."""
        return self.blocks[block].first_trainable_stage if self.has_prefix else 0

    def forward_only(self, block: int, stage: int) -> bool:
        """Whether stage ``stage`` holds prefix only, so that it receives no gradient in the block's phase."""
        return stage < self.first_trainable_stage(block)

    def prefix_layers(self, block: int) -> range:
        """Frozen layers before the first active one; empty while the embedding is active."""
        return range(self.blocks[block].first_layer if self.has_prefix else 0)

    def suffix_layers(self, block: int) -> tuple[int, ...]:
        """Layers without active matrices that a gradient passes through, ascending; resting ones too."""
        after_prefix = range(len(self.prefix_layers(block)), self.num_layers)
        active = self.blocks[block].layers if self.has_active_block else ()
        return tuple(layer for layer in after_prefix if layer not in active)

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


def partition_from_config(config: RunConfig) -> Partition:
    """The partition of a run. Raises ValueError, one line that names the flags, where it does not fit the model."""
    return partition(
        num_layers=config.num_layers,
        num_stages=config.pipeline_size,
        num_blocks=config.bcd.bcd_num_blocks,
        layout=config.bcd.bcd_layout,
        tied=config.tied,
        always_active=config.bcd.always_active,
        resting=config.bcd.bcd_resting_layers if config.bcd.bcd_resting_update != "none" else "none",
    )


def partition(
    *,
    num_layers: int,
    num_stages: int,
    num_blocks: int | None,
    layout: str,
    tied: bool,
    layers_per_stage: Sequence[int] | None = None,
    always_active: frozenset[str] = frozenset(),
    resting: str = "none",
) -> Partition:
    """Divide ``num_layers`` layers on ``num_stages`` pipeline stages into blocks.

    ``num_blocks`` is ``--bcd-num-blocks``; None takes the default: ``DEFAULT_NUM_BLOCKS``, or the number of stages in
    layout ``stage``. ``layers_per_stage`` gives each stage's number of layers; None divides evenly. ``always_active``
    is ``--bcd-always-active``, ``resting`` is ``--bcd-resting-layers``, or ``none`` without a resting update.

    Raises:
        ValueError: the layout does not fit the model; one line that names the flags.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"--bcd-layout {layout}: must be one of {', '.join(LAYOUTS)}")
    if num_layers < 1:
        raise ValueError(f"--num-layers {num_layers}: must be at least 1")
    if num_stages < 1:
        raise ValueError(f"--pipeline-model-parallel-size {num_stages}: must be at least 1")
    parts = _submodels_per_stage(num_blocks=num_blocks, num_stages=num_stages, layout=layout)
    _check_enough_layers(num_layers=num_layers, num_stages=num_stages, parts=parts, layout=layout)
    if layers_per_stage is None:
        sizes = tuple(len(layers) for layers in divide(num_layers, num_stages))
    else:
        sizes = tuple(layers_per_stage)
        _check_stages(sizes, num_layers=num_layers, num_stages=num_stages, parts=parts, layout=layout)
    if num_blocks == 0:
        _check_all_rest(resting=resting, always_active=always_active, layout=layout)
    submodels = _submodels(sizes, parts=None if layout == "strided" else parts)
    return Partition(
        layout=layout,
        layers_per_stage=sizes,
        submodels=submodels,
        blocks=_group(submodels, parts=parts, layout=layout),
        tied=tied,
        always_active=always_active,
        resting=resting,
        has_active_block=num_blocks != 0,
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


def _check_all_rest(*, resting: str, always_active: frozenset[str], layout: str) -> None:
    """The conditions of --bcd-num-blocks 0."""
    if resting != "all":
        raise ValueError(
            "--bcd-num-blocks 0 trains all layers without optimizer state: give --bcd-resting-update orthogonal, with "
            "--bcd-resting-layers all"
        )
    if not always_active:
        raise ValueError("--bcd-num-blocks 0: --bcd-always-active none would train no embedding, norm or head")
    if layout not in ("spread", "strided"):
        raise ValueError(f"--bcd-num-blocks 0 has no blocks: leave out --bcd-layout {layout}")


def _check_enough_layers(*, num_layers: int, num_stages: int, parts: int, layout: str) -> None:
    needed = num_stages * parts
    if num_layers >= needed:
        return
    if layout == "stage":
        asked, why = "", "one per pipeline stage"
    else:
        asked, why = f" and --bcd-num-blocks {parts}", "pipeline stages x blocks"
    if num_layers >= num_stages:
        remedy = f"give more layers or at most --bcd-num-blocks {num_layers // num_stages}"
    else:
        remedy = "give more layers or fewer pipeline stages"
    raise ValueError(
        f"--num-layers {num_layers} is too few: --bcd-layout {layout} with --pipeline-model-parallel-size "
        f"{num_stages}{asked} needs at least {needed} layers ({why}); {remedy}"
    )


def _check_stages(sizes: Sequence[int], *, num_layers: int, num_stages: int, parts: int, layout: str) -> None:
    if len(sizes) != num_stages or sum(sizes) != num_layers:
        raise ValueError(
            f"layers per pipeline stage {list(sizes)}: must be {num_stages} numbers "
            f"(--pipeline-model-parallel-size) with the sum {num_layers} (--num-layers)"
        )
    smallest = min(sizes)
    if smallest < parts:
        asked = "" if layout == "stage" else f" with --bcd-num-blocks {parts}"
        raise ValueError(
            f"pipeline stage {sizes.index(smallest)} holds too few layers ({smallest}): --bcd-layout {layout}"
            f"{asked} needs at least {parts} on every stage; cut the pipeline more evenly"
            + ("" if smallest < 1 or layout == "stage" else f" or give at most --bcd-num-blocks {smallest}")
        )


def _consecutive(sizes: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0)))


def _submodels(layers_per_stage: Sequence[int], *, parts: int | None) -> tuple[Submodel, ...]:
    """``parts`` submodels of every stage; None: each layer is one."""
    num_submodels = sum(layers_per_stage) if parts is None else len(layers_per_stage) * parts
    submodels: list[Submodel] = []
    for stage, held in enumerate(_consecutive(layers_per_stage)):
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


def _group(submodels: tuple[Submodel, ...], *, parts: int, layout: str) -> tuple[Block, ...]:
    if layout == "spread":
        return tuple(Block(index=index, submodels=submodels[index::parts]) for index in range(parts))
    if layout == "strided":
        strided: list[list[Submodel]] = [[] for _ in range(parts)]
        for _, on_stage in groupby(submodels, key=lambda submodel: submodel.stage):
            for place, submodel in enumerate(on_stage):
                strided[place % parts].append(submodel)
        return tuple(Block(index=index, submodels=tuple(held)) for index, held in enumerate(strided))
    # A stage is one submodel in layout `stage`, so both other layouts have one submodel per block.
    return tuple(Block(index=submodel.index, submodels=(submodel,)) for submodel in submodels)
