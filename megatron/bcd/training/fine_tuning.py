"""The length of a run and of its phases, where flags leave them open."""

from __future__ import annotations

from megatron.bcd import data
from megatron.bcd.arguments.rules import flattened
from megatron.bcd.arguments.validate_training import check_learning_rate
from megatron.bcd.blocks.schedule import block_schedule_from_config
from megatron.bcd.blocks.stages import partition_from_config
from megatron.bcd.config import RunConfig
from megatron.bcd.training.setup import tokenizer_of


def with_length(config: RunConfig) -> RunConfig:
    """`config` with --num-epochs as --train-iters. A collective; reads the data.

    Raises:
        ValueError: as `data.with_epochs`; or the learning rate's schedule does not fit that number of steps.
    """
    if config.training.num_epochs is None:
        return config
    config = data.with_epochs(config, tokenizer_of(config), global_batch_size=data.global_batch_size(config))
    check_learning_rate(flattened(config), {})
    return config


def with_phases(config: RunConfig) -> RunConfig:
    """`config` with the steps of a phase as --bcd-steps-per-block, so that checkpoints hold them. Raises ValueError as
    `block_schedule_from_config`."""
    num_steps = data.num_iterations(config)
    schedule = block_schedule_from_config(config, partition_from_config(config), num_steps=num_steps)
    return config.replace_section("bcd", bcd_steps_per_block=schedule.settings.bcd_steps_per_block)
