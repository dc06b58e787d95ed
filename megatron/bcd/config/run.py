"""The configuration of a run, and its form in JSON.

It names the fields of Megatron Core's classes without importing them. Types and defaults of their flags come from the
classes, see ``arguments.flags``.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

from megatron.bcd.config.measured import MeasuredModel
from megatron.bcd.config.sections import (
    BcdConfig,
    CheckpointConfig,
    DataConfig,
    GroupsConfig,
    ModelConfig,
    ReportConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainingConfig,
)

LOSS_CHUNK, LOSS_PARTS = 512, 4
"""Number of tokens whose logits --cross-entropy-fusion-impl linear stores at a time. The backward pass of an active
head divides it by LOSS_PARTS, because it also stores the gradient of the weight."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The configuration of a run. Plain values only, so that it can be pickled, compared and written as JSON."""

    transformer: Mapping[str, Any]
    """Keyword arguments of Megatron Core's ``TransformerConfig`` that flags set."""
    # no dataclasses: nearly all fields pass through to Megatron Core unread
    optimizer: SimpleNamespace
    """Those of its ``OptimizerConfig``."""
    ddp: SimpleNamespace
    """Those of its ``DistributedDataParallelConfig``."""
    bcd: BcdConfig
    model: ModelConfig
    training: TrainingConfig
    schedule: ScheduleConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    checkpoint: CheckpointConfig
    groups: GroupsConfig
    report: ReportConfig
    measured: MeasuredModel | None = None
    """The layers of a model of transformers, for formulas of memory and time; not in JSON."""

    def replace_section(self, section: str, **values: Any) -> RunConfig:
        """Return a copy with other values in one section."""
        old = getattr(self, section)
        return replace(self, **{section: type(old)(**vars(old) | values)})

    @property
    def num_layers(self) -> int:
        return int(self.transformer["num_layers"])

    @property
    def hidden_size(self) -> int:
        return int(self.transformer["hidden_size"])

    @property
    def num_experts(self) -> int | None:
        """Number of experts in a layer; None for a dense model."""
        return self.transformer.get("num_moe_experts")

    @property
    def expert_size(self) -> int:
        """Number of ranks over which a layer's experts are divided."""
        return int(self.transformer.get("expert_model_parallel_size") or 1)

    @property
    def expert_tensor_size(self) -> int:
        """Number of ranks that slice each expert."""
        return int(self.transformer.get("expert_tensor_parallel_size") or self.tensor_size)

    @property
    def expert_sizes(self) -> tuple[int, int]:
        """Rows and columns of the matrices of an expert on a rank, in either order."""
        return self.hidden_size, int(self.transformer["moe_ffn_hidden_size"]) // self.expert_tensor_size

    @property
    def pipeline_size(self) -> int:
        return int(self.transformer.get("pipeline_model_parallel_size", 1))

    @property
    def tensor_size(self) -> int:
        return int(self.transformer.get("tensor_model_parallel_size", 1))

    @property
    def context_size(self) -> int:
        """Number of ranks that share each sequence."""
        return int(self.transformer.get("context_parallel_size", 1))

    @property
    def model_size(self) -> int:
        """Number of ranks that work on one microbatch."""
        return self.tensor_size * self.pipeline_size * self.context_size

    def describe_ranks(self, data_size: int) -> str:
        """Return the parallel layout as text."""
        context = f" x context {self.context_size}" if self.context_size > 1 else ""
        experts = f", experts over {self.expert_size} ranks" if self.expert_size > 1 else ""
        return f"pipeline {self.pipeline_size} x tensor {self.tensor_size}{context} x data {data_size}{experts}"

    @property
    def num_chunks(self) -> int:
        """Number of model chunks on every pipeline stage; more than 1 form a virtual pipeline."""
        return self.bcd.num_parts if self.bcd.bcd_layout == "interleaved" and self.pipeline_size > 1 else 1

    @property
    def precision(self) -> str:
        """``fp32``, ``bf16`` or ``fp16``."""
        if self.transformer.get("bf16"):
            return "bf16"
        return "fp16" if self.transformer.get("fp16") else "fp32"

    @property
    def is_muon(self) -> bool:
        """Whether Muon steps the matrices of the active block."""
        return bool(self.optimizer.optimizer == "muon")

    @property
    def can_attend_by_text(self) -> bool:
        """Whether a GPU can keep the texts in a sequence apart by their bounds, without a mask of S x S elements.

        Variable-length attention has no fp32, no dropout, no parts of sequences and no larger heads. A plan has tried
        transformers' layers (`measured`); a run does when it builds them.
        """
        fields, measured = self.transformer, self.measured
        size = fields.get("kv_channels") or self.hidden_size // int(fields["num_attention_heads"])
        is_supported = self.precision != "fp32" and not fields.get("attention_dropout") and self.context_size == 1
        is_supported &= self.data.reset_attention_mask and fields.get("attention_backend") != "unfused"
        if measured is not None or self.model.transformer_impl == "transformers":
            return is_supported and (measured is None or measured.attends_by_text)
        return is_supported and size <= 192 and size % 8 == 0

    @property
    def has_linear_loss(self) -> bool:
        """Whether head and loss are one function that stores the logits of LOSS_CHUNK tokens (`model.linear_loss`)."""
        fields = self.transformer
        return bool(fields.get("cross_entropy_loss_fusion")) and fields.get("cross_entropy_fusion_impl") == "linear"

    @property
    def is_breadth_first(self) -> bool:
        """Whether all microbatches of a step pass through a chunk of the model before the next chunk."""
        return self.bcd.bcd_schedule == "breadth-first"

    @property
    def steps_block_by_chunk(self) -> bool:
        """Whether breadth-first order steps the matrices of the only block, the whole model, chunk by chunk."""
        is_whole = self.bcd.bcd_num_blocks == 1 and not self.bcd.bcd_head_phase
        is_freed = self.bcd.bcd_layers_on == "host" or not self.clips_matrices
        # the rules of matrices have no loss scale
        return self.is_breadth_first and is_whole and is_freed and self.precision != "fp16"

    @property
    def updates_streamed_layers(self) -> bool:
        """Whether each step updates layers outside the active block, or all, so that those in host memory change."""
        return self.bcd.bcd_inactive_update != "none" or self.steps_block_by_chunk

    @property
    def has_matrix_optimizer(self) -> bool:
        """Whether some matrices of layers are stepped without Megatron Core's optimizer (`optim.matrix_optimizer`)."""
        return self.is_muon or self.updates_streamed_layers

    @property
    def clips_matrices(self) -> bool:
        """Whether --clip-grad scales the gradients of the block's matrices.

        Not those that enter an 8-bit momentum: they are used and freed before the norm is known.
        """
        is_low_bit = self.is_muon and self.bcd.muon_momentum_dtype == "int8"
        return bool(self.optimizer.clip_grad) and not is_low_bit

    @property
    def clips_by_chunk(self) -> bool:
        """Whether updates by chunk wait for the norm of all gradients, in a separate pass."""
        return self.steps_block_by_chunk and self.clips_matrices

    @property
    def fp8_products(self) -> str | None:
        """The --fp8-format with which linear layers multiply by PyTorch's scaled products; None for Megatron's ways."""
        return self.transformer["fp8"] if self.transformer.get("fp8_recipe") == "tensorwise" else None

    @property
    def main_grad_dtype(self) -> str:
        """Precision in which gradients of the block add up."""
        if self.is_muon:
            return self.bcd.muon_grad_dtype
        return "fp32" if self.precision == "fp32" or self.ddp.grad_reduce_in_fp32 else "bf16"

    @property
    def state_on_host(self) -> dict[str, tuple[str, int]]:
        """State in host memory with each matrix, beside low bits: its precision, and how many elements share one."""
        if not (self.steps_block_by_chunk and self.bcd.bcd_layers_on == "host"):
            return {}
        dtype = self.bcd.muon_momentum_dtype if self.is_muon else self.training.adam_moments_dtype
        state = {"exp_avg": (dtype, 1), "exp_avg_sq": ("uint8" if dtype == "int8" else dtype, 1)}
        if self.is_muon:
            state = {"momentum_buffer": (dtype, 1)}
        if dtype == "int8":
            state |= {f"{name}_scale": ("fp32", 256) for name in state}
        return state | ({"gradient": (self.main_grad_dtype, 1)} if self.clips_by_chunk else {})

    @property
    def has_embedding_on_host(self) -> bool:
        """Whether the embedding is in host memory: no phase trains it, and no tied head reads it."""
        return self.bcd.bcd_layers_on == "host" and "embedding" in self.bcd.frozen and not self.tied

    @property
    def tied(self) -> bool:
        """Whether the output head uses the weight of the word embedding."""
        return not self.model.untie_embeddings_and_output_weights


