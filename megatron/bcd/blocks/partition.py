"""Divide the layers of a model into blocks (docs/concepts.md). Pure.

The layers of a model are divided into virtual stages (docs/pipeline.md): one for each pipeline stage, or several in
layout ``interleaved``. A layout gives each layer to a block. Layers, stages and blocks are numbered from 0, in depth
order over the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise

from megatron.bcd.config import DEFAULT_NUM_BLOCKS, LAYOUTS, Refusal, RunConfig

_TIED = frozenset({"embedding", "head"})
_IN_LAYERS = frozenset({"norms", "biases"})
"""Always-active parts of every layer."""


def divide(total: int, parts: int) -> tuple[range, ...]:
    """Divide ``range(total)`` into ``parts`` contiguous ranges, as even as possible, larger ones first."""
    size, larger = divmod(total, parts)
    return consecutive([size + (part < larger) for part in range(parts)])


def divide_into_chunks(total: int, *, parts: int, stages: int) -> tuple[range, ...]:
    """Divide ``range(total)`` into ``parts`` like ``divide``, and each part into one chunk per stage.

    The parts do not depend on the number of stages. If a part cannot be divided evenly, the stages with the fewest
    layers so far get one more. Returns the chunks of all parts by depth.
    """
    layers = [0] * stages
    sizes: list[int] = []
    for part in divide(total, parts):
        size, larger = divmod(len(part), stages)
        with_more = sorted(range(stages), key=layers.__getitem__)[:larger]
        for stage in range(stages):
            sizes.append(size + (stage in with_more))
            layers[stage] += sizes[-1]
    return consecutive(sizes)


def consecutive(sizes: Sequence[int]) -> tuple[range, ...]:
    """Return consecutive ranges of these sizes, starting at 0."""
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0)))


def describe_layers(layers: Sequence[int]) -> str:
    """Write ascending layer numbers in short form: ``(0, 1, 2, 5)`` as ``"0-2, 5"``, no layers as ``""``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@dataclass(frozen=True, kw_only=True)
