"""The configuration of a run: one frozen dataclass per group of flags. Pure."""

from megatron.bcd.config.run import (
    LOSS_CHUNK,
    LOSS_PARTS,
    DdpSettings,
    OptimizerSettings,
    RunConfig,
    core_keywords,
    run_config_from_dict,
    run_config_to_dict,
)
from megatron.bcd.config.sections import (
    DEFAULT_NUM_BLOCKS,
    LAYOUTS,
    ORDERS,
    SWITCHES,
    BcdConfig,
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
    "LOSS_CHUNK",
    "LOSS_PARTS",
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
