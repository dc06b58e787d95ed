"""What a run is configured with: one frozen dataclass per group of flags. Pure."""

from megatron.bcd.config.sections import (
    BcdConfig,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    ReportConfig,
    RunConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainingConfig,
    run_config_from_dict,
    run_config_to_dict,
)

__all__ = [
    "BcdConfig",
    "CheckpointConfig",
    "DataConfig",
    "ModelConfig",
    "ReportConfig",
    "RunConfig",
    "ScheduleConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "run_config_from_dict",
    "run_config_to_dict",
]
