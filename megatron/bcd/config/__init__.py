"""The configuration of a run: one frozen dataclass per group of flags. Pure."""

from megatron.bcd.config.bcd import DEFAULT_NUM_BLOCKS, LAYOUTS, ORDERS, SWITCHES, BcdConfig
from megatron.bcd.config.core import DdpSettings, OptimizerSettings, core_keywords
from megatron.bcd.config.run import RunConfig, run_config_from_dict, run_config_to_dict
from megatron.bcd.config.sections import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    ReportConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainingConfig,
)

__all__ = [
    "DEFAULT_NUM_BLOCKS",
    "LAYOUTS",
    "ORDERS",
    "SWITCHES",
    "BcdConfig",
    "CheckpointConfig",
    "DataConfig",
    "DdpSettings",
    "ModelConfig",
    "OptimizerSettings",
    "ReportConfig",
    "RunConfig",
    "ScheduleConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "core_keywords",
    "run_config_from_dict",
    "run_config_to_dict",
]
