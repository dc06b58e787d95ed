"""Validation of a RunConfig, before any process group exists and before anything is written.

Each rule raises ValueError: one line that names the flag, what is wrong and what would be right. The rules are those
of stock Megatron-LM's ``validate_args`` for a dense GPT, of the block layouts (``blocks``), and of Megatron Core's
TransformerConfig. Data and tokenizer files are checked where they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.bcd.arguments import megatron_flags, validate_bcd, validate_model, validate_training
from megatron.bcd.arguments.ranges import check_ranges
from megatron.bcd.arguments.rules import Run, flag_name, flattened, refuse_unless
from megatron.bcd.blocks.partition import partition_from_config
from megatron.bcd.blocks.schedule import block_schedule_from_config
from megatron.bcd.config import RunConfig


def check_run_config(config: RunConfig, *, given: Mapping[str, Any], world_size: int) -> None:
    """Raise ValueError for the first rule that `config` breaks; `given` holds the values of the command line."""
    run = flattened(config)
    _check_required(run)
    check_ranges(run)
    validate_model.check_network(run, given)
    validate_model.check_positions(run, given)
    validate_model.check_compatible(run, given)
    validate_model.check_parallel(run, world_size)
    partition = partition_from_config(config)
    block_schedule_from_config(config, partition)
    validate_bcd.check_phases(config, given)
    validate_bcd.check_resting(
        config, given, num_blocks=partition.num_blocks, has_active_block=partition.has_active_block
    )
    validate_bcd.check_prefix_cache(run, given)
    validate_model.check_precision(run, given)
    validate_model.check_optimizer(run, given)
    validate_model.check_offload(run, partition.num_blocks, given)
    validate_model.check_recomputation(run, partition.num_blocks, given)
    validate_training.check_batch(run, world_size)
    validate_training.check_length(run, given)
    validate_training.check_learning_rate(run, given)
    validate_training.check_weight_decay(run, given)
    validate_training.check_data(run)
    validate_training.check_checkpoints(run)
    validate_model.check_core_accepts(config)
    validate_training.check_outputs(run)


def _check_required(run: Run) -> None:
    missing = [flag_name(field) for field in megatron_flags.REQUIRED if getattr(run, field) is None]
    if run.skip_train:
        missing = [flag for flag in missing if flag != "--lr"]
    elif run.train_iters is None and run.train_samples is None:
        missing.append("--train-iters (or --train-samples)")
    if run.tokenizer_type is None:
        missing.append("--tokenizer-type")
    if not (run.mock_data or run.data_path or run.train_data_path or run.valid_data_path or run.test_data_path):
        missing.append("--data-path")
    verb, pronoun = ("is", "it") if len(missing) == 1 else ("are", "them")
    refuse_unless(not missing, f"{', '.join(missing)} {verb} missing: give {pronoun}; --help describes every flag")