class Block:
    """Layers that are updated together. The first block also owns the embedding, with the copy in a tied head."""

    index: int
    layers: tuple[int, ...]
    """Layer numbers, ascending; none in a head block (--bcd-head-phase)."""
    owns_final_norm: bool
    """Whether the final norm, and an untied output head, belong to this block."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The whole model, divided into virtual stages and into blocks. ``partition`` builds it."""

    layout: str
    num_stages: int
    virtual_stages: tuple[range, ...]
    """The layers of each virtual stage, by depth. Chunk c of stage s is virtual stage c x stages + s."""
    blocks: tuple[Block, ...]
    tied: bool
    """Whether the output head is a copy of the embedding."""
    always_active: frozenset[str] = frozenset()
    """Parts active in every phase: some of ``norms`` (all), ``biases`` (of layers), ``embedding``, ``head`` (if tied,
    both or none)."""
    frozen: frozenset[str] = frozenset()
    """Parts that no phase trains: some of ``embedding``, ``head`` (if tied, both or none), ``norms`` (all)."""
    has_inactive_updates: bool = False
    """Whether layers outside the active block are updated without state."""
    embedding_update: str = "adam"
    """The rule that steps an always-active word embedding and an untied head: ``adam`` or ``factored``."""
    has_active_block: bool = True
    """False with --bcd-num-blocks 0: the single block is empty, and all layers are updated without state."""

    @property
    def num_layers(self) -> int:
        return self.virtual_stages[-1].stop

    @property
    def num_virtual_stages(self) -> int:
        """Number of virtual stages: stages x chunks."""
        return len(self.virtual_stages)

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the model on every stage."""
        return len(self.virtual_stages) // self.num_stages

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        return tuple(len(self.stage_layers(stage)) for stage in range(self.num_stages))

    @property
    def num_blocks(self) -> int:
        """Number of blocks in a cycle, including a head block. Layout ``submodel`` has --bcd-num-blocks x stages."""
        return len(self.blocks)

    @property
    def num_layer_blocks(self) -> int:
        """Number of blocks without a head block (--bcd-head-phase)."""
        return sum(bool(block.layers) for block in self.blocks)

    @property
    def num_parts(self) -> int:
        """Number of blocks that have layers on a stage."""
        return self.num_layer_blocks // (self.num_stages if self.layout in ("stage", "submodel") else 1)

    def resized(self, sizes: Sequence[int]) -> Partition:
        """Return the partition with other numbers of layers in the virtual stages. On several stages."""
        stages, has_head_block = consecutive(sizes), self.num_blocks > self.num_layer_blocks
        return replace(
            self,
            virtual_stages=stages,
            blocks=group_layers(
                stages, num_stages=self.num_stages, layout=self.layout, parts=self.num_parts, head_phase=has_head_block
            ),
        )

    def stage_layers(self, stage: int) -> Sequence[int]:
        """Return all layers of a pipeline stage, ascending."""
        if self.num_chunks == 1:
            return self.chunk_layers(stage, 0)
        return tuple(layer for chunk in range(self.num_chunks) for layer in self.chunk_layers(stage, chunk))

    def chunk_layers(self, stage: int, chunk: int) -> range:
        """Return the consecutive layers of a chunk of a pipeline stage."""
        return self.virtual_stages[chunk * self.num_stages + stage]

    def in_passes(self, layers_per_pass: int) -> Partition:
        """Return the partition whose virtual stages are what breadth-first order runs at once.

        With one stage these are chunks of `layers_per_pass` layers; several stages keep theirs.
        """
        if self.num_stages > 1:
            return self
        layers = range(self.num_layers)
        chunks = tuple(layers[start : start + layers_per_pass] for start in layers[::layers_per_pass])
        return replace(self, virtual_stages=chunks)

    def chunks_on_stage(self, stage: int) -> tuple[range, ...]:
        """Return the layers of each chunk of a pipeline stage, whose layers are numbered from 0."""
        return consecutive([*map(len, self.virtual_stages[stage :: self.num_stages])])

    @cached_property
    def layer_block(self) -> dict[int, int]:
        return {layer: block.index for block in self.blocks for layer in block.layers}

    def has_inactive_update(self, layer: int, block: int) -> bool:
        """Return whether the matrices of a layer are updated without state in the block's phase."""
        is_active = self.has_active_block and layer in self.blocks[block].layers
        return self.has_inactive_updates and not is_active

    def trains_matrices(self, layer: int, block: int) -> bool:
        """Return whether the matrices of a layer are updated in the block's phase, with or without state."""
        return self.has_inactive_updates or (self.has_active_block and layer in self.blocks[block].layers)

    @property
    def has_prefix(self) -> bool:
        """Whether phases may have a prefix. There is none if every phase updates something at the model's bottom."""
        return not (self.has_inactive_updates or "embedding" in self.always_active or _IN_LAYERS & self.always_active)

    def embedding_active(self, block: int) -> bool:
        """Return whether the embedding, on the first stage, is active in the block's phase."""
        return self._is_active("embedding", is_owned=block == 0)

    def final_norm_active(self, block: int) -> bool:
        """Return whether the final norm, on the last stage, is active in the block's phase."""
        return self._is_active("norms", is_owned=self.blocks[block].owns_final_norm)

    def head_active(self, block: int) -> bool:
        """Return whether the output head, on the last stage, is active in the block's phase.

        A tied head is a copy of the embedding. Both are active and frozen together, because the all-reduce of the
        embedding's gradient needs both.
        """
        is_owned = self.blocks[block].owns_final_norm
        return self.embedding_active(block) if self.tied else self._is_active("head", is_owned=is_owned)

    def _is_active(self, part: str, *, is_owned: bool) -> bool:
        return part in self.always_active or (self.has_active_block and is_owned and part not in self.frozen)

    def virtual_stage_active(self, block: int, virtual: int) -> bool:
        """Return whether a virtual stage has anything that the block's phase updates, with or without state.

        The first one has the embedding, the last one the final norm and the head.
        """
        is_last = virtual == self.num_virtual_stages - 1
        return (
            any(self.trains_matrices(layer, block) for layer in self.virtual_stages[virtual])
            or bool(_IN_LAYERS & self.always_active)
            or (virtual == 0 and self.embedding_active(block))
            or (is_last and (self.head_active(block) or self.final_norm_active(block)))
        )

    def virtual_stage_updated(self, block: int, virtual: int) -> bool:
        """Return whether breadth-first order updates matrices of a virtual stage right after its passes, without state.

        A tied embedding with a copy on another stage is stepped at the end of the step.
        """
        is_copied = self.tied and self.num_stages > 1
        has_embedding = virtual == 0 and "embedding" in self.always_active
        has_head = virtual == self.num_virtual_stages - 1 and "head" in self.always_active
        is_outside = self.embedding_update == "factored" and (has_embedding or has_head) and not is_copied
        return is_outside or any(self.has_inactive_update(layer, block) for layer in self.virtual_stages[virtual])

    def first_trainable_virtual_stage(self, block: int) -> int:
        """Return the first virtual stage that runs backward in the block's phase."""
        first = len(self.prefix_layers(block))
        numbers = (number for number, layers in enumerate(self.virtual_stages) if first in layers)
        return next(numbers, self.num_virtual_stages - 1)

    def first_trainable_stage(self, block: int) -> int:
        """Return the first stage that receives a gradient in the block's phase."""
        return self.first_trainable_virtual_stage(block) % self.num_stages

    def prefix_layers(self, block: int) -> range:
        """Return the frozen layers before the first active layer; empty while the embedding is active."""
        return range(min(self.blocks[block].layers, default=self.num_layers) if self.has_prefix else 0)

    @cached_property
    def behind_prefix(self) -> tuple[tuple[tuple[bool, ...], ...], ...]:
        """Whether each layer after the prefix is updated, in depth order, by virtual stage and block."""
        return tuple(
            tuple(
                tuple(self.trains_matrices(layer, block) for layer in layers if layer >= len(self.prefix_layers(block)))
                for block in range(self.num_blocks)
            )
            for layers in self.virtual_stages
        )

    def num_behind_prefix(self, stage: int, block: int) -> list[int]:
        """Return the number of layers of a stage after the prefix, by chunk."""
        return [len(by_block[block]) for by_block in self.behind_prefix[stage :: self.num_stages]]

    def describe_layers(self, block: int) -> str:
        """Return the block's layers in short form, such as ``"0-3, 6-9"``."""
        return describe_layers(self.blocks[block].layers) if self.has_active_block else ""

    def describe_extras(self, block: int) -> tuple[str, ...]:
        """Return names of the block's active parts besides layers.

        These are some of ``embedding``, ``all norms``, ``all biases``, ``final norm`` and ``head``.
        """
        extras = {
            "embedding": self.embedding_active(block),
            "all norms": "norms" in self.always_active,
            "all biases": "biases" in self.always_active,
            "final norm": self.final_norm_active(block) and "norms" not in self.always_active,
            "head": not self.tied and self.head_active(block),
        }
        return tuple(name for name, is_active in extras.items() if is_active)


