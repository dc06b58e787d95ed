"""The metrics of a log step, gathered from all ranks."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_current_global_batch_size

from megatron.bcd.blocks.phase_state import PhaseState
from megatron.bcd.config import RunConfig
from megatron.bcd.data.samples import TrainingSamples
from megatron.bcd.metrics.schema import StepMetrics
from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.optim.params_norm import params_norm
from megatron.bcd.planner.run_state import phase_flops
from megatron.bcd.prefix_cache.controller import PrefixCache
from megatron.bcd.runtime import collectives, memory
from megatron.bcd.training.state import TrainState
from megatron.bcd.training.train_step import TrainStep


class StepMetricsCollector:
    """Collects what one log line says."""

    def __init__(
        self,
        config: RunConfig,
        *,
        train_step: TrainStep,
        samples: TrainingSamples,
        prefix_cache: PrefixCache,
    ) -> None:
        self._seq_length = config.model.seq_length
        self._has_loss_scale = config.precision == "fp16"
        self._config = config
        self._train_step = train_step
        self._samples = samples
        self._prefix_cache = prefix_cache

    def collect(self, state: TrainState, *, phase_state: PhaseState | None = None) -> StepMetrics:
        """Metrics of the steps since the last log line; the loss is the mean of those that were not skipped, if any. A
        collective.

        `phase_state`: of the last of these steps, where `state` is already in the next phase.
        """
        phase_state = state.phase_state if phase_state is None else phase_state
        active, interval = self._train_step.forward_backward.active, state.interval
        held = active.state_bytes()
        done = [result for result in interval if not result.skipped]
        milliseconds = statistics.fmean(result.milliseconds for result in interval)
        model_state, gradients, optimizer_state, host_state, peak, reserved, saved, messages, hits, cached = _by_value(
            held.model_state,
            held.gradients,
            held.optimizer_state,
            active.kept_bytes() + held.offloaded,
            memory.peak_memory_bytes(),
            memory.reserved_memory_bytes(),
            self._train_step.forward_backward.meter.peak_bytes,
            self._train_step.forward_backward.pipeline.backward_messages,
            self._prefix_cache.take_hits(),
            self._prefix_cache.bytes_on_disk(),
        )
        return StepMetrics(
            iteration=state.iteration,
            consumed_samples=state.consumed_samples,
            cycle=self._train_step.block_schedule.cycle(phase_state),
            phase=phase_state.phase,
            block=self._train_step.block_schedule.block(phase_state),
            loss=statistics.fmean(result.loss for result in done or interval),
            learning_rate=self._train_step.learning_rate(phase_state),
            grad_norm=interval[-1].grad_norm,
            step_time_ms=milliseconds,
            tokens_per_second=get_current_global_batch_size() * self._seq_length / milliseconds * 1e3,
            model_state_bytes=model_state,
            peak_memory_bytes=peak,
            reserved_memory_bytes=reserved,
            gradient_bytes=gradients,
            optimizer_state_bytes=optimizer_state,
            host_state_bytes=host_state,
            saved_activation_bytes=saved,
            backward_messages=messages,
            loss_scale=active.loss_scale() if self._has_loss_scale else None,
            skipped_iterations=len(interval) - len(done),
            global_batch_size=get_current_global_batch_size(),
            data_seen=self._samples.share_seen(in_phase=state.samples_in_phase, seen_before=state.samples_seen_before),
            prefix_cache_hits=sum(hits),
            prefix_cache_bytes=max(cached),
            **self._asked_for(phase_state, milliseconds),
        )

    def _asked_for(self, phase_state: PhaseState, milliseconds: float) -> dict[str, Any]:
        """What flags add to a log line."""
        report, active = self._config.report, self._train_step.forward_backward.active
        found: dict[str, Any] = {
            "timers_ms": self._train_step.timers.take(),
            "straggler_ms": self._train_step.forward_backward.stragglers.take(),
        }
        if report.log_params_norm:
            with active.whole_parameters():
                found["params_norm"] = params_norm(active.model, held=active.held_main_params())
        if report.log_num_zeros_in_grad:
            found["num_zeros"] = active.num_zeros
        if report.log_throughput:
            per_sequence = phase_flops(
                self._config,
                active.partition,
                self._train_step.block_schedule.block(phase_state),
                padded_vocab_size=unwrap_model(active.model).vocab_size,
            )
            per_second = per_sequence * get_current_global_batch_size() / milliseconds * 1e3
            found["tflops_per_gpu"] = per_second / torch.distributed.get_world_size() / 1e12
        return found


def _by_value(*values: int) -> list[tuple[int, ...]]:
    """Each value from every rank, by rank."""
    return list(zip(*collectives.gather_integers(*values), strict=True))
