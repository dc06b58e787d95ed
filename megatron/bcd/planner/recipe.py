"""Description of one run for the planner: a model on a cluster, with a method and a layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from megatron.bcd.blocks.partition import Partition, partition
from megatron.bcd.config import BcdConfig
from megatron.bcd.planner.cost import PRECISIONS, ModelShape
from megatron.bcd.planner.tables import Cluster, Model

METHODS = ("bcd", "full", "offload")
"""Block coordinate descent; full training; full training with the optimizer on the host."""
RECOMPUTE = ("none", "full")
MAX_GPUS, MAX_BATCH, MAX_TOKENS = 4096, 2**17, 2**24
"""Larger values are taken for typing errors."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCounts:
    """A partition and its numbers of layers, indexed by stage, then by block."""

    partition: Partition
    layers: tuple[int, ...]
    """By stage."""
    active: tuple[tuple[int, ...], ...]
    after_prefix: tuple[tuple[int, ...], ...]
    """Active layers and layers of the suffix."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All inputs of the memory and time formulas. Tensor-parallel size 1, Adam, distributed optimizer.

    Raises ValueError, one line that names the flag, for an invalid combination.
    """

    model: Model
    cluster: Cluster
    num_gpus: int
    method: str = "bcd"
    pipeline_size: int = 1
    num_blocks: int | None = None
    """For method bcd; None: the default."""
    layout: str = BcdConfig.bcd_layout
    precision: str = "fp32"
    sequence: int | None = None
    """None: the model's default."""
    micro_batch_size: int = 1
    global_batch_size: int = 64
    recompute: str = "none"
    unfused_attention: bool = False
    """Attention scores in memory, as in Megatron Core's own attention; assumed for the paper's runs."""
    vocabulary_multiple: int = 128
    """--make-vocab-size-divisible-by."""

    def __post_init__(self) -> None:
        for flag, value, most in (
            ("--num-gpus", self.num_gpus, MAX_GPUS),
            ("--pipeline-model-parallel-size", self.pipeline_size, MAX_GPUS),
            ("--global-batch-size", self.global_batch_size, MAX_BATCH),
            ("--micro-batch-size", self.micro_batch_size, MAX_BATCH),
            ("--seq-length", self.tokens, MAX_TOKENS),
        ):
            if not 1 <= value <= most:
                raise ValueError(f"{flag} {value}: must be 1 to {most}")
        for flag, chosen, choices in (
            ("--method", self.method, METHODS),
            ("--recompute", self.recompute, RECOMPUTE),
            ("--precision", self.precision, PRECISIONS),
        ):
            if chosen not in choices:
                raise ValueError(f"{flag} {chosen}: must be one of {', '.join(choices)}")
        if self.num_gpus % self.num_nodes:
            raise ValueError(
                f"--num-gpus {self.num_gpus}: cannot be divided evenly among {self.num_nodes} nodes of at most "
                f"{self.cluster.gpus_per_node} GPUs"
            )
        if self.num_gpus % self.pipeline_size:
            raise ValueError(
                f"--pipeline-model-parallel-size {self.pipeline_size} does not divide --num-gpus {self.num_gpus}: "
                "give a divisor"
            )
        per_step = self.micro_batch_size * self.data_size
        if self.global_batch_size % per_step:
            raise ValueError(
                f"--global-batch-size {self.global_batch_size}: must be a multiple of {per_step} "
                f"(--micro-batch-size {self.micro_batch_size} x {self.data_size} data-parallel ranks)"
            )
        if self.method != "bcd" and self.num_blocks not in (None, 1):
            raise ValueError(
                f"--bcd-num-blocks {self.num_blocks} cannot be combined with --method {self.method}, where all "
                "parameters are active; leave it out"
            )
        _ = self.partition  # raises if the layout does not fit the model

    @property
    def tokens(self) -> int:
        """Tokens of a sequence."""
        return self.model.sequence if self.sequence is None else self.sequence

    @property
    def data_size(self) -> int:
        """Data-parallel ranks."""
        return self.num_gpus // self.pipeline_size

    @property
    def num_microbatches(self) -> int:
        """Per iteration."""
        return self.global_batch_size // (self.micro_batch_size * self.data_size)

    @property
    def num_nodes(self) -> int:
        """The fewest nodes that hold the GPUs."""
        return -(-self.num_gpus // self.cluster.gpus_per_node)

    @property
    def gpus_per_node(self) -> int:
        """Used on each node."""
        return self.num_gpus // self.num_nodes

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one activation or weight."""
        return 4 if self.precision == "fp32" else 2

    @cached_property
    def shape(self) -> ModelShape:
        """Sizes that determine the number of parameters."""
        return self.model.shape(self.tokens)

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding in a run."""
        return -(-self.model.vocabulary // self.vocabulary_multiple) * self.vocabulary_multiple

    @cached_property
    def partition(self) -> Partition:
        """Which layers form which block; one block for methods full and offload."""
        return self.layer_counts.partition

    @cached_property
    def layer_counts(self) -> LayerCounts:
        """The partition with its numbers of layers by stage and phase."""
        is_bcd = self.method == "bcd"
        return _layer_counts(
            self.model.layers,
            self.pipeline_size,
            self.num_blocks if is_bcd else 1,
            self.layout if is_bcd else "spread",
            self.shape.tied,
        )


@lru_cache(maxsize=1024)  # a search tries many batch sizes with the same partition
def _layer_counts(num_layers: int, num_stages: int, num_blocks: int | None, layout: str, tied: bool) -> LayerCounts:
    blocks = partition(num_layers=num_layers, num_stages=num_stages, num_blocks=num_blocks, layout=layout, tied=tied)
    stages = [blocks.stage_layers(stage) for stage in range(num_stages)]
    prefixes = [len(blocks.prefix_layers(block.index)) for block in blocks.blocks]
    return LayerCounts(
        partition=blocks,
        layers=tuple(map(len, stages)),
        active=tuple(
            tuple(len(block.layers_on_stage(stage)) for block in blocks.blocks) for stage in range(num_stages)
        ),
        after_prefix=tuple(tuple(sum(layer >= first for layer in layers) for first in prefixes) for layers in stages),
    )