def partition_from_config(config: RunConfig) -> Partition:
    """Build the partition of a run.

    Raises:
        Refusal: the flags do not fit the model. One line that names them.
    """
    sizes: tuple[int, ...] | None = None
    is_interleaved = config.bcd.bcd_layout == "interleaved"
    if config.training.pipeline_model_parallel_layout is not None:
        num_chunks = config.bcd.num_parts if is_interleaved else 1
        sizes = _layout_sizes(config, num_stages=config.pipeline_size * num_chunks)
    elif not is_interleaved:
        sizes = _layers_per_stage(config)
    return partition(
        num_layers=config.num_layers,
        num_stages=config.pipeline_size,
        num_blocks=config.bcd.bcd_num_blocks,
        layout=config.bcd.bcd_layout,
        layers_per_stage=sizes,
        tied=config.tied,
        always_active=config.bcd.always_active,
        frozen=config.bcd.frozen,
        has_inactive_updates=config.bcd.bcd_inactive_update != "none",
        embedding_update=config.bcd.bcd_embedding_update,
        num_parts=config.bcd.num_virtual_stages_per_pipeline_rank,
        head_phase=config.bcd.bcd_head_phase,
    )


@cache
def partition(
    *,
    num_layers: int,
    num_stages: int,
    num_blocks: int | None,
    layout: str,
    tied: bool,
    layers_per_stage: tuple[int, ...] | None = None,
    always_active: frozenset[str] = frozenset(),
    frozen: frozenset[str] = frozenset(),
    has_inactive_updates: bool = False,
    embedding_update: str = "adam",
    num_parts: int | None = None,
    head_phase: bool = False,
) -> Partition:
    """Divide ``num_layers`` layers on ``num_stages`` pipeline stages into blocks.

    Arguments are named like flags, without ``--bcd-``. ``num_blocks`` None is ``DEFAULT_NUM_BLOCKS``, or the number of
    stages in layout ``stage``. ``layers_per_stage`` has the size of each stage, in layout ``interleaved`` of each
    virtual stage; None divides evenly. ``num_parts`` is ``--num-virtual-stages-per-pipeline-rank``; None is the number
    of blocks. Raises Refusal, one line that names the flags, if the layout does not fit.
    """
    assert layout in LAYOUTS and num_layers >= 1 and num_stages >= 1
    if tied:  # both are the same weight
        frozen, always_active = (parts | _TIED if parts & _TIED else parts for parts in (frozen, always_active))
    if both := sorted(frozen & always_active):
        raise Refusal(f"--bcd-frozen and --bcd-always-active both name {' and '.join(both)}: leave it out of one")
    _check_num_blocks(
        num_blocks, num_stages, layout, inactive_updates=has_inactive_updates, always_active=always_active
    )
    if head_phase:
        _check_head_phase(num_blocks, tied=tied, others=always_active | frozen)
    parts = 1 if layout == "stage" else DEFAULT_NUM_BLOCKS if num_blocks is None else max(num_blocks, 1)
    num_parts = (num_parts or parts) if layout == "interleaved" else parts
    if num_layers < num_stages * num_parts:
        raise Refusal(
            f"--num-layers {num_layers}: --bcd-layout {layout} with {num_parts} of --bcd-num-blocks or chunks on "
            f"each of {num_stages} pipeline stages needs at least {num_stages * num_parts} layers"
        )
    if layout == "interleaved" and num_parts % parts:
        raise Refusal(f"--bcd-num-blocks {parts}: the {num_parts} chunks of a stage must be a multiple of it")
    if layers_per_stage is not None:
        stages = consecutive(layers_per_stage)
    elif layout == "interleaved":
        stages = divide_into_chunks(num_layers, parts=num_parts, stages=num_stages)
    else:
        stages = divide(num_layers, num_stages)
    sizes, least = [*map(len, stages)], 1 if layout == "interleaved" else num_parts
    if min(sizes) < least:
        raise Refusal(
            f"pipeline stage {sizes.index(min(sizes))} has {min(sizes)} layers: each needs at least {least}, one for "
            "each of its blocks (--bcd-num-blocks)"
        )
    blocks = group_layers(stages, num_stages=num_stages, layout=layout, parts=parts, head_phase=head_phase)
    return Partition(
        layout=layout,
        num_stages=num_stages,
        virtual_stages=stages if num_stages > 1 else (range(num_layers),),
        blocks=blocks,
        tied=tied,
        always_active=always_active,
        frozen=frozen,
        has_inactive_updates=has_inactive_updates,
        embedding_update=embedding_update,
        has_active_block=num_blocks != 0,
    )


