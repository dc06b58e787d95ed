"""Collect the metrics of a log line from all parts of a run."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_current_global_batch_size, get_num_microbatches

from megatron.bcd.blocks.schedule import PhaseState
from megatron.bcd.config import RunConfig
from megatron.bcd.metrics.schema import StepMetrics
from megatron.bcd.model.loss import router_losses
from megatron.bcd.planner.run_state import phase_flops
from megatron.bcd.runtime import collectives, memory


def collect_step_metrics(trainer: Any, phase_state: PhaseState) -> StepMetrics:
    """Return the metrics of a `Trainer`'s steps since the last log line, over all ranks. Collective.

    The loss is the mean of the steps that were not skipped, or of all steps if every one was skipped.

    Args:
        phase_state: of the last of these steps, which may have ended its phase.
    """
    config: RunConfig = trainer.config
    active, state, schedule, interval = trainer.active, trainer.state, trainer.block_schedule, trainer.state.interval
    stepped = [result for result in interval if not result.skipped]
    milliseconds = statistics.fmean(result.milliseconds for result in interval)
    batch_size = get_current_global_batch_size()
    counted = active.state_bytes() | {
        "peak_memory_bytes": memory.peak_memory_bytes(),
        "reserved_memory_bytes": memory.reserved_memory_bytes(),
    }
    cache = trainer.prefix_cache
    ranks = collectives.gather_integers(*counted.values(), cache.take_hits(), cache.bytes_on_disk())
    *by_rank, hits, cached = zip(*ranks, strict=True)
    optional: dict[str, Any] = {}
    if config.num_experts:
        optional["router_losses"] = router_losses(get_num_microbatches())
    if config.report.log_params_norm:
        with active.whole_parameters():
            optional["params_norm"] = active.core.params_norm()
    if config.report.log_num_zeros_in_grad:
        optional["num_zeros"] = active.core.num_zeros
    if config.report.log_throughput:
        per_sequence = phase_flops(
            config, trainer.partition, schedule.block(phase_state), padded_vocab_size=trainer.padded_vocab_size
        )
        per_second = per_sequence * batch_size / milliseconds * 1e3
        optional["tflops_per_gpu"] = per_second / torch.distributed.get_world_size() / 1e12
    return StepMetrics(
        iteration=state.iteration,
        consumed_samples=state.consumed_samples,
        cycle=schedule.cycle(phase_state),
        phase=phase_state.phase,
        block=schedule.block(phase_state),
        loss=statistics.fmean(result.loss for result in stepped or interval),
        learning_rate=float(trainer.lr_scheduler.get_lr({})),
        step_learning_rate=interval[-1].learning_rate,
        grad_norm=interval[-1].grad_norm,
        step_time_ms=milliseconds,
        tokens_per_second=batch_size * config.model.seq_length / milliseconds * 1e3,
        loss_scale=active.core.loss_scale() if config.precision == "fp16" else None,
        skipped_iterations=len(interval) - len(stepped),
        skipped_layers=sum(result.skipped_layers for result in interval),
        global_batch_size=batch_size,
        data_seen=trainer.samples.share_seen(in_phase=state.samples_in_phase, seen_before=state.samples_seen_before),
        prefix_cache_hits=sum(hits),
        prefix_cache_bytes=max(cached),
        **dict(zip(counted, by_rank, strict=True)),
        **optional,
    )
