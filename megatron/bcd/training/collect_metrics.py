"""The record of a log step, gathered from all ranks."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from megatron.core.num_microbatches_calculator import get_current_global_batch_size

from megatron.bcd.blocks.phase_state import PhaseState
from megatron.bcd.metrics.schema import StepMetrics
from megatron.bcd.runtime import collectives, memory

if TYPE_CHECKING:
    from megatron.bcd.training.loop import Trainer


def collect_step_metrics(trainer: Trainer, state: PhaseState) -> StepMetrics:
    """One record for the steps since the last one, of which the last was in the phase `state`; the loss is the mean of
    those that were not skipped, if any. A collective."""
    interval = trainer.interval
    done = [result for result in interval if not result.skipped]
    milliseconds = statistics.fmean(result.milliseconds for result in interval)
    model_state, gradients, optimizer_state, host_state, peak, saved, messages, hits, cached = _by_value(
        trainer.active.model_state_bytes(),
        trainer.active.gradient_bytes(),
        trainer.active.optimizer_state_bytes(),
        trainer.active.host_bytes(),
        memory.peak_memory_bytes(),
        trainer.activation_meter.peak_bytes,
        trainer.schedule.backward_messages,
        trainer.prefix.take_hits(),
        trainer.prefix.bytes_on_disk(),
    )
    return StepMetrics(
        iteration=trainer.iteration,
        consumed_samples=trainer.consumed_samples,
        cycle=trainer.phases.cycle(state),
        phase=state.phase,
        block=trainer.phases.block(state),
        loss=statistics.fmean(result.loss for result in done or interval),
        learning_rate=trainer.learning_rate(state),
        grad_norm=interval[-1].grad_norm,
        step_time_ms=milliseconds,
        tokens_per_second=get_current_global_batch_size() * trainer.config.model.seq_length / milliseconds * 1e3,
        model_state_bytes=model_state,
        peak_memory_bytes=peak,
        gradient_bytes=gradients,
        optimizer_state_bytes=optimizer_state,
        host_state_bytes=host_state,
        saved_activation_bytes=saved,
        backward_messages=messages,
        loss_scale=trainer.active.loss_scale() if trainer.config.precision == "fp16" else None,
        skipped_iterations=len(interval) - len(done),
        global_batch_size=get_current_global_batch_size(),
        data_seen=trainer.samples.share_seen(),
        prefix_cache_hits=sum(hits),
        prefix_cache_bytes=max(cached),
    )


def _by_value(*values: int) -> list[tuple[int, ...]]:
    """Each value from every rank, by rank."""
    return list(zip(*collectives.gather_integers(*values), strict=True))