def core_keywords(settings: SimpleNamespace) -> dict[str, Any]:
    """Return the keyword arguments for Megatron Core's class. Values that are None are left to the class.

    Muon's are left out: `matrix_optimizer` steps its matrices.
    """
    return {name: value for name, value in vars(settings).items() if value is not None and name[:5] != "muon_"}


def run_config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Return plain dicts, lists, strings and numbers for JSON. ``run_config_from_dict`` is the inverse."""
    sections: dict[str, Any] = {}
    for name, section in vars(config).items():
        if name == "measured":  # a plan's
            continue
        values = section if isinstance(section, Mapping) else vars(section)
        sections[name] = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return sections


def run_config_from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Build the RunConfig that ``run_config_to_dict`` wrote, also after a round trip through JSON.

    Fields that another version had are left out.

    Raises:
        ValueError: a section is unknown or absent.
    """
    kinds = typing.get_type_hints(RunConfig)
    del kinds["measured"]
    if set(values) != set(kinds):
        raise ValueError(f"run configuration: must have the sections {', '.join(kinds)}, not {', '.join(values)}")
    sections: dict[str, Any] = {"transformer": dict(values["transformer"])}
    for name, kind in kinds.items():
        if name == "transformer":
            continue
        known = {field.name for field in fields(kind)} if is_dataclass(kind) else values[name].keys()
        read = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in values[name].items()
            if key in known
        }
        sections[name] = kind(**read)
    return RunConfig(**sections)
