"""Rules of block coordinate descent: phases and the prefix cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megatron.bcd.arguments.rules import Run, flag_name, refuse_unless
from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import RunConfig


def check_phases(config: RunConfig, given: Mapping[str, Any]) -> None:
    bcd = config.bcd
    refuse_unless(
        bcd.bcd_switch != "plateau" or "bcd_steps_per_block" not in given,
        "--bcd-steps-per-block does not go with --bcd-switch plateau: give --bcd-min-steps-per-block and "
        "--bcd-max-steps-per-block",
    )
    most = bcd.bcd_max_steps_per_block
    refuse_unless(
        bcd.bcd_switch != "plateau" or most is None or most > 2 * bcd.bcd_plateau_window,
        f"--bcd-max-steps-per-block {most}: no phase would last long enough to end at a plateau; must be more than "
        f"2 x --bcd-plateau-window {bcd.bcd_plateau_window}",
    )
    refuse_unless(
        bcd.bcd_stop_cycle_improvement is None or config.training.eval_iters > 0,
        "--bcd-stop-cycle-improvement needs --eval-iters above 0: it compares validation losses",
    )
    refuse_unless(
        bcd.bcd_run_ahead is None or bcd.bcd_schedule == "bcd",
        "--bcd-run-ahead needs --bcd-schedule bcd: the stock schedule runs nothing ahead",
    )
    refuse_unless(
        config.training.recompute is None
        or bcd.bcd_schedule == "bcd"
        or config.pipeline_size == 1
        or bcd.bcd_num_blocks in (0, 1),
        "--recompute auto needs --bcd-schedule bcd: it counts no activations of stages before the active block",
    )


def check_main_params(config: RunConfig, given: Mapping[str, Any]) -> None:
    """Rules of --bcd-main-params."""
    if config.bcd.bcd_main_params == "host":
        return
    refuse_unless(
        config.precision != "fp32" or "bcd_main_params" not in given,
        "--bcd-main-params drop needs --bf16 or --fp16: in fp32 the weights are the main parameters",
    )
    refuse_unless(
        config.precision == "fp32" or config.optimizer.optimizer != "muon" and config.bcd.bcd_resting_update == "none",
        "--bcd-main-params drop does not go with --optimizer muon or --bcd-resting-update, which keep main parameters: "
        "leave it out",
    )


_SPLITS = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def _check_cut(run: Run) -> None:
    """--pipeline-cut auto decides alone."""
    for field in _SPLITS if run.pipeline_cut == "auto" else ():
        refuse_unless(
            not getattr(run, field),
            f"--pipeline-cut auto and {flag_name(field)} both divide the layers over the stages: give one of them",
        )


def check_chunks(config: RunConfig, run: Run, given: Mapping[str, Any]) -> None:
    """Rules of --pipeline-cut, of layout interleaved, and of stock's flags for virtual pipeline stages."""
    _check_cut(run)
    stages, name = "num_virtual_stages_per_pipeline_rank", flag_name("num_virtual_stages_per_pipeline_rank")
    layers = run.num_layers_per_virtual_pipeline_stage
    refuse_unless(
        layers is None or stages not in given,
        f"{flag_name('num_layers_per_virtual_pipeline_stage')} and {name} say the same: give one of them",
    )
    refuse_unless(
        layers is None or run.num_virtual_stages_per_pipeline_rank is not None,
        f"{flag_name('num_layers_per_virtual_pipeline_stage')} {layers}: must divide the layers of a pipeline stage "
        f"(--num-layers {run.num_layers}, --pipeline-model-parallel-size {run.pipeline_model_parallel_size})",
    )
    refuse_unless(
        (run.num_virtual_stages_per_pipeline_rank or 1) == 1 or run.bcd_layout == "interleaved",
        f"{run.num_virtual_stages_per_pipeline_rank} chunks of the model on every stage ({name}) do not go with "
        f"--bcd-layout {run.bcd_layout}: give --bcd-layout interleaved, or leave one of them out",
    )
    if run.bcd_layout == "interleaved":
        for field in _SPLITS[1:]:
            refuse_unless(
                not getattr(run, field),
                f"{flag_name(field)} does not go with --bcd-layout interleaved, which cuts chunks: give --pipeline-cut "
                "auto or --pipeline-model-parallel-layout instead",
            )
    if config.num_chunks == 1:
        return
    refuse_unless(
        run.bcd_schedule == "bcd",
        "--bcd-layout interleaved does not go with --bcd-schedule stock: with --bcd-num-blocks 1 its order is stock's",
    )
    refuse_unless(
        run.bcd_run_ahead is None,
        "--bcd-layout interleaved does not go with --bcd-run-ahead: no stage runs forward only",
    )
    refuse_unless(
        config.context_size == 1,
        "--bcd-layout interleaved does not go with --context-parallel-size yet: leave one of them out",
    )


def check_resting(config: RunConfig, partition: Partition) -> None:
    """Rules of --bcd-resting-update."""
    rule = config.bcd.bcd_resting_update
    if rule == "none":
        return
    name = f"--bcd-resting-update {rule}"
    refuse_unless(
        config.precision != "fp16",
        f"{name} does not go with --fp16: resting layers have no loss scale; give --bf16",
    )
    refuse_unless(
        not config.optimizer.optimizer_cpu_offload,
        f"{name} does not go with --optimizer-cpu-offload, a baseline of full training: leave one of them out",
    )
    refuse_unless(
        partition.num_blocks > 1 or not partition.has_active_block,
        f"{name}: no layer rests while all of them are one block; give --bcd-num-blocks 2 or more, or 0",
    )


def check_prefix_cache(run: Run) -> None:
    if run.bcd_prefix_cache is None:
        return
    name = f"--bcd-prefix-cache {run.bcd_prefix_cache}"
    refuse_unless(
        run.save is None or os.path.realpath(run.save) != os.path.realpath(run.bcd_prefix_cache),
        f"{name} is the folder of --save: give each a folder of its own",
    )
    refuse_unless(
        run.bcd_sample_ratio is not None,
        f"{name} needs --bcd-sample-ratio: without it a phase uses no sample twice",
    )
    refuse_unless(
        not run.hidden_dropout and not run.attention_dropout,
        f"{name} needs --hidden-dropout 0 and --attention-dropout 0: the cache would repeat one dropout mask for ever",
    )
    refuse_unless(run.bcd_schedule == "bcd", f"{name} needs --bcd-schedule bcd: the stock schedule runs every stage")
    refuse_unless(not run.sequence_parallel, f"{name} does not go with --sequence-parallel")
    refuse_unless(not run.fp8, f"{name} does not go with --fp8-format: ranks that read it would not scale with others")
