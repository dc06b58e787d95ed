"""Validation of a RunConfig, before any process group exists and before anything is written.

Each rule is one line that names the flag, what is wrong and what would be right. The rules are those
of stock Megatron-LM's ``validate_args`` for a dense GPT, of the block layouts (``blocks``), and of Megatron Core's
TransformerConfig. Data and tokenizer files are checked where they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.bcd.arguments import (
    megatron_flags,
    precision_aware,
    validate_bcd,
    validate_context,
    validate_model,
    validate_sft,
    validate_training,
)
from megatron.bcd.arguments.ranges import range_problems
from megatron.bcd.arguments.rules import Run, flag_name, flattened, refuse_unless
from megatron.bcd.blocks.partition import Partition, partition_from_config
from megatron.bcd.blocks.schedule import block_schedule_from_config
from megatron.bcd.config import RunConfig


def find_problems(
    config: RunConfig, *, given: Mapping[str, Any], world_size: int, writes: bool = True, is_partial: bool = False
) -> list[str]:
    """One line for each rule that `config` breaks.

    Args:
        config: of all flags.
        given: the values of the command line.
        world_size: number of ranks.
        writes: whether to check that the run's files can be written.
        is_partial: flags have been refused before, so that values which the rules need may be absent.
    """
    run = flattened(config)
    problems = list(range_problems(run))
    if problems:
        return problems
    made: list[Partition] = []
    rules: list[Callable[[], object]] = [
        lambda: _check_required(run),
        lambda: validate_model.check_network(run),
        lambda: validate_model.check_positions(run, given),
        lambda: validate_model.check_compatible(run, given),
        lambda: validate_model.check_parallel(run, world_size),
        lambda: validate_context.check_context(run),
        lambda: validate_bcd.check_chunks(config, run, given),
        lambda: made.append(partition_from_config(config)),
        lambda: block_schedule_from_config(config, made[0]),
        lambda: validate_bcd.check_phases(config, given),
        lambda: validate_bcd.check_resting(config, made[0]),
        lambda: validate_bcd.check_main_params(config, given),
        lambda: validate_bcd.check_prefix_cache(run),
        lambda: validate_model.check_precision(run, given),
        lambda: validate_model.check_fp8(run, made[0], starts=writes),
        lambda: precision_aware.check(run, given, starts=writes),
        lambda: validate_model.check_optimizer(run, given),
        lambda: validate_model.check_offload(run, made[0].num_blocks, given),
        lambda: validate_model.check_recomputation(run, made[0].num_blocks, given),
        lambda: validate_training.check_batch(run, world_size),
        lambda: validate_training.check_length(run, given),
        lambda: validate_training.check_evaluation(run),
        lambda: validate_training.check_learning_rate(run, given),
        lambda: validate_training.check_weight_decay(run, given),
        lambda: validate_training.check_data(run),
        lambda: validate_sft.check_fine_tuning(run),
        lambda: validate_training.check_checkpoints(run),
        lambda: validate_training.check_report(run),
        lambda: None if problems else validate_model.check_core_accepts(config),  # would say the same less clearly
        *([lambda: validate_training.check_outputs(run)] * writes),
    ]
    for rule in rules:
        try:
            rule()
        except ValueError as error:
            if str(error) not in problems:
                problems.append(str(error))
        except Exception:
            if not problems and not is_partial:  # else this rule needs what an earlier one has refused
                raise
    return problems


def _check_required(run: Run) -> None:
    missing = [flag_name(field) for field in megatron_flags.REQUIRED if getattr(run, field) is None]
    if run.skip_train:
        missing = [flag for flag in missing if flag != "--lr"]
    elif run.train_iters is None and run.train_samples is None and run.num_epochs is None:
        missing.append("--train-iters (or --train-samples" + (", or --num-epochs)" if run.sft else ")"))
    if run.tokenizer_type is None:
        missing.append("--tokenizer-type")
    sources = (
        "mock_data",
        "data_path",
        "train_data_path",
        "valid_data_path",
        "test_data_path",
        "data_args_path",
        "per_split_data_args_path",
    )
    if not any(getattr(run, source) for source in sources):
        missing.append("--data-path")
    verb, pronoun = ("is", "it") if len(missing) == 1 else ("are", "them")
    refuse_unless(not missing, f"{', '.join(missing)} {verb} missing: give {pronoun}; --help describes every flag")
