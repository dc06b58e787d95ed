"""The configuration of a run, and its form in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron.bcd.config.bcd import BcdConfig
from megatron.bcd.config.core import DdpSettings, OptimizerSettings, core_keywords
from megatron.bcd.config.sections import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    ReportConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainingConfig,
)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The configuration of a run. Plain values only, so that it can be pickled, compared and written as JSON."""

    transformer: Mapping[str, Any]
    """Keyword arguments of Megatron Core's ``TransformerConfig`` that flags set."""
    # Not typed: nearly all of its fields pass through to Megatron Core unread.
    optimizer: OptimizerSettings
    ddp: DdpSettings
    bcd: BcdConfig
    model: ModelConfig
    training: TrainingConfig
    schedule: ScheduleConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    checkpoint: CheckpointConfig
    report: ReportConfig

    def replace_section(self, section: str, **values: Any) -> RunConfig:
        """A copy with other values in one section."""
        return replace(self, **{section: replace(getattr(self, section), **values)})

    @property
    def num_layers(self) -> int:
        return int(self.transformer["num_layers"])

    @property
    def hidden_size(self) -> int:
        return int(self.transformer["hidden_size"])

    @property
    def pipeline_size(self) -> int:
        return int(self.transformer.get("pipeline_model_parallel_size", 1))

    @property
    def tensor_size(self) -> int:
        return int(self.transformer.get("tensor_model_parallel_size", 1))

    @property
    def context_size(self) -> int:
        """Ranks that share each sequence."""
        return int(self.transformer.get("context_parallel_size", 1))

    @property
    def model_size(self) -> int:
        """Ranks that work on one microbatch."""
        return self.tensor_size * self.pipeline_size * self.context_size

    def describe_ranks(self, data_size: int) -> str:
        """The parallel layout, for people."""
        context = f" x context {self.context_size}" if self.context_size > 1 else ""
        return f"pipeline {self.pipeline_size} x tensor {self.tensor_size}{context} x data {data_size}"

    @property
    def num_chunks(self) -> int:
        """Chunks of the model on every pipeline stage; more than 1 are a virtual pipeline."""
        return self.bcd.num_parts if self.bcd.bcd_layout == "interleaved" and self.pipeline_size > 1 else 1

    @property
    def precision(self) -> str:
        """``fp32``, ``bf16`` or ``fp16``."""
        if self.transformer.get("bf16"):
            return "bf16"
        return "fp16" if self.transformer.get("fp16") else "fp32"

    @property
    def is_precision_aware(self) -> bool:
        """Transformer Engine's Adam holds the main parameters itself, as what bf16 weights lack of them."""
        return self.optimizer.use_precision_aware_optimizer and not self.optimizer.optimizer_cpu_offload

    @property
    def moment_dtypes(self) -> tuple[str, str]:
        """How Adam's two moments are stored: ``fp32``, ``bf16``, ``fp16`` or ``int8``."""
        if self.is_precision_aware:
            return self.training.exp_avg_dtype, self.training.exp_avg_sq_dtype
        return self.training.adam_moments_dtype, self.training.adam_moments_dtype

    @property
    def kept_moment_dtypes(self) -> tuple[str, str]:
        """The same in host memory between phases: those in fp16 have a scale, and are kept in fp32."""
        first, second = ("fp32" if dtype == "fp16" else dtype for dtype in self.moment_dtypes)
        return first, second

    @property
    def is_gated(self) -> bool:
        """The feed-forward part multiplies two projections."""
        return self.model.swiglu or self.model.quick_geglu

    @property
    def tied(self) -> bool:
        """The output head uses the word embedding's weight."""
        return not self.model.untie_embeddings_and_output_weights


def run_config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain dicts, lists, strings and numbers, ready for JSON; the inverse of ``run_config_from_dict``."""
    return {section.name: _plain(getattr(config, section.name)) for section in fields(RunConfig)}


def run_config_from_dict(values: Mapping[str, Any]) -> RunConfig:
    """The RunConfig that ``run_config_to_dict`` wrote, also after a round trip through JSON.

    Raises:
        ValueError: a section or a field is unknown, or a section is absent.
    """
    names = {section.name for section in fields(RunConfig)}
    if set(values) != names:
        raise ValueError(
            f"run configuration: must have the sections {', '.join(sorted(names))}, "
            f"not {', '.join(sorted(values)) or 'none'}"
        )
    return RunConfig(**{name: _section(name, dict(values[name])) for name in names})


def _section(name: str, values: dict[str, Any]) -> Any:
    kind = _SECTION_TYPES.get(name)
    if kind is None:
        return values
    unknown = set(values) - {own.name for own in fields(kind)}
    if unknown:
        raise ValueError(f"run configuration: {name} has no field {', '.join(sorted(unknown))}")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def _plain(section: Any) -> dict[str, Any]:
    if isinstance(section, OptimizerSettings | DdpSettings):
        section = core_keywords(section)
    elif not isinstance(section, Mapping):
        section = {own.name: getattr(section, own.name) for own in fields(section)}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in section.items()}


_SECTION_TYPES: dict[str, type[Any]] = {
    "optimizer": OptimizerSettings,
    "ddp": DdpSettings,
    "bcd": BcdConfig,
    "model": ModelConfig,
    "training": TrainingConfig,
    "schedule": ScheduleConfig,
    "data": DataConfig,
    "tokenizer": TokenizerConfig,
    "checkpoint": CheckpointConfig,
    "report": ReportConfig,
}
