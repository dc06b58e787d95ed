"""The configuration of a run: one frozen dataclass per group of flags. Pure."""

from megatron.bcd.config.run import (
    LOSS_CHUNK,
    LOSS_PARTS,
    RunConfig,
    core_keywords,
    run_config_from_dict,
    run_config_to_dict,
)
from megatron.bcd.config.sections import (
    DEFAULT_NUM_BLOCKS,
    LAYOUTS,
    MAY_CHANGE,
    ORDERS,
    BcdConfig,
    CheckpointConfig,
    DataConfig,
    GroupsConfig,
    ModelConfig,
    Refusal,
    ReportConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainingConfig,
)