def group_layers(
    stages: Sequence[range], *, num_stages: int, layout: str, parts: int, head_phase: bool
) -> tuple[Block, ...]:
    """Group the layers of virtual stages into blocks, `parts` of them on each stage; see `BcdConfig.bcd_layout`."""
    by_block: dict[int, list[int]] = {}
    for number, layers in enumerate(stages):
        for part, places in enumerate(divide(len(layers), parts)):
            for place, layer in zip(places, layers[places.start : places.stop], strict=True):
                block = {
                    "spread": part,
                    "strided": place % parts,
                    "stage": number,
                    "submodel": number * parts + part,
                    "interleaved": number // num_stages % parts,
                }[layout]
                by_block.setdefault(block, []).append(layer)
    last = stages[-1].stop - 1
    blocks = tuple(
        Block(index=index, layers=(*layers,), owns_final_norm=last in layers and not head_phase)
        for index, layers in sorted(by_block.items())
    )
    return (*blocks, Block(index=len(blocks), layers=(), owns_final_norm=True)) if head_phase else blocks


def _check_num_blocks(
    num_blocks: int | None, num_stages: int, layout: str, *, inactive_updates: bool, always_active: frozenset[str]
) -> None:
    if layout == "stage" and num_blocks not in (None, num_stages):
        raise Refusal(
            f"--bcd-num-blocks {num_blocks}: --bcd-layout stage has a block per pipeline stage, {num_stages} "
            "(--pipeline-model-parallel-size)"
        )
    if num_blocks != 0:
        return
    if not inactive_updates:
        raise Refusal("--bcd-num-blocks 0 needs --bcd-inactive-update")
    if not always_active:
        raise Refusal("--bcd-num-blocks 0 trains embedding, norms and head only if --bcd-always-active names them")
    if layout in ("stage", "submodel"):
        raise Refusal(f"--bcd-num-blocks 0 has no blocks: leave out --bcd-layout {layout}")


