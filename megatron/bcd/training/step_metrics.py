"""Collect the metrics of a log line from all parts of a run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_current_global_batch_size, get_num_microbatches

from megatron.bcd.blocks.schedule import BlockSchedule, PhaseState
from megatron.bcd.config import RunConfig
from megatron.bcd.data.samples import TrainingSamples
from megatron.bcd.metrics.schema import StepMetrics
from megatron.bcd.model import router_losses
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.pipeline.schedule import PipelineSchedule
from megatron.bcd.planner.run_state import phase_flops
from megatron.bcd.planner.state import ModelState
from megatron.bcd.prefix_cache.controller import PrefixCache
from megatron.bcd.runtime import collectives, memory
from megatron.bcd.training.state import TrainState
from megatron.bcd.training.timers import StepTimers


@dataclass(frozen=True, kw_only=True)
class StepMetricsCollector:
    """Collects the metrics of a log line from the parts of a run."""

    config: RunConfig
    planned: ModelState
    block_schedule: BlockSchedule
    samples: TrainingSamples
    active: ActiveBlock
    pipeline: PipelineSchedule
    prefix_cache: PrefixCache
    timers: StepTimers

    def collect(self, state: TrainState, phase_state: PhaseState, *, learning_rate: float) -> StepMetrics:
        """Return the metrics of the steps since the last log line, over all ranks. Collective.

        The loss is the mean of the steps that were not skipped, or of all steps if every one was skipped.

        Args:
            phase_state: of the last of these steps, which may have ended its phase.
        """
        active, interval = self.active, state.interval
        live = active.state_bytes()
        stepped = [result for result in interval if not result.skipped]
        milliseconds = statistics.fmean(result.milliseconds for result in interval)
        batch_size = get_current_global_batch_size()
        # each of these is a tuple by rank
        model_state, gradients, optimizer_state, host_state, peak, reserved, messages, hits, cached = zip(
            *collectives.gather_integers(
                live.model_state,
                live.gradients,
                live.optimizer_state,
                live.host,
                memory.peak_memory_bytes(),
                memory.reserved_memory_bytes(),
                self.pipeline.backward_messages,
                self.prefix_cache.take_hits(),
                self.prefix_cache.bytes_on_disk(),
            ),
            strict=True,
        )
        return StepMetrics(
            iteration=state.iteration,
            consumed_samples=state.consumed_samples,
            cycle=self.block_schedule.cycle(phase_state),
            phase=phase_state.phase,
            block=self.block_schedule.block(phase_state),
            loss=statistics.fmean(result.loss for result in stepped or interval),
            learning_rate=learning_rate,
            step_learning_rate=interval[-1].learning_rate,
            grad_norm=interval[-1].grad_norm,
            step_time_ms=milliseconds,
            tokens_per_second=batch_size * self.config.model.seq_length / milliseconds * 1e3,
            model_state_bytes=model_state,
            peak_memory_bytes=peak,
            reserved_memory_bytes=reserved,
            gradient_bytes=gradients,
            optimizer_state_bytes=optimizer_state,
            host_state_bytes=host_state,
            backward_messages=messages,
            loss_scale=active.core.loss_scale() if self.config.precision == "fp16" else None,
            skipped_iterations=len(interval) - len(stepped),
            skipped_layers=sum(result.skipped_layers for result in interval),
            global_batch_size=batch_size,
            data_seen=self.samples.share_seen(in_phase=state.samples_in_phase, seen_before=state.samples_seen_before),
            prefix_cache_hits=sum(hits),
            prefix_cache_bytes=max(cached),
            **self._optional(phase_state, milliseconds),
        )

    def _optional(self, phase_state: PhaseState, milliseconds: float) -> dict[str, Any]:
        """Return the fields that only some flags add."""
        report, active = self.config.report, self.active
        values: dict[str, Any] = {"timers_ms": self.timers.take()}
        if self.config.num_experts:
            values["router_losses"] = router_losses.collect(get_num_microbatches())
        if report.log_params_norm:
            with active.whole_parameters():
                values["params_norm"] = active.core.params_norm()
        if report.log_num_zeros_in_grad:
            values["num_zeros"] = active.core.num_zeros
        if report.log_throughput:
            block = self.block_schedule.block(phase_state)
            planned = self.planned
            per_sequence = phase_flops(
                self.config, planned.partition, block, padded_vocab_size=planned.padded_vocabulary
            )
            per_second = per_sequence * get_current_global_batch_size() / milliseconds * 1e3
            values["tflops_per_gpu"] = per_second / torch.distributed.get_world_size() / 1e12
        return values
