"""The length of a fine-tuning run that is given in epochs."""

from __future__ import annotations

from megatron.bcd import data
from megatron.bcd.arguments.rules import flattened
from megatron.bcd.arguments.validate_training import check_learning_rate
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
