"""A run to plan: its flags, the training configuration that follows from them, and the GPUs that it gets. Pure."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any

from megatron.bcd.blocks.partition import Partition, partition_from_config
from megatron.bcd.config import BcdConfig, Refusal, RunConfig
from megatron.bcd.config.presets import PRESETS, derive_blocks, derive_chunks, derive_schedule, preset_values
from megatron.bcd.config.sections import dashed
from megatron.bcd.planner import run_state
from megatron.bcd.planner.cost import ModelShape, shape_of
from megatron.bcd.planner.run_state import RunMemory
from megatron.bcd.planner.state import ModelState
from megatron.bcd.planner.tables import GIB, Cluster, Model
from megatron.bcd.planner.tensors import count_parameters
from megatron.bcd.tokenizer import padded_vocab_size

STREAMED = {"full, streamed": "full", "muon, streamed": "muon"}
"""Full training with layers in host memory: names in comparisons, and methods."""
PRESET_OF = {"bcd": "paper", "pretrain": "pretrain", "finetune": "finetune"}
"""The --bcd-preset of each method of block coordinate descent."""
METHODS = ("bcd", "pretrain", "finetune", "full", "offload", "muon")
"""Block coordinate descent as published, or with preset pretrain or finetune; full training; full training with the
optimizer on the host, or with Muon."""
WHOLE = {f"finetune, {rule}": rule for rule in ("orthogonal", "factored")}
"""Method finetune without blocks: names, and rules of --bcd-inactive-update."""
WITH_ORTHOGONAL = {"bcd_embedding_update": "adam", "bcd_inactive_lr_ratio": 0.4}
"""The flags with which the orthogonal rule was measured in fine-tuning (studies/fine_tuning.md)."""
_MUON = {name: value for name, value in PRESETS["pretrain"].items() if name == "optimizer" or name.startswith("muon_")}
_STOCK: dict[str, Any] = {"bcd_num_blocks": 1, "bcd_schedule": "stock"}
METHOD_FLAGS: Mapping[str, dict[str, Any]] = {
    "bcd": {},
    "pretrain": {"bcd_preset": "pretrain"},
    "finetune": {"bcd_preset": "finetune"},
    "full": _STOCK,
    "offload": _STOCK | {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0},
    "muon": _STOCK | _MUON,
}
"""The flags that a method sets, by field name."""
DEFAULTS: dict[str, Any] = {
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "micro_batch_size": 1,
    "global_batch_size": 64,
    "optimizer": "adam",
    "optimizer_cpu_offload": False,
}
"""The values of flags that were not given and have another default, or none, in RunConfig."""
VOCABULARY_MULTIPLE = {"pretrain": 128, "sft": 1}
"""--make-vocab-size-divisible-by. A published model has 1, because rows of padding would change its softmax."""
MAX_GPUS, _MAX_BATCH, _MAX_TOKENS = 4096, 2**17, 2**24
"""Larger values are taken for typing errors."""
_TRANSFORMER = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size",
    "add_bias_linear", "add_qkv_bias", "qk_layernorm", "normalization", "pipeline_model_parallel_size",
    "context_parallel_size", "bf16", "fp16", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl",
    "recompute_granularity", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq",
    "moe_grouped_gemm", "expert_model_parallel_size", "fp8", "fp8_recipe", "attention_backend",
)  # fmt: skip
"""The fields of Megatron Core's TransformerConfig that the formulas read."""
_OPTIMIZER = ("optimizer", "optimizer_cpu_offload", "optimizer_offload_fraction", "clip_grad")
"""Those of its OptimizerConfig."""
PRECISION_FLAGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "fp8": {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
}
"""The flags of --precision."""
_NOT_OF_STATE = (
    "micro_batch_size", "global_batch_size", "bcd_saved_inputs", "bcd_saved_activations", "bcd_passes_on_host",
)  # fmt: skip
"""Flags that change no model state."""
_SECTIONS = {name: kind for name, kind in typing.get_type_hints(RunConfig).items() if is_dataclass(kind)}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training configuration on a cluster. The formulas read `config`, which follows from the other attributes.

    `make_recipe` builds one. Tensor parallelism is not planned.
    """

    model: Model
    cluster: Cluster
    num_gpus: int
    method: str = "bcd"
    task: str = "pretrain"  # pretrain: train on text; sft: fine-tune on records
    precision: str = "bf16"
    recompute: str = "none"  # none; full; auto: on each stage and in each phase the least that fits
    flags: frozenset[tuple[str, Any]] = frozenset()
    """The flags of the training script that were given, by field name, without those that are None."""
    host_memory_gb: float | None = None  # of a node, 10^9 bytes; None: no limit
    memory_share: float = 1.0  # the part of a GPU's memory that --recompute auto may fill

    @cached_property
    def fault(self) -> str | None:
        """Why a run does not take these values together, in one line that names the flag; None if it does."""
        try:
            for fault in self._faults():
                return fault
            _ = self.partition
        except Refusal as refusal:  # the layout does not fit the model
            return str(refusal)
        return None

    def checked(self) -> Recipe:
        """Return the recipe. Raises Refusal if it has a fault."""
        if self.fault:
            raise Refusal(self.fault)
        return self

    def flag(self, field: str) -> Any:
        """Return the value of a flag as it was given, or None."""
        return dict(self.flags).get(field)

    def changed(self, **values: Any) -> Recipe:
        """Return the recipe with other attributes or flags. A flag that is None takes its default. Raises Refusal."""
        return make_recipe(**self.values | values)

    @property
    def values(self) -> dict[str, Any]:
        """The arguments of `make_recipe`."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "flags"} | dict(self.flags)

    @cached_property
    def config(self) -> RunConfig:
        config = _build_config(self.model, self.method, self.task, self.precision, self.recompute, self.flags)
        config = run_state.with_loss(
            config, padded_vocab_size=self.padded_vocabulary, has_plain_head=lambda: self.model.has_plain_head
        )
        if config.training.pipeline_cut == "auto" and config.pipeline_size > 1:
            return run_state.balance_stages(config, padded_vocab_size=self.padded_vocabulary)
        return config

    @property
    def has_blocks(self) -> bool:
        """Whether the method is block coordinate descent."""
        return self.method in PRESET_OF

    @property
    def is_whole(self) -> bool:
        """Whether preset finetune trains every layer in every step, without blocks."""
        return self.method == "finetune" and self.config.bcd.bcd_inactive_update != "none"

    @property
    def is_streamed(self) -> bool:
        """Whether inactive layers are in host memory."""
        return self.config.bcd.bcd_layers_on == "host"

    @property
    def name(self) -> str:
        """The name of the method for people: a preset's, where it has one."""
        if self.is_streamed and not self.has_blocks:
            return f"{self.method}, streamed"
        if self.is_whole:
            return f"finetune, {self.config.bcd.bcd_inactive_update}"
        return PRESET_OF.get(self.method, self.method)

    @property
    def tokens(self) -> int:
        return self.config.model.seq_length

    @property
    def micro_batch_size(self) -> int:
        return self.config.training.micro_batch_size

    @property
    def global_batch_size(self) -> int:
        return self.config.training.global_batch_size or 1

    @property
    def num_microbatches(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.data_size)

    @property
    def pipeline_size(self) -> int:
        return self.config.pipeline_size

    @property
    def data_size(self) -> int:
        return self.num_gpus // self.config.model_size

    @property
    def num_replicas(self) -> int:
        """The number of ranks that hold the same weights: data-parallel times context-parallel ones."""
        return self.num_gpus // self.pipeline_size

    @property
    def num_nodes(self) -> int:
        """The fewest nodes that have enough GPUs."""
        return -(-self.num_gpus // self.cluster.gpus_per_node)

    @property
    def gpus_per_node(self) -> int:
        return self.num_gpus // self.num_nodes

    @property
    def step_tokens(self) -> int:
        """Tokens of an iteration of one replica group."""
        return self.global_batch_size * self.tokens

    @property
    def padded_vocabulary(self) -> int:
        """The rows of the embedding."""
        multiple = self.flag("make_vocab_size_divisible_by") or VOCABULARY_MULTIPLE[self.task]
        return padded_vocab_size(self.model.vocabulary, multiple, 1)

    @cached_property
    def shape(self) -> ModelShape:
        """The sizes of the model, with the unpadded vocabulary."""
        return shape_of(self.config, vocab_size=self.model.vocabulary)

    @property
    def num_parameters(self) -> int:
        """The parameters of the model, unpadded."""
        return count_parameters(self.shape)

    @cached_property
    def partition(self) -> Partition:
        """Which layers form which block. A method without blocks has a single one."""
        return partition_from_config(self.config)

    @cached_property
    def memory(self) -> RunMemory:
        """The memory formulas of the run, which the trainer uses too."""
        # a search tries many batch sizes with the same model state
        flags = frozenset((name, value) for name, value in self.flags if name not in _NOT_OF_STATE)
        state = _model_state(replace(self, flags=flags, recompute="none", memory_share=1.0))
        memory = RunMemory(config=self.config, state=state, num_microbatches=self.num_microbatches)
        return memory.with_kept(memory_bytes=GIB * self.run_gib)

    @property
    def run_gib(self) -> float:
        """--recompute-memory-gib: what model state and activations of a rank may take."""
        return self.memory_share * self.cluster.memory_gib - self.cluster.framework_gib

    @property
    def state(self) -> ModelState:
        """The model state of the ranks."""
        return self.memory.state

    def _faults(self) -> Iterator[str]:
        config = self.config
        for flag, value, most in (
            ("--num-gpus", self.num_gpus, MAX_GPUS),
            ("--pipeline-model-parallel-size", config.pipeline_size, MAX_GPUS),
            ("--context-parallel-size", config.context_size, MAX_GPUS),
            ("--global-batch-size", self.global_batch_size, _MAX_BATCH),
            ("--micro-batch-size", self.micro_batch_size, _MAX_BATCH),
            ("--seq-length", self.tokens, _MAX_TOKENS),
        ):
            if not 1 <= value <= most:
                yield f"{flag} {value}: must be 1 to {most}"
        stages, context = config.pipeline_size, config.context_size
        if self.num_gpus % self.num_nodes:
            nodes = f"{self.num_nodes} nodes of at most {self.cluster.gpus_per_node} GPUs"
            yield f"--num-gpus {self.num_gpus}: cannot be divided evenly among {nodes}"
        if self.num_gpus % (stages * context):
            product = f"--context-parallel-size {context} x --pipeline-model-parallel-size {stages}"
            yield f"{product}: does not divide --num-gpus {self.num_gpus}. Give a divisor."
        if self.precision == "fp8" and not self.cluster.fp8_tflops:
            yield (
                f"--precision fp8: {self.cluster.gpu} has no FP8 rate in the cluster table. Give bf16, or a card of "
                "compute capability 8.9 or above with its fp8_tflops."
            )
        if self.model.measured is not None:
            flags = {f"--context-parallel-size {context}": context > 1, "--recompute auto": self.recompute == "auto"}
            flags["--cross-entropy-fusion-impl linear"] = config.has_linear_loss and not self.model.has_plain_head
            yield from (
                f"{flag}: transformers' layers have no such thing. Leave it out." for flag in flags if flags[flag]
            )
        if context > 1 and self.tokens % (2 * context):
            yield f"--seq-length {self.tokens}: must be a multiple of {2 * context}, 2 x --context-parallel-size"
        if self.global_batch_size % (per_step := self.micro_batch_size * self.data_size):
            product = f"--micro-batch-size {self.micro_batch_size} x {self.data_size} data-parallel ranks"
            yield f"--global-batch-size {self.global_batch_size}: must be a multiple of {per_step} ({product})"
        if self.model.form == "gpt" and self.tokens > (most := config.model.max_position_embeddings):
            yield f"--seq-length {self.tokens}: {self.model.name} has {most} positions. Give at most {most}."
        yield from self._method_faults()

    def _method_faults(self) -> Iterator[str]:
        number, rule, bcd = self.flag("bcd_num_blocks"), self.flag("bcd_inactive_update"), self.config.bcd
        blocks, method = f"--bcd-num-blocks {number}", f"--method {self.method}"
        has_own_rule = self.config.is_muon or self.is_whole or (self.is_streamed and not self.has_blocks)
        if self.precision == "fp16" and has_own_rule:
            yield f"--precision fp16: {method} has no loss scale. Give bf16 or fp32."
        if self.config.training.fp16_accumulation and self.precision != "fp16":
            yield "--fp16-accumulation: needs --precision fp16. Leave it out."
        if rule is not None and self.method != "finetune":
            yield f"--bcd-inactive-update {rule}: needs --method finetune, not {self.method}. Leave it out."
        if bcd.bcd_main_params == "drop" and (self.config.is_muon or bcd.bcd_inactive_update != "none"):
            yield f"--bcd-main-params drop: the updates of {self.name} keep main parameters. Leave it out."
        if self.is_whole:
            for field in ("bcd_num_blocks", "bcd_layout", "bcd_head_phase", "num_virtual_stages_per_pipeline_rank"):
                if self.flag(field):
                    yield f"{dashed(field)}: --bcd-inactive-update {rule} has no blocks. Leave one of them out."
        if self.method in ("bcd", "finetune") and number == 0 and not self.is_whole:
            yield f"{blocks}: nothing would be trained. Give at least 1, or --bcd-preset pretrain."
        if not self.has_blocks and number not in (None, 1):
            yield f"{blocks}: {method} trains all parameters. Leave it out."
        yield from self._schedule_faults()
        moments = self.config.training.adam_moments_dtype
        if moments != "fp32" and self.method == "offload":
            yield f"--adam-moments-dtype {moments}: the optimizer on the host stores fp32. Leave it out."
        if moments == "int8" and self.config.tied and 1 < self.pipeline_size < self.num_gpus:
            yield f"--adam-moments-dtype {moments}: a tied head needs one stage or one data-parallel rank. Give fp32."

    def _schedule_faults(self) -> Iterator[str]:
        bcd, schedule = self.config.bcd, "--bcd-schedule breadth-first"
        if not self.config.is_breadth_first:
            if self.is_streamed:
                yield f"--bcd-schedule {bcd.bcd_schedule}: --bcd-layers-on host needs {schedule}. Leave it out."
            return
        stages, context = self.pipeline_size, self.config.context_size
        if stages > 1 and self.flag("bcd_layout") not in (None, "interleaved"):
            layout = f"--bcd-layout {self.flag('bcd_layout')}"
            yield f"{layout}: {schedule} with several stages divides the model into chunks. Leave it out."
        if stages > 1 and context > 1:
            yield f"--context-parallel-size {context}: {schedule} with several stages has chunks. Give 1 of either."
        if self.recompute != "none":
            yield f"--recompute {self.recompute}: {schedule} recomputes every layer anyway. Leave it out."
        size = self.flag("bcd_layers_per_pass") or 1  # with several stages the configuration has the derived one
        if self.model.layers % (stages * size):
            layers = f"the {self.model.layers / stages:g} layers of a stage"
            yield f"--bcd-layers-per-pass {size}: must divide {layers}. Give a divisor."


@lru_cache(maxsize=64)
def _model_state(recipe: Recipe) -> ModelState:
    padded, replicas = recipe.padded_vocabulary, recipe.num_replicas
    return ModelState(config=recipe.config, partition=recipe.partition, padded_vocabulary=padded, num_replicas=replicas)


_ATTRIBUTES = {each.name for each in fields(Recipe)} - {"flags"}
_KNOWN = {each.name for kind in _SECTIONS.values() for each in fields(kind)} | {*_TRANSFORMER, *_OPTIMIZER}


def make_recipe(**values: Any) -> Recipe:
    """Return the recipe of `build_recipe`. Raises Refusal if it has a fault."""
    return build_recipe(**values).checked()


def build_recipe(**values: Any) -> Recipe:
    """Build a recipe, which may have a fault. A flag has its field name in RunConfig; None is the default."""
    attributes = {name: value for name, value in values.items() if name in _ATTRIBUTES and value is not None}
    flags = {name: value for name, value in values.items() if name not in _ATTRIBUTES}
    if unknown := flags.keys() - _KNOWN:
        raise TypeError(f"no field of RunConfig: {', '.join(sorted(unknown))}")
    return Recipe(**attributes, flags=frozenset((name, value) for name, value in flags.items() if value is not None))


@lru_cache(maxsize=2048)  # a search builds the same configuration for several clusters and shares of memory
def _build_config(
    model: Model, method: str, task: str, precision: str, recompute: str, flags: frozenset[tuple[str, Any]]
) -> RunConfig:
    """Return the configuration that the training script makes of the flags, in the fields that the formulas read.

    The script's own parser needs torch and Megatron Core, and a search builds thousands of configurations.
    """
    user_flags = dict(flags) | PRECISION_FLAGS[precision]
    values: dict[str, Any] = {each.name: each.default for each in fields(BcdConfig)}
    values |= {"decoupled_lr": None, "pipeline_model_parallel_layout": None} | DEFAULTS
    values |= {**model.flags(user_flags.get("seq_length")), **METHOD_FLAGS[method]}
    values |= {"make_vocab_size_divisible_by": VOCABULARY_MULTIPLE[task], "clip_grad": 1.0}  # as `command` prints
    if preset := METHOD_FLAGS[method].get("bcd_preset"):
        values |= preset_values(preset, user_flags)
    if method == "finetune" and user_flags.get("bcd_inactive_update") == "orthogonal":
        values |= WITH_ORTHOGONAL
    values |= user_flags
    if method in STREAMED.values() and values["bcd_layers_on"] == "host":
        values["bcd_schedule"] = "breadth-first"
    if "cross_entropy_fusion_impl" in user_flags:
        values["cross_entropy_loss_fusion"] = True
    values |= {"bf16": precision in ("bf16", "fp8"), "fp16": precision == "fp16"}
    values |= {"sft_packing": model.can_pack, "reset_attention_mask": task == "sft" and model.can_pack}
    values |= {"fp8": values.pop("fp8_format", None)}  # Megatron Core's name of the field
    values |= {"recompute": "auto"} if recompute == "auto" else {}
    values |= {"recompute_granularity": "full"} if recompute == "full" else {}
    derive_schedule(values)
    derive_blocks(values, given=user_flags)
    derive_chunks(values, given=user_flags)
    sections = {name: _build_section(kind, values) for name, kind in _SECTIONS.items()}
    transformer = {name: values[name] for name in _TRANSFORMER if values.get(name) is not None}
    optimizer = SimpleNamespace(**{name: values.get(name) for name in _OPTIMIZER})
    ddp = SimpleNamespace(grad_reduce_in_fp32=True)
    return RunConfig(transformer=transformer, optimizer=optimizer, ddp=ddp, measured=model.measured, **sections)


def _build_section(kind: Any, values: Mapping[str, Any]) -> Any:
    """Build a section of RunConfig. A field without a default is 0 if no formula reads it."""
    known = {each.name: values.get(each.name, 0) for each in fields(kind) if each.default is MISSING}
    return kind(**known | {each.name: values[each.name] for each in fields(kind) if each.name in values})
