"""The configuration of a run: one frozen dataclass per group of flags. Pure."""

from megatron.bcd.config.run import (
    LOSS_CHUNK,
    LOSS_PARTS,
    RunConfig,
    core_keywords,
    fields_that_may_change,
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
    GroupsConfig,
    ModelConfig,
    Refusal,
    ReportConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainingConfig,
)
