"""Description of one run for the planner: a model on a cluster, with a method and a layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from megatron.bcd.blocks.cut import balanced_cut
from megatron.bcd.blocks.partition import Partition, partition, with_tied_parts
from megatron.bcd.config import LAYOUTS, BcdConfig
from megatron.bcd.config.presets import PRESETS, preset_fields
from megatron.bcd.config.sections import ALWAYS_ACTIVE, OUTER_COMPRESSIONS
from megatron.bcd.planner.activations import LayerBytes, layer_bytes
from megatron.bcd.planner.adapters import ADAPTERS, SUFFIX_ADAPTERS, with_adapters
from megatron.bcd.planner.cost import ModelShape, head_passes, state_budget
from megatron.bcd.planner.state import ModelState
from megatron.bcd.planner.tables import Cluster, Model

PRESET_OF = {"bcd": "paper", "pretrain": "pretrain", "finetune": "finetune"}
"""The --bcd-preset of each method of block coordinate descent."""
METHODS = ("bcd", "pretrain", "finetune", "full", "offload", "muon")
"""Block coordinate descent as in the paper; with --bcd-preset pretrain or finetune; full training; full training with
the optimizer on the host, or with Muon."""
FACTORED = "finetune, factored"
"""The name of method finetune with --bcd-inactive-update factored."""
MUON = {name: value for name, value in PRESETS["pretrain"].items() if name == "optimizer" or name.startswith("muon_")}
"""Flags of Muon by field name, as preset pretrain has them."""
RECOMPUTE_CHOICES = ("none", "full", "auto")
"""auto: in each phase and on each stage the least that fits (`activations.least_recomputation`)."""
CUTS = ("even", "auto")
"""auto: stages take equally long, head counted (`blocks.cut`)."""
MOMENTS = ("fp32", "bf16", "int8")
"""Of --adam-moments-dtype."""
FROZEN_WEIGHTS = ("device", "host")
FUSED_LOSSES = ("native", "linear")
VOCABULARY_MULTIPLE = {"pretrain": 128, "sft": 1}
"""--make-vocab-size-divisible-by; of a published model 1, because rows of padding would take part in the softmax."""
SFT_DEFAULTS = {"precision": "bf16", "sequence": 1024, "global_batch_size": 8} | dict.fromkeys(
    ("recompute", "micro_batch_size")
)
"""Of --task sft, by field of Recipe; None: as `search.place` chooses."""
LONGEST_DEFAULT = 2048
"""Tokens of a sequence by default, where config.json allows more."""
MAX_GPUS, MAX_BATCH, MAX_TOKENS = 4096, 2**17, 2**24
"""Larger values are taken for typing errors."""


def _flag(default: Any = MISSING, help: str = "", *, name: str = "", given: Any = None, **words: Any) -> Any:
    """A field that is a flag of the planner too: its name if that is not the field's, ``given`` the parser's default,
    and argparse's other words."""
    return field(default=default, metadata={"name": name, "help": help, "default": given, **words})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All inputs of the memory and time formulas. Tensor-parallel size 1, distributed optimizer; Adam, and Muon where
    the method's preset has it. None: the default.

    Raises ValueError, one line that names the flag, for an invalid combination.
    """

    model: Model
    cluster: Cluster
    method: str = "bcd"
    task: str = "pretrain"  # what the command trains on: pretrain text, sft records
    precision: str = "fp32"
    num_gpus: int = _flag(help="GPUs of the run", metavar="N")
    num_blocks: int | None = _flag(None, "(default: 3, with finetune the fewest that fit; --search tries 2 to 6 with"
        " method bcd)", name="--bcd-num-blocks", metavar="M")  # fmt: skip
    layout: str | None = _flag(None, "(default: spread; with --bcd-preset pretrain strided)", name="--bcd-layout",
        choices=LAYOUTS)  # fmt: skip
    frozen: frozenset[str] | None = _flag(None, "never trained: some of embedding, head, norms, or none (default: none;"
        " with finetune embedding)", name="--bcd-frozen", metavar="PARTS")  # fmt: skip
    always_active: frozenset[str] | None = _flag(None, "trained in every phase: some of norms, biases, embedding, head,"
        " or none; what is not belongs to a block, the head to the top one (default: the preset's)",
        name="--bcd-always-active", metavar="PARTS")  # fmt: skip
    head_phase: bool | None = _flag(None, "the final norm and an untied head are a block of their own; --task sft does"
        " so where it does not fit otherwise, next with --adam-moments-dtype int8, and freezes the head where that is"
        " too much", name="--bcd-head-phase", action="store_true")  # fmt: skip
    low_rank: int | None = _flag(None, "rank of adapters beside every matrix of every layer (default: none)",
        name="--bcd-low-rank", metavar="R")  # fmt: skip
    low_rank_layers: str | None = _flag(None, "layers whose adapters are trained; suffix: from the block's first layer"
        " on (default: all)", name="--bcd-low-rank-layers", choices=("all", "suffix"))  # fmt: skip
    inactive_update: str | None = _flag(None, "of method finetune: factored = every layer in every step, none = blocks"
        " (default: with --task sft factored where it fits and no flag asks for blocks)", name="--bcd-inactive-update",
        choices=("none", "factored"))  # fmt: skip
    adam_moments_dtype: str = _flag("fp32", "of Adam's moments (default: fp32)", choices=MOMENTS, given="fp32")
    frozen_weights: str | None = _flag(None, "host: frozen layers lie in host memory (default: device; with --task sft"
        " host where it does not fit otherwise)", name="--bcd-frozen-weights", choices=FROZEN_WEIGHTS)  # fmt: skip
    resident_layers: int | None = _flag(None, "with host: frozen layers of a stage that stay on the device (default:"
        " 0)", name="--bcd-resident-layers", metavar="N")  # fmt: skip
    host_memory_gb: float | None = _flag(None, "of a node, 10^9 bytes; what needs more does not fit (default: no"
        " limit)", metavar="GB")  # fmt: skip
    pipeline_size: int = _flag(1, "(default: the smallest that fits; --search tries all)",
        name="--pipeline-model-parallel-size", metavar="N")  # fmt: skip
    context_size: int = _flag(1, "(default: 1)", name="--context-parallel-size", given=1, metavar="N")
    micro_batch_size: int = _flag(
        1,
        "(default: 1; --search tries powers of two, and --task sft where frozen layers are in host memory)",
        given=1,
        metavar="N",
    )
    global_batch_size: int = _flag(64, "sequences of an iteration (default: 64)", given=64, metavar="N")
    sequence: int | None = _flag(None, "(default: the model's, of a config.json at most"
        f" {LONGEST_DEFAULT:,}; with --task sft {SFT_DEFAULTS['sequence']:,})", name="--seq-length",
        metavar="N")  # fmt: skip
    recompute: str = _flag("none", "auto: on each stage and in each phase the least that fits; the bare flag means full"
        " (--search tries none and auto)", given="none", choices=RECOMPUTE_CHOICES, nargs="?",
        const="full")  # fmt: skip
    cross_entropy_fusion_impl: str | None = _flag(None, "linear: logits of a few tokens at a time (default: a loss that"
        " is not fused; with --task sft linear where it does not fit otherwise)", choices=FUSED_LOSSES)  # fmt: skip
    cut: str = _flag("even", "auto: the head counts as layers (--search tries both)", name="--pipeline-cut",
        given="even", choices=CUTS)  # fmt: skip
    replica_groups: int = _flag(1, "of so many GPUs each, which exchange what they have trained (default: 1)", given=1,
        metavar="K")  # fmt: skip
    outer_interval: int | None = _flag(None, "steps between exchanges (default: a phase)", metavar="H")
    outer_delay: int = _flag(0, "steps that hide an exchange within a phase (default: 0)", given=0, metavar="D")
    outer_compression: str = _flag(
        "bf16", "how changes are sent (default: bf16)", given="bf16", choices=OUTER_COMPRESSIONS
    )
    num_chunks: int | None = _flag(None, "chunks of a stage, with --bcd-layout interleaved (default: as many as"
        " blocks)", name="--num-virtual-stages-per-pipeline-rank", metavar="V")  # fmt: skip
    memory_share: float = 1.0  # of a GPU's memory, that recomputation with auto leaves to be filled
    unfused_attention: bool = False  # attention scores in memory, as in the paper's runs
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
            ("--replica-groups", self.replica_groups, MAX_GPUS),
            ("--outer-interval", self.outer_interval or 1, int(self.bcd.mean_steps)),
        ):
            if not 1 <= value <= most:
                yield f"{flag} {value}: must be 1 to {most}"
        if not 0 <= self.outer_delay < (self.outer_interval or 1):
            yield f"--outer-delay {self.outer_delay}: must be 0, or less than an --outer-interval"
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
        yield from self._faults_of_factored()
        if self.method in ("bcd", "finetune") and self.num_blocks == 0 and not (self.low_rank or self.is_factored):
            yield f"{blocks}: nothing would be trained. Give --bcd-low-rank R, or --bcd-preset pretrain."
        shape = self.shape
        most = min(shape.hidden_size, shape.ffn_hidden_size, shape.key_value_size)
        if self.low_rank is not None and not 1 <= self.low_rank <= most:
            yield f"--bcd-low-rank {self.low_rank}: must be 1 to {most}"
        if self.method == "pretrain" and self.num_blocks == 1:
            yield f"{blocks}: with {method} no layer would be inactive; give at least 2, or 0"
        if not self.has_blocks and self.num_blocks not in (None, 1):
            yield f"{blocks} cannot be combined with {method}, where all parameters are active; leave it out"
        if self.model.form == "gpt" and self.tokens > (most := self.shape.num_positions):
            yield f"--seq-length {self.tokens}: {self.model.name} has {most} positions; give at most so many"
        if self.is_streamed and (not self.has_blocks or self.bcd.bcd_inactive_update != "none"):
            yield f"--bcd-frozen-weights host: {method} writes all layers in every step; leave it out"
        if not 0 <= (resident := self.resident_layers or 0) <= self.model.layers:
            yield f"--bcd-resident-layers {resident}: must be 0 to {self.model.layers}"
        if self.adam_moments_dtype != "fp32" and self.method == "offload":
            yield "--adam-moments-dtype: the optimizer on the host has moments in fp32; leave it out"
        if self.adam_moments_dtype == "int8" and self.shape.tied and 1 < stages < self.num_gpus:
            yield "--adam-moments-dtype int8 with a tied head needs one stage or one data-parallel rank; give bf16"

    def _faults_of_factored(self) -> Iterator[str]:
        flag = f"--bcd-inactive-update {self.inactive_update}"
        if self.inactive_update is not None and self.method != "finetune":
            yield f"{flag} needs --method finetune, not {self.method}"
        if self.is_factored:
            if self.precision == "fp16":
                yield f"--precision fp16: {flag} has no loss scale; give bf16 or fp32"
            for name in ("num_blocks", "layout", "head_phase", "num_chunks", "low_rank"):
                if getattr(self, name):
                    yield f"{FLAGS[name]}: with {flag} there are no blocks; leave it out"

    @property
    def is_factored(self) -> bool:
        """Whether every layer is trained in every step, by the factored update."""
        return self.method == "finetune" and self.inactive_update == "factored"

    @property
    def has_blocks(self) -> bool:
        """Whether the method is block coordinate descent."""
        return self.method in PRESET_OF

    @property
    def name(self) -> str:
        """The method's name for people: a preset's, lora for adapters alone."""
        name = FACTORED if self.is_factored else PRESET_OF.get(self.method, self.method)
        if self.low_rank is None:
            return name
        return "lora" if self.num_blocks == 0 else f"{name}+lora"

    @property
    def is_streamed(self) -> bool:
        """Whether frozen layers lie in host memory."""
        return self.frozen_weights == "host"

    @property
    def has_linear_loss(self) -> bool:
        """Whether the loss holds the logits of a few tokens at a time."""
        return self.cross_entropy_fusion_impl == "linear"

    @property
    def bcd(self) -> BcdConfig:
        """Return what the method's preset sets, and where frozen weights lie."""
        # as arguments/derive.py
        always = ALWAYS_ACTIVE if self.always_active is None else self.always_active
        is_trained = {"embedding", "head"} & {*always} - (self.frozen or frozenset())
        adam = {"bcd_embedding_update": "adam"} if self.is_factored and not is_trained else {}
        return _bcd_of(
            self.method,
            self.inactive_update or "none",
            bcd_frozen_weights=self.frozen_weights or "device",
            bcd_resident_layers=self.resident_layers or 0,
            **adam,
        )

    @property
    def is_muon(self) -> bool:
        """Whether Muon steps the active block's matrices, or all."""
        return self.method == "muon" or self.has_blocks and PRESETS[PRESET_OF[self.method]]["optimizer"] == "muon"

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
        return replace(self.model.shape(self.tokens), low_rank=self.low_rank or 0)

    @cached_property
    def layer_bytes(self) -> LayerBytes:
        """Saved activations of one microbatch."""
        return layer_bytes(
            self.state,
            tokens=self.micro_batch_tokens,
            sequence=self.tokens,
            num_heads=self.model.heads,
            context_size=self.context_size,
            unfused_attention=self.unfused_attention,
            linear_loss=self.has_linear_loss,
        )

    @cached_property
    def state(self) -> ModelState:
        """Model state of the ranks."""
        return _state_of(
            shape=self.shape,
            partition=self.partition,
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

    @cached_property
    def partition(self) -> Partition:
        """Which layers form which block; one block for methods full and offload."""
        bcd = self.bcd
        frozen = with_tied_parts(bcd.frozen if self.frozen is None else self.frozen, tied=self.shape.tied)
        # methods without blocks have stages, or in layout interleaved chunks of them
        has_layout = self.has_blocks or self.layout == "interleaved"
        taken = frozen | {"head"} if self.head_phase else frozen
        active = bcd.always_active - taken
        is_lora = self.low_rank is not None and self.asked_blocks == 0
        adapters = SUFFIX_ADAPTERS if self.low_rank_layers == "suffix" else ADAPTERS
        return _partition_of(
            head=self.head_passes if self.cut == "auto" and self.pipeline_size > 1 else None,
            num_layers=self.model.layers,
            num_stages=self.pipeline_size,
            num_blocks=1 if is_lora or not self.has_blocks else self.asked_blocks,
            layout=self.layout or bcd.bcd_layout if has_layout else "spread",
            tied=self.shape.tied,
            frozen=frozen,
            always_active=active if self.always_active is None else self.always_active,
            adapters=frozenset() if self.low_rank is None else frozenset({adapters}),
            are_adapters_alone=is_lora,
            has_stateless_updates=bcd.bcd_inactive_update != "none",
            embedding_update=bcd.bcd_embedding_update,
            num_parts=self.num_chunks,
            head_phase=bool(self.head_phase),
        )

    @property
    def asked_blocks(self) -> int | None:
        """--bcd-num-blocks; preset finetune with blocks has as many as a stage has layers. None: the default."""
        if self.is_factored:
            return 0
        if self.method == "finetune" and self.num_blocks is None and self.layout != "stage":
            return max(1, self.model.layers // self.pipeline_size)
        return self.num_blocks

    @property
    def head_passes(self) -> float:
        """Cost of one pass of the output head, in passes of a layer."""
        return head_passes(self.shape, sequence=self.tokens, padded_vocabulary=self.padded_vocabulary)


FLAGS = {
    each.name: each.metadata["name"] or f"--{each.name.replace('_', '-')}" for each in fields(Recipe) if each.metadata
}
"""The flag of each field that has one."""


@lru_cache
def _bcd_of(method: str, rule: str, **asked: Any) -> BcdConfig:
    known = {each.name for each in fields(BcdConfig)}
    preset = PRESET_OF.get(method)
    values = {"bcd_preset": preset, **preset_fields(preset, rule)} if preset else MUON if method == "muon" else {}
    return BcdConfig(**{name: value for name, value in (values | asked).items() if name in known})


@lru_cache(maxsize=64)  # a search tries many batch sizes with the same state
def _state_of(
    *, partition: Partition, method: str, precision: str, adam_moments_dtype: str, **fields: Any
) -> ModelState:
    return ModelState(
        partition=partition,
        precision=precision,
        budget=state_budget(precision=precision, moments=(adam_moments_dtype,) * 2),
        is_low_bit=adam_moments_dtype != "fp32",
        offload_fraction=1.0 if method == "offload" else 0.0,
        **fields,
    )


@lru_cache(maxsize=1024)  # a search tries many batch sizes with the same partition
def _partition_of(
    *, head: float | None, adapters: frozenset[str], are_adapters_alone: bool, **settings: Any
) -> Partition:
    """Of `partition` with these settings; with the cost of the head of stages that take equally long."""

    def divided(sizes: tuple[int, ...] | None) -> Partition:
        return with_adapters(partition(layers_per_stage=sizes, **settings), adapters, are_alone=are_adapters_alone)

    return divided(None if head is None else balanced_cut(divided(None), head=head))