def _check_head_phase(num_blocks: int | None, *, tied: bool, others: frozenset[str]) -> None:
    if tied:
        raise Refusal("--bcd-head-phase: a tied head is the embedding, which is part of a block; leave it out")
    if num_blocks == 0:
        raise Refusal("--bcd-head-phase: --bcd-num-blocks 0 has no phases; leave it out")
    if "head" in others:
        raise Refusal("--bcd-head-phase trains the head: leave it out of --bcd-always-active and --bcd-frozen")


_REPEATED = (r"\(([^)]+)\)\*(\d{1,3})(?!\d)", r"(.)\*(\d{1,3})(?!\d)")
"""Megatron Core's notation: first groups in brackets, then single letters. More than three digits are a mistake."""


def _layers_per_stage(config: RunConfig) -> tuple[int, ...]:
    """Return the number of layers of each stage, as even as possible, with the larger stages first.

    Embedding and loss count as a layer each, if a flag says so, and then all stages are equal.

    Raises:
        Refusal: the flags do not fit the model. One line that names them.
    """
    training, num_stages = config.training, config.pipeline_size
    embedding = training.account_for_embedding_in_pipeline_split
    loss = training.account_for_loss_in_pipeline_split
    total = config.num_layers + embedding + loss
    if (embedding or loss) and total % num_stages:
        raise Refusal(
            f"--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split: {total}, which is "
            f"--num-layers {config.num_layers} and {total - config.num_layers} more, must be divisible by "
            f"--pipeline-model-parallel-size {num_stages}"
        )
    sizes = [len(layers) for layers in divide(total, num_stages)]
    sizes[0] -= embedding
    sizes[-1] -= loss
    return tuple(sizes)


def layout_text(sizes: Iterable[int]) -> str:
    """Return the layout of stages of these sizes in Megatron Core's notation."""
    return f"E{'|'.join('t' * size for size in sizes)}L"


def _layout_sizes(config: RunConfig, *, num_stages: int) -> tuple[int, ...]:
    """Return the sizes of stages from a layout in Megatron Core's notation, such as ``Et*3|(tt|)*4L``."""
    text = config.training.pipeline_model_parallel_layout
    assert text is not None
    name = f"--pipeline-model-parallel-layout {text}"
    text = text.replace(",", "")
    for pattern in _REPEATED:
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    stages = text.split("|")
    if unknown := set("".join(stages)) - set("EtL"):
        raise Refusal(f"{name}: letters are E, t and L, not {', '.join(sorted(unknown))}")
    if len(stages) != num_stages:
        raise Refusal(
            f"{name}: has {len(stages)} stages: must be {num_stages} (--pipeline-model-parallel-size; with layout "
            "interleaved that times the chunks of a stage)"
        )
    whole = "".join(stages)
    if whole != "E" + "t" * config.num_layers + "L" or stages[0][:1] != "E" or stages[-1][-1:] != "L":
        raise Refusal(
            f"{name}: must be E on the first stage, t for each of --num-layers {config.num_layers} layers, and L on "
            f"the last stage; there are {whole.count('t')} layers"
        )
    return tuple(stage.count("t") for stage in stages)
