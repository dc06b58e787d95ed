"""Description of one run for the planner: a model on a cluster, with a method and a layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

from megatron.bcd.blocks.cut import balanced_cut
from megatron.bcd.blocks.partition import Partition, partition, with_tied_parts
from megatron.bcd.config import BcdConfig
from megatron.bcd.config.presets import PRESETS
from megatron.bcd.planner.activations import LayerBytes, LayerCounts, layer_bytes, layer_counts_of
from megatron.bcd.planner.cost import ModelShape, head_passes, state_budget
from megatron.bcd.planner.state import ModelState
from megatron.bcd.planner.tables import Cluster, Model

PRESET_OF = {"bcd": "paper", "pretrain": "pretrain", "finetune": "finetune"}
"""The --bcd-preset of each method of block coordinate descent."""
METHODS = ("bcd", "pretrain", "finetune", "full", "offload")
"""Block coordinate descent as in the paper; with --bcd-preset pretrain or finetune; full training; full training with
the optimizer on the host."""
RECOMPUTE_CHOICES = ("none", "full", "auto")
"""auto: in each phase and on each stage the least that fits (`activations.least_recomputation`)."""
CUTS = ("even", "auto")
"""auto: stages take equally long, head counted (`blocks.cut`)."""
MOMENTS = ("fp32", "bf16", "int8")
"""Of --adam-moments-dtype."""
FROZEN_WEIGHTS = ("device", "host")
VOCABULARY_MULTIPLE = {"pretrain": 128, "sft": 1}
"""--make-vocab-size-divisible-by; of a published model 1, because rows of padding would take part in the softmax."""
MAX_GPUS, MAX_BATCH, MAX_TOKENS = 4096, 2**17, 2**24
"""Larger values are taken for typing errors."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All inputs of the memory and time formulas. Tensor-parallel size 1, distributed optimizer; Adam, and Muon where
    the method's preset has it.

    Raises ValueError, one line that names the flag, for an invalid combination.
    """

    model: Model
    cluster: Cluster
    num_gpus: int
    method: str = "bcd"
    pipeline_size: int = 1
    context_size: int = 1
    num_blocks: int | None = None  # for methods with blocks; None: the default
    layout: str | None = None  # None: the preset's
    frozen: frozenset[str] | None = None  # --bcd-frozen; None: the preset's
    always_active: frozenset[str] | None = None  # --bcd-always-active; None: the preset's, but for frozen parts
    adam_moments_dtype: str = "fp32"
    num_chunks: int | None = None  # of every stage, in layout interleaved; None: as many as blocks
    cut: str = "even"
    frozen_weights: str | None = None  # --bcd-frozen-weights; None: device
    resident_layers: int | None = None  # --bcd-resident-layers; None: 0
    precision: str = "fp32"
    sequence: int | None = None  # None: the model's default
    micro_batch_size: int = 1
    global_batch_size: int = 64
    recompute: str = "none"
    host_memory_gb: float | None = None  # of a node; None: no limit
    memory_share: float = 1.0  # of a GPU's memory, that recomputation with auto leaves to be filled
    unfused_attention: bool = False  # attention scores in memory, as in the paper's runs
    task: str = "pretrain"  # what the command trains on: pretrain text, sft records
    vocabulary_multiple: int = 128  # --make-vocab-size-divisible-by

    def __post_init__(self) -> None:
        for fault in self._faults():
            raise ValueError(fault)
        _ = self.partition  # raises if the layout does not fit the model

    def _faults(self) -> Iterator[str]:
        for flag, value, most in (
            ("--num-gpus", self.num_gpus, MAX_GPUS),
            ("--pipeline-model-parallel-size", self.pipeline_size, MAX_GPUS),
            ("--context-parallel-size", self.context_size, MAX_GPUS),
            ("--global-batch-size", self.global_batch_size, MAX_BATCH),
            ("--micro-batch-size", self.micro_batch_size, MAX_BATCH),
            ("--seq-length", self.tokens, MAX_TOKENS),
        ):
            if not 1 <= value <= most:
                yield f"{flag} {value}: must be 1 to {most}"
        gpus, stages, context = f"--num-gpus {self.num_gpus}", self.pipeline_size, self.context_size
        if self.num_gpus % self.num_nodes:
            nodes = f"{self.num_nodes} nodes of at most {self.cluster.gpus_per_node} GPUs"
            yield f"{gpus}: cannot be divided evenly among {nodes}"
        if self.num_gpus % (stages * context):
            product = f"--context-parallel-size {context} x --pipeline-model-parallel-size {stages}"
            yield f"{product} does not divide {gpus}: give a divisor"
        if context > 1 and self.tokens % (2 * context):
            yield f"--seq-length {self.tokens}: must be a multiple of {2 * context}, 2 x --context-parallel-size"
        if self.global_batch_size % (per_step := self.micro_batch_size * self.data_size):
            product = f"--micro-batch-size {self.micro_batch_size} x {self.data_size} data-parallel ranks"
            yield f"--global-batch-size {self.global_batch_size}: must be a multiple of {per_step} ({product})"
        blocks, method = f"--bcd-num-blocks {self.num_blocks}", f"--method {self.method}"
        if self.is_muon and self.precision == "fp16":
            yield f"--precision fp16: {method} has no loss scale; give bf16 or fp32"
        if self.method == "bcd" and self.num_blocks == 0:
            yield f"{blocks} needs --bcd-preset pretrain, with which all layers are updated without state"
        if self.method == "pretrain" and self.num_blocks == 1:
            yield f"{blocks}: with {method} no layer would be inactive; give at least 2, or 0"
        if not self.has_blocks and self.num_blocks not in (None, 1):
            yield f"{blocks} cannot be combined with {method}, where all parameters are active; leave it out"
        if self.model.form == "gpt" and self.tokens > (most := self.shape.num_positions):
            yield f"--seq-length {self.tokens}: {self.model.name} has {most} positions; give at most so many"
        if self.is_streamed and (not self.has_blocks or self.bcd.bcd_resting_update != "none"):
            yield f"--bcd-frozen-weights host: {method} writes all layers in every step; leave it out"
        if not 0 <= (resident := self.resident_layers or 0) <= self.model.layers:
            yield f"--bcd-resident-layers {resident}: must be 0 to {self.model.layers}"
        if self.adam_moments_dtype != "fp32" and self.method == "offload":
            yield "--adam-moments-dtype: the optimizer on the host has moments in fp32; leave it out"
        if self.adam_moments_dtype == "int8" and self.shape.tied and 1 < stages < self.num_gpus:
            yield "--adam-moments-dtype int8 with a tied head needs one stage or one data-parallel rank; give bf16"

    @property
    def has_blocks(self) -> bool:
        """Whether the method is block coordinate descent."""
        return self.method in PRESET_OF

    @property
    def is_streamed(self) -> bool:
        """Whether frozen layers lie in host memory."""
        return self.frozen_weights == "host"

    @property
    def bcd(self) -> BcdConfig:
        """What the method's preset sets, and where frozen weights lie."""
        return _bcd_of(self.method, self.frozen_weights or "device", self.resident_layers or 0)

    @property
    def is_muon(self) -> bool:
        """Whether Muon steps the active block's matrices."""
        return self.has_blocks and PRESETS[PRESET_OF[self.method]]["optimizer"] == "muon"

    @property
    def tokens(self) -> int:
        """Tokens of a sequence."""
        return self.model.sequence if self.sequence is None else self.sequence

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a microbatch on one context-parallel rank."""
        return self.tokens // self.context_size * self.micro_batch_size

    @property
    def data_size(self) -> int:
        """Data-parallel ranks."""
        return self.num_gpus // (self.pipeline_size * self.context_size)

    @property
    def num_replicas(self) -> int:
        """The data-parallel x context-parallel group: ranks with the same weights."""
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

    @cached_property
    def layer_bytes(self) -> LayerBytes:
        """Saved activations of one microbatch."""
        return layer_bytes(
            self.shape,
            tokens=self.micro_batch_tokens,
            sequence=self.tokens,
            element=self.bytes_per_element,
            num_heads=self.model.heads,
            context_size=self.context_size,
            padded_vocabulary=self.padded_vocabulary,
            unfused_attention=self.unfused_attention,
        )

    @cached_property
    def state(self) -> ModelState:
        """Model state of the ranks."""
        return _state_of(
            shape=self.shape,
            counts=self.layer_counts,
            padded_vocabulary=self.padded_vocabulary,
            num_replicas=self.num_replicas,
            method=self.method,
            precision=self.precision,
            adam_moments_dtype=self.adam_moments_dtype,
            bcd=self.bcd,
            optimizer="muon" if self.is_muon else "adam",
        )

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding in a run."""
        return -(-self.model.vocabulary // self.vocabulary_multiple) * self.vocabulary_multiple

    @property
    def partition(self) -> Partition:
        """Which layers form which block; one block for methods full and offload."""
        return self.layer_counts.partition

    @cached_property
    def layer_counts(self) -> LayerCounts:
        """The partition with its numbers of layers by stage and phase."""
        bcd = self.bcd
        frozen = with_tied_parts(bcd.frozen if self.frozen is None else self.frozen, tied=self.shape.tied)
        # methods without blocks have stages, or in layout interleaved chunks of them
        has_layout = self.has_blocks or self.layout == "interleaved"
        return _layer_counts(
            head=self.head_passes if self.cut == "auto" and self.pipeline_size > 1 else None,
            num_layers=self.model.layers,
            num_stages=self.pipeline_size,
            num_blocks=self.asked_blocks if self.has_blocks else 1,
            layout=self.layout or bcd.bcd_layout if has_layout else "spread",
            tied=self.shape.tied,
            frozen=frozen,
            always_active=bcd.always_active - frozen if self.always_active is None else self.always_active,
            stateless=bcd.bcd_resting_layers if bcd.bcd_resting_update != "none" else "none",
            num_parts=self.num_chunks,
        )

    @property
    def asked_blocks(self) -> int | None:
        """--bcd-num-blocks; preset finetune's is the number of layers of a stage. None: the default."""
        if self.method == "finetune" and self.num_blocks is None and self.layout != "stage":
            return max(1, self.model.layers // self.pipeline_size)
        return self.num_blocks

    @property
    def head_passes(self) -> float:
        """Cost of one pass of the output head, in passes of a layer."""
        return head_passes(self.shape, sequence=self.tokens, padded_vocabulary=self.padded_vocabulary)


@lru_cache
def _bcd_of(method: str, frozen_weights: str, resident_layers: int) -> BcdConfig:
    known = {field.name for field in fields(BcdConfig)}
    preset = PRESET_OF.get(method)
    values = {"bcd_preset": preset, **PRESETS[preset]} if preset else {}
    asked: dict[str, Any] = {"bcd_frozen_weights": frozen_weights, "bcd_resident_layers": resident_layers}
    return BcdConfig(**{name: value for name, value in (values | asked).items() if name in known})


@lru_cache(maxsize=64)  # a search tries many batch sizes with the same state
def _state_of(
    *, counts: LayerCounts, method: str, precision: str, adam_moments_dtype: str, **fields: Any
) -> ModelState:
    return ModelState(
        partition=counts.partition,
        precision=precision,
        budget=state_budget(precision=precision, moments=(adam_moments_dtype,) * 2),
        is_low_bit=adam_moments_dtype != "fp32",
        offload_fraction=1.0 if method == "offload" else 0.0,
        **fields,
    )


@lru_cache(maxsize=1024)  # a search tries many batch sizes with the same partition
def _layer_counts(*, head: float | None, **settings: Any) -> LayerCounts:
    """Of `partition` with these settings; with the cost of the head of stages that take equally long."""
    sizes = None if head is None else balanced_cut(partition(**settings), head=head)
    return layer_counts_of(partition(layers_per_stage=sizes, **settings))
