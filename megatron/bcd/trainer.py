"""The run, from top to bottom: setup, train, train_step, switch_block, evaluate, save, restore.

`Trainer` trains block after block (arXiv 2506.12037, Algorithm 1). All methods are collectives: every rank calls them
in the same order, and decisions use values that are reduced over all ranks. What changes during a run is in
`TrainState`, which a checkpoint holds, and in the parts that `__init__` builds once.

Tensor shapes: B micro-batch size, S sequence length, H hidden size.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    init_num_microbatches_calculator,
    update_num_microbatches,
)
from megatron.core.utils import get_model_config

from megatron.bcd import __version__, data
from megatron.bcd.blocks.partition import partition_from_config
from megatron.bcd.blocks.schedule import PhaseState, block_schedule_from_config
from megatron.bcd.checkpoint import loader, optimizer_state, run_state
from megatron.bcd.checkpoint.saver import Saver
from megatron.bcd.config import RunConfig, run_config_to_dict
from megatron.bcd.data.samples import TrainingSamples
from megatron.bcd.huggingface import folder, run_models
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.metrics.schema import EvalMetrics, StepMetrics
from megatron.bcd.model import builder
from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.model.implementation import Implementation, available_implementation
from megatron.bcd.model.loss import masked_loss, reduce_losses
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.optim.lr_schedule import build_scheduler
from megatron.bcd.outer.groups import ExchangeFailed, ReplicaGroups, RunParts
from megatron.bcd.outer.membership import check_lighthouse
from megatron.bcd.pipeline.schedule import PipelineSchedule
from megatron.bcd.planner.run_state import RunMemory, head_passes, model_state_of, phase_flops
from megatron.bcd.prefix_cache.controller import PrefixCache
from megatron.bcd.runtime import collectives, device, memory, replicas, rng
from megatron.bcd.runtime.activation_meter import ActivationMeter
from megatron.bcd.tokenizer import build_tokenizer, padded_vocab_size
from megatron.bcd.training.profiler import StepProfiler
from megatron.bcd.training.recompute import Recomputation, memory_limit
from megatron.bcd.training.reporting import reporter_of, summarize
from megatron.bcd.training.state import StepResult, TrainingFailed, TrainState
from megatron.bcd.training.stop import StopRequests
from megatron.bcd.training.timers import StepTimers, Stragglers

ModelBuilder = Callable[[RunConfig, int, Implementation], torch.nn.Module]


class Trainer:
    """A run on this rank: `restore` enters its first phase, `train` does the rest."""

    # ------------------------------------------------------------------------------------------------------- setup

    def __init__(
        self,
        config: RunConfig,
        build_model: ModelBuilder = builder.build_model,
        *,
        source: loader.Source | None = None,
        is_restart: bool = False,
        reporter: Reporter | None = None,
    ) -> None:
        """Build everything once, and print the run summary.

        Needs initialised parallel groups and seeded random generators. `source` is the checkpoint to load the weights
        from; without one they come from --load-hf, or are drawn. `is_restart`: torchrun has started the same command
        again. `reporter`: in place of the one that the flags describe.

        Raises:
            ValueError: data, tokenizer, model or checkpoint do not fit the flags or this machine; one line.
        """
        self.partition = partition_from_config(config)
        self.train_iters = data.num_iterations(config)
        self.block_schedule = block_schedule_from_config(config, self.partition, num_steps=self.train_iters)
        # a checkpoint holds the length of the phases, also where no flag gives it
        steps = self.block_schedule.settings.bcd_steps_per_block
        self.config = config = config.replace_section("bcd", bcd_steps_per_block=steps)
        self.source = source
        resumed = source.state if source else None
        self.state = TrainState(run=run_state.name_of_run(config, resumed))
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.global_batch_size = data.global_batch_size(config)
        self.reporter = reporter or reporter_of(config, resumed)
        init_num_microbatches_calculator(
            torch.distributed.get_rank(),
            list(config.training.rampup_batch_size or ()) or None,
            self.global_batch_size,
            config.training.micro_batch_size,
            parallel_state.get_data_parallel_world_size(),
        )
        if config.groups.lighthouse is not None:  # before anything is written
            check_lighthouse(config.groups.lighthouse)
        data_notes = self._build_model_and_data(build_model)
        self._build_parts()
        self.groups = self._replica_groups()
        self.saver = Saver(config.checkpoint, self.reporter) if config.checkpoint.save else None
        self.exporter = self._exporter(is_continued=is_restart or resumed is not None)
        self.reporter.run_summary(
            summarize(
                config=self.config,  # with what --bcd-frozen-weights auto has chosen
                partition=self.partition,
                block_schedule=self.block_schedule,
                model=self.model,
                planned=self.planned,
                implementation=self.implementation,
                vocab_size=self.vocab_size,
                train_iters=self.train_iters,
                samples=self.samples.subset,
                recomputation=self.recomputation,
            )
        )
        for note in data_notes:
            self.reporter.note(note)

    def _replica_groups(self) -> ReplicaGroups | None:
        """Of --lighthouse."""
        if self.config.groups.lighthouse is None:
            return None
        parts = RunParts(
            counters=self._counters,
            iteration=lambda: self.state.iteration,
            should_stop=self.stop.is_signalled,
            take=self._continue_from,
        )
        return ReplicaGroups(
            self.config, active=self.active, train=self.splits.train, parts=parts, reporter=self.reporter
        )

    def _exporter(self, *, is_continued: bool) -> run_models.Exporter | None:
        """Return the exporter of --save-hf, if it is given."""
        if self.config.checkpoint.save_hf is None:
            return None
        return run_models.Exporter(self.config, self.reporter, run=self.state.run, is_continued=is_continued)

    def _build_model_and_data(self, build_model: ModelBuilder) -> tuple[str, ...]:
        """Tokenizer, splits and the model with its first weights; lines for the run summary about the data."""
        config = self.config
        tokenizer = build_tokenizer(**vars(config.tokenizer))
        self.vocab_size = tokenizer.vocab_size
        hf_name = config.checkpoint.load_hf
        if hf_name is not None:
            network = folder.read_architecture(folder.locate(hf_name, flag="--load-hf", weights=False))
            if tokenizer.vocab_size > network.vocab_size:
                raise ValueError(
                    f"--load-hf {hf_name} has an embedding for {network.vocab_size} ids, and the tokenizer has "
                    f"{tokenizer.vocab_size}: give the model's own tokenizer"
                )
            self.vocab_size = network.vocab_size
        self.padded_vocab_size = padded_vocab_size(
            self.vocab_size, config.model.make_vocab_size_divisible_by, config.tensor_size
        )
        # no file is written before everything has been checked: what is planned here is built below
        make_plan = data.plan_fine_tuning if config.data.sft else data.plan_splits
        least_steps = self.block_schedule.least_steps_per_cycle
        plan = make_plan(config, tokenizer, self.train_iters, least_steps_per_cycle=least_steps)
        if config.bcd.bcd_frozen_weights == "auto":
            limit = memory_limit(config, flag="--bcd-frozen-weights auto")
            where, number = self._run_memory().frozen_weights(memory_bytes=limit)
            config = config.replace_section("bcd", bcd_frozen_weights=where, bcd_resident_layers=number)
            self.config = config
        self.implementation = available_implementation(config)
        self.model = build_model(config, self.padded_vocab_size, self.implementation)
        if config.training.data_parallel_random_init:
            builder.broadcast_from_first_replica(self.model)
        if self.source is not None:
            loader.load_weights(self.source, self.model)
        elif hf_name is not None:
            run_models.load_weights(folder.ModelFolder(folder.locate(hf_name, flag="--load-hf")), self.model)
        if (frozen_weights := builder.get_frozen_weights(self.model)) is not None:
            frozen_weights.begin_phase(())  # the ranks that share them have loaded them
        self.splits = plan.build()
        self.samples = TrainingSamples(config, dataset=self.splits.train, epoch_samples=plan.epoch_samples)
        return plan.notes

    def _build_parts(self) -> None:
        """What trains the model, without an optimizer: each phase builds its own."""
        config = self.config
        self.active = ActiveBlock(model=self.model, config=config, partition=self.partition, stage=self.stage)
        self.pipeline = PipelineSchedule(
            name=config.bcd.bcd_schedule,
            partition=self.partition,
            run_ahead=config.bcd.bcd_run_ahead,
            timeout_minutes=config.training.distributed_timeout_minutes,
            head_passes=head_passes(config, padded_vocab_size=self.padded_vocab_size),
        )
        self.lr_scheduler = build_scheduler(
            config, SimpleNamespace(param_groups=[]), functools.partial(data.samples_after, config)
        )
        self.stop = StopRequests(config.checkpoint)
        self.prefix_cache = PrefixCache(
            config=config,
            model=self.model,
            partition=self.partition,
            stage=self.stage,
            samples=self.samples,
            pipeline=self.pipeline,
            implementation=self.implementation,
            reporter=self.reporter,
            should_stop=self.stop.is_signalled,
        )
        run_memory = self._run_memory()
        self.planned = run_memory.state
        self.recomputation = Recomputation(config, model=self.model, stage=self.stage, run=run_memory)
        self.timers = StepTimers(config.report)
        self.stragglers = Stragglers(config.report)
        self.profiler = StepProfiler(config.report)
        self.meter = ActivationMeter(memory.allocated_bytes_function())
        self._metered: tuple[int, int] | None = None
        self._is_switch_unchecked = False
        self._has_joined = False
        """Other replica groups, at the end of a step of theirs."""
        self._validation_batches: Iterator[data.Batch] | None = None
        self._last_validation: tuple[int, float] | None = None

    def _run_memory(self) -> RunMemory:
        microbatches = self.global_batch_size // self.config.training.micro_batch_size
        return RunMemory(
            config=self.config,
            state=model_state_of(
                self.config, self.partition, padded_vocab_size=self.padded_vocab_size, num_replicas=replicas.size()
            ),
            num_microbatches=microbatches // parallel_state.get_data_parallel_world_size(),
        )

    # ------------------------------------------------------------------------------------------------------- train

    def train(self) -> None:
        """Train to the end and evaluate, or with --skip-train only evaluate. Signals save and stop.

        Raises:
            TrainingFailed: too many consecutive steps were not finite, or the last checkpoint can't be written.
        """
        state, training = self.state, self.config.training
        with self.stop.listening(), _garbage_collector(is_manual=training.manual_gc):
            if training.skip_train:
                self.evaluate_at_end()
                return
            if state.iteration < self.train_iters:
                self._warn_of_untrained(num_steps=self.train_iters - state.iteration)
            is_last = self.block_schedule.is_converged(state.phase_state)  # a checkpoint of a converged run
            is_stopped = False
            is_at_end = is_last or state.iteration >= self.train_iters
            if self._has_joined:  # perhaps as the first group: no other one saves after this step
                is_stopped = self._stop_or_save(is_last=is_at_end, requests=None)
            self.module.train()
            if self.exporter is not None and is_at_end and self._is_writer and not self._has_joined:
                self._export(is_last=True)  # the run that got here may have ended before, or had no --save-hf
            while state.iteration < self.train_iters and not (is_last or is_stopped):
                update_num_microbatches(state.consumed_samples, consistency_check=False)
                self.profiler.before_step(state.iteration)
                phase = state.phase_state.phase
                result = self.train_step(self._batches(), num_microbatches_next=self._num_microbatches_next())
                is_last = self._after_step(result)
                # the step has exchanged the requests to stop, unless something that takes long came after it
                is_only_a_step = state.phase_state.phase == phase and not self._is_evaluation_due(state.iteration)
                is_stopped = self._stop_or_save(is_last=is_last, requests=result.requests if is_only_a_step else None)
                self.profiler.after_step(state.iteration, is_last=is_last or is_stopped)
                interval = training.manual_gc_interval if training.manual_gc else 0
                if interval and state.iteration % interval == 0:
                    gc.collect()
            self.prefix_cache.close()
            if not is_stopped:
                self._warn_of_untrained(num_steps=0)
                self.evaluate_at_end()

    def _after_step(self, result: StepResult) -> bool:
        """Count, check, log, exchange and evaluate; at the end of a phase start the next one. Whether no step
        follows."""
        state = self.state
        num_groups = 1 if self.groups is None else self.groups.size
        state.after_step(result, num_samples=get_current_global_batch_size() * num_groups)
        self.reporter.progress(state.iteration)
        self._check_switch(result)
        self._check_replicas()
        self._check_skipped(result)
        is_last = state.iteration == self.train_iters
        if state.iteration % self.config.report.log_interval == 0 or state.iteration == 1 or is_last:
            self.reporter.step(self._step_metrics(state.phase_state))
            if state.iteration > 1:  # as in stock, the first iteration also counts in the first interval
                state.interval = []
        if self.groups is not None and self._is_exchange_due(state.iteration) and not self._exchange(self.groups):
            return state.iteration >= self.train_iters
        return self._end_step(loss=result.loss)

    def _end_step(self, *, loss: float | None) -> bool:
        """What follows the exchange after a step, also for a group that has taken the others' state there."""
        state = self.state
        is_last = state.iteration == self.train_iters
        if self._is_evaluation_due(state.iteration):
            self.evaluate("validation")
        before = state.phase_state
        state.phase_state = self.block_schedule.after_step(before, loss=loss)
        if state.phase_state.phase == before.phase:
            return is_last
        state.after_phase(num_distinct_samples=self.samples.num_distinct(state.samples_in_phase))
        self.samples.end_phase()
        if self._is_converged(before, is_last=is_last) or is_last:
            return True
        self.switch_block(before)
        return False

    def _is_converged(self, before: PhaseState, *, is_last: bool) -> bool:
        """Whether the cycle that has just ended, if one has, improved too little (--bcd-stop-cycle-improvement)."""
        state, schedule = self.state, self.block_schedule
        least = self.config.bcd.bcd_stop_cycle_improvement
        if least is None or not schedule.is_cycle_end(state.phase_state):
            return False
        if self._last_validation is not None and self._last_validation[0] == state.iteration:
            loss: float | None = self._last_validation[1]
        else:
            loss = self.evaluate("validation", can_stop=False)
        assert loss is not None
        state.phase_state = schedule.after_evaluation(state.phase_state, loss)
        if is_last or not schedule.is_converged(state.phase_state):
            return False
        losses = [end.validation_loss for end in state.phase_state.cycle_ends]
        self.reporter.note(
            f"the run ends after iteration {state.iteration}: cycle {schedule.cycle(state.phase_state) - 1} brought "
            f"the validation loss from {losses[0]:.6f} to {losses[1]:.6f}, an improvement of less than "
            f"--bcd-stop-cycle-improvement {least}"
        )
        if state.interval:
            self.reporter.step(self._step_metrics(before))
            state.interval = []
        return True

    def _num_microbatches_next(self) -> int:
        """Microbatches of the iteration after the coming one, if it follows directly and in the same phase; else 0."""
        state, after = self.state, self.state.iteration + 1
        is_last = after == self.train_iters
        if (
            is_last
            or self.stop.reason is not None
            or self.stop.is_interval_over(after)
            or self._is_evaluation_due(after)
            or (self.groups is not None and self._is_exchange_due(after))
            or self._is_save_due(after, is_last=is_last)
            or self._is_export_due(after, is_last=is_last)
            or (self.block_schedule.num_blocks > 1 and self.block_schedule.may_end_with_next_step(state.phase_state))
        ):
            return 0
        if not self.config.training.rampup_batch_size:
            return get_num_microbatches()
        update_num_microbatches(state.consumed_samples + get_current_global_batch_size(), consistency_check=False)
        num_microbatches = get_num_microbatches()
        update_num_microbatches(state.consumed_samples, consistency_check=False)
        return num_microbatches

    def _warn_of_untrained(self, *, num_steps: int) -> None:
        """Name what `num_steps` more steps leave untrained for certain; with none, what the run has left untrained."""
        schedule, after = self.block_schedule, self.state.phase_state
        if num_steps > 0:
            after = PhaseState(phase=schedule.phases_within(after, num_steps))
        is_unknown = num_steps > 0 and self.config.bcd.bcd_order == "greedy"
        visited = range(min(after.phase, schedule.num_blocks)) if is_unknown else schedule.visited(after)
        parts = self.partition.describe_untrained(visited)
        if parts:
            self.reporter.warning(
                f"{len(visited)} of {schedule.num_blocks} blocks are active in {self.train_iters:,} steps "
                f"({schedule.describe()}); {'the other blocks' if is_unknown else ', '.join(parts)} "
                f"{'will stay' if num_steps > 0 else 'stayed'} as at the start: give more steps, fewer blocks or "
                "shorter phases"
            )

    # -------------------------------------------------------------------------------------------------- train_step

    def train_step(self, batches: Iterator[data.Batch], *, num_microbatches_next: int = 0) -> StepResult:
        """Train on the next global batch. If another step of the same phase follows directly, `num_microbatches_next`
        is its number of microbatches, and forward-only stages run ahead with them."""
        training, active, phase_state = self.config.training, self.active, self.state.phase_state
        stopwatch = device.Stopwatch()
        active.zero_grad()
        self.pipeline.prepare_next(num_microbatches_next)
        with self._metering_once_per_phase(), self.timers.connected(active), self.stragglers.counting():
            losses = self.forward_backward(batches, get_num_microbatches(), forward_only=False)
        if training.empty_unused_memory_level >= 1:
            memory.release_cached_memory()
        # one all-reduce for the loss and for what any rank asks of the others
        is_writing = self.saver is not None and self.saver.is_writing
        loss_sum, num_tokens, requests = reduce_losses(losses, self.stop.on_this_rank(is_writing=is_writing))
        loss = loss_sum / max(num_tokens, 1.0)
        learning_rate = self._learning_rate(phase_state)
        if self.block_schedule.scales_learning_rate:
            self.lr_scheduler.step(0)  # undoes the scaling of a step that was skipped
            active.scale_learning_rate(self.block_schedule.learning_rate_factor(phase_state))
        # with fp16 the optimizer must see the overflow, to lower the loss scale
        skips_non_finite = training.check_for_nan_in_loss_and_grad
        is_stepped = math.isfinite(loss) or self.config.precision == "fp16" or not skips_non_finite
        with self.timers.connected(active), self.timers.timing_optimizer():
            tokens = num_tokens if get_model_config(self.model).calculate_per_token_loss else None
            grad_norm = active.step(skip_non_finite=skips_non_finite, num_tokens=tokens) if is_stepped else None
        if grad_norm is not None:
            self.lr_scheduler.step(get_current_global_batch_size())
        if training.empty_unused_memory_level >= 2:
            memory.release_cached_memory()
        stopwatch.stop()
        return StepResult(
            loss=loss, grad_norm=grad_norm, learning_rate=learning_rate, duration=stopwatch, requests=tuple(requests)
        )

    @property
    def module(self) -> torch.nn.Module:
        """The model as the pipeline schedule takes it: in Megatron Core's DDP while a block is active."""
        return self.active.wrapped or self.model

    def forward_backward(
        self, batches: Iterator[data.Batch], num_microbatches: int, *, forward_only: bool
    ) -> list[dict[str, Any]]:
        """All passes of one iteration. What the loss function reported by microbatch, on the last stage; an empty list
        on the others."""
        return self.pipeline(
            forward_step_func=self.forward_step,
            data_iterator=batches,
            model=self.module,
            num_microbatches=num_microbatches,
            seq_length=self.config.model.seq_length,
            micro_batch_size=self.config.training.micro_batch_size,
            decoder_seq_length=self.config.model.seq_length,
            forward_only=forward_only,
        )

    def forward_step(self, batches: Iterator[data.Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        """Run one microbatch through this stage (one chunk of it). If the batch holds `prefix_output` [S, B, H], the
        stage starts at its first active layer.

        Returns:
            The stage's output (token losses [B, S] on the last stage), and the function that reduces it to the loss.
        """
        timers = get_model_config(model).timers
        if timers is not None:
            timers("batch-generator", log_level=2).start()
        batch = self.stragglers.next_batch(batches)
        if timers is not None:
            timers("batch-generator").stop()
        from_prefix: dict[str, Any] = {}
        if "prefix_output" in batch:
            from_prefix = {"decoder_input": batch["prefix_output"], "extra_block_kwargs": {"behind_prefix": True}}
        output = model(
            batch.get("tokens"),
            batch.get("position_ids"),
            batch.get("attention_mask"),
            labels=batch.get("labels"),
            **from_prefix,
        )
        self.stragglers.after_forward()
        self.meter.after_forward()
        return output, functools.partial(masked_loss, batch.get("loss_mask"))

    def _batches(self) -> Iterator[data.Batch]:
        """This rank's microbatches from here on; obtained before each step."""
        batches = self.samples.batches(
            phase=self.state.phase_state.phase,
            consumed_samples=self.state.consumed_samples,
            position=self.state.samples_in_phase,
        )
        return self.prefix_cache.add_prefix_outputs(batches, position=self.state.samples_in_phase)

    def _learning_rate(self, phase_state: PhaseState) -> float:
        """The rate of the active block's parameters in the coming step."""
        return float(self.lr_scheduler.get_lr({})) * self.block_schedule.learning_rate_factor(phase_state)

    def _logged_learning_rate(self) -> float:
        """Return the schedule's rate of the next step, as stock logs it. If the blocks scale it, return the rate that
        the last step used."""
        if self.block_schedule.scales_learning_rate:
            return self.state.interval[-1].learning_rate
        return float(self.lr_scheduler.get_lr({}))

    def _metering_once_per_phase(self) -> contextlib.AbstractContextManager[None]:
        """Count saved activations in a phase's first iteration, and after a change of the batch size."""
        now = (self.state.phase_state.phase, get_num_microbatches())
        # without an allocator's count it would keep storages, which streamed layers change between the passes
        is_streamed = self.config.bcd.bcd_frozen_weights == "host" and memory.allocated_bytes_function() is None
        if now == self._metered or is_streamed:
            return contextlib.nullcontext()
        self._metered = now
        return self.meter.measuring(self.model.parameters())

    # ------------------------------------------------------------------------------------------------ switch_block

    def switch_block(self, before: PhaseState) -> None:
        """From the phase `before` to the present one. The same block continues with its optimizer."""
        state, schedule = self.state, self.block_schedule
        if not schedule.is_switch(before, state.phase_state):
            self._begin_phase()
            return
        timer = self.timers("switch", log_level=0)
        timer.start()
        if self.saver is not None and self.config.bcd.bcd_frozen_weights == "host":
            self.saver.finish()  # the write reads frozen weights where they lie
        self.end_phase()
        self._build_block()
        self._begin_phase()
        timer.stop()
        self.reporter.phase(
            iteration=state.iteration,
            cycle=schedule.cycle(state.phase_state),
            phase=state.phase_state.phase,
            block=schedule.block(state.phase_state),
            switch_time_ms=timer.elapsed() * 1e3,
        )

    def end_phase(self, *, is_end_of_run: bool = False) -> None:
        """Free gradients, optimizer and reader threads. The weights stay, and unless the run ends what is kept of the
        block's state."""
        self.prefix_cache.close()
        self.lr_scheduler.optimizer = None  # a reference here would keep the old optimizer alive
        self.active.dispose(is_end_of_run=is_end_of_run)
        memory.reset_peak_memory()  # a phase's peak includes the allocation of its own state

    def _build_block(self) -> None:
        """Gradient buffers and optimizer of the present phase's block. Greedy order selects the block first."""
        state, schedule = self.state, self.block_schedule
        if schedule.needs_scores(state.phase_state):
            scores = self._gradient_scores(schedule.candidates(state.phase_state))
            state.phase_state = schedule.choose_block(state.phase_state, scores)
        block = schedule.block(state.phase_state)
        self.active.build(block)
        self.recomputation.begin_phase(block)
        self.lr_scheduler.optimizer = self.active.scheduled()
        self.lr_scheduler.step(0)  # sets the present learning rate in the new optimizer's groups
        self._is_switch_unchecked = True

    def _begin_phase(self) -> None:
        """What each phase starts with, also where the same block continues: switch check, prefix cache and pipeline
        schedule."""
        state, block = self.state, self.block_schedule.block(self.state.phase_state)
        if self._is_switch_unchecked:
            self.active.begin_switch_check()
        first_iteration = state.iteration - state.phase_state.step_in_phase
        least_steps = self.block_schedule.least_steps(state.phase_state.phase)
        num_steps = min(least_steps, self.train_iters - first_iteration)
        is_served = False
        if self.prefix_cache.root is not None:
            with self.active.whole_parameters():
                is_served = self.prefix_cache.begin_phase(
                    state.phase_state.phase, block, num_samples=num_steps * self.global_batch_size
                )
        self.pipeline.begin_phase(block, is_prefix_cached=is_served)
        if self.groups is not None:
            self.groups.begin_phase()

    def _gradient_scores(self, candidates: Sequence[int]) -> dict[int, float]:
        """Greedy order (Gauss-Southwell rule): the root mean square of each candidate's gradient, its norm over the
        square root of its number of parameters, so that large and small blocks compare.

        One candidate after another is made active, so the memory of one block is enough. All are measured on the same
        coming microbatches with the same dropout; the random generators of the training keep their state.
        """
        coming = self.samples.look_ahead(
            phase=self.state.phase_state.phase,
            consumed_samples=self.state.consumed_samples,
            position=self.state.samples_in_phase,
        )
        number = self.config.bcd.bcd_greedy_microbatches
        found = list(itertools.islice(coming, number))
        batches = [found[index % len(found)] for index in range(number)]  # the data may end before
        scores = {}
        for block in candidates:
            self.active.build(block)
            self.recomputation.begin_phase(block)
            self.pipeline.begin_phase(block)
            with rng.preserve_random_generators():
                norm = self._gradient_norm(batches)
            scores[block] = norm / math.sqrt(max(1, self.active.num_block_parameters()))
            self.active.dispose()
        # replicas that reduce separately may differ in the last bit, and must make the same choice
        return collectives.on_rank_0(lambda: scores)

    def _gradient_norm(self, batches: Sequence[data.Batch]) -> float:
        """Of the active block, in train mode because recomputation depends on it. With fp16 the loss scale is lowered
        until nothing overflows, and reset afterwards."""
        active = self.active
        self.module.train()
        before = active.loss_scaler_state()
        scaler = dict(before or {})
        while True:
            active.zero_grad()
            self.forward_backward(iter(batches), len(batches), forward_only=False)
            norm = active.block_gradient_norm()
            if math.isfinite(norm) or scaler.get("scale", 1.0) <= 1.0:
                break
            scaler["scale"] /= 16.0
            active.set_loss_scaler_state(scaler)
        if before is not None:
            active.set_loss_scaler_state(before)
        return norm

    # ------------------------------------------------------------------------------------------------------ exchange

    def _is_exchange_due(self, iteration: int) -> bool:
        """Whether the replica groups exchange what they have changed after `iteration`, a step of the present phase:
        then all of them do, or one ends whose result was delayed."""
        interval = self.config.groups.outer_interval
        return (
            self._is_exchange_waited_for(iteration)
            or (interval is not None and (self.state.phase_state.step_in_phase + 1) % interval == 0)
            or (self.groups is not None and self.groups.due == iteration)
        )

    def _is_exchange_waited_for(self, iteration: int) -> bool:
        """Whether all groups must have the same weights after `iteration`."""
        checkpoint = self.config.checkpoint
        intervals = (checkpoint.save_interval, checkpoint.save_hf_interval)
        return (
            iteration == self.train_iters
            or self.block_schedule.may_end_with_next_step(self.state.phase_state)
            or any(interval and iteration % interval == 0 for interval in intervals)
            or self.stop.is_interval_over(iteration)
        )

    def _exchange(self, groups: ReplicaGroups) -> bool:
        """As `ReplicaGroups.exchange`. Raises TrainingFailed."""
        try:
            is_in_step = groups.exchange(waits=self._is_exchange_waited_for(self.state.iteration))
        except ExchangeFailed as error:
            raise TrainingFailed(f"iteration {self.state.iteration}: {error}; {self._where_to_resume()}") from error
        self._follow_groups(groups)
        return is_in_step

    def _join(self, groups: ReplicaGroups) -> None:
        """Meet the other groups. Raises ValueError: this one is of another run, or there is no way to them."""
        try:
            is_in_step = groups.join()
        except ExchangeFailed as error:
            raise ValueError(f"--lighthouse {self.config.groups.lighthouse}: {error}") from error
        self._follow_groups(groups)
        self._has_joined = is_in_step
        if is_in_step:
            self._end_step(loss=None)

    def _follow_groups(self, groups: ReplicaGroups) -> None:
        """After an exchange, read this group's samples, and check a switch by the weights that were exchanged."""
        if self._is_switch_unchecked:
            self.active.begin_switch_check()
        share = data.GroupShare(group=groups.rank, num_groups=groups.size, batch_size=self.global_batch_size)
        self.samples.set_share(share)

    def _counters(self) -> dict[str, Any]:
        """For a group that joins: all that decides on its next step, beside tensors."""
        counters = {own.name: getattr(self.state, own.name) for own in fields(run_state.Counters)}
        phase = self.state.phase_state.to_dict()
        return {"counters": counters, "phase": phase, "scheduler_steps": self.lr_scheduler.num_steps}

    def _continue_from(self, there: Mapping[str, Any], load: Callable[[Callable[[], None]], None]) -> None:
        """Go to where another group is, by its `_counters`; `load` loads its tensors and calls what builds the
        block."""
        if self.saver is not None:
            self.saver.finish()
        self.end_phase(is_end_of_run=True)
        for name, value in there["counters"].items():
            setattr(self.state, name, value)
        self.state.phase_state = PhaseState.from_dict(there["phase"])
        self.state.interval = []
        self.lr_scheduler.num_steps = there["scheduler_steps"]
        self.samples.set_share(self.samples.share, is_moved=True)
        self._validation_batches = None
        load(self._build_block)
        self._begin_phase()

    # ------------------------------------------------------------------------------------- checks and metrics of a step

    def _check_switch(self, result: StepResult) -> None:
        """Once per phase, after the first step with a learning rate and a gradient: did the active block move, and
        nothing else? Raises RuntimeError if not."""
        if not self._is_switch_unchecked or result.skipped or not result.learning_rate or not result.grad_norm:
            return
        self._is_switch_unchecked = False
        with self.active.whole_parameters():
            problem = self.active.check_switch()
        if problem:
            raise RuntimeError(f"iteration {self.state.iteration}, phase {self.state.phase_state.phase}: {problem}")

    def _check_replicas(self) -> None:
        """--check-weight-hash-across-dp-replicas-interval: do all data-parallel ranks hold the same bits?"""
        interval, iteration = self.config.training.check_weight_hash_across_dp_replicas_interval, self.state.iteration
        if interval is None or iteration % interval:
            return
        with self.active.whole_parameters():
            mine = {
                name: hashlib.sha256(weight.detach().cpu().contiguous().view(torch.uint8).numpy()).digest()[:8]
                for name, weight in unwrap_model(self.model).named_parameters()
            }
        ranks = collectives.gather_objects((self.stage, parallel_state.get_tensor_model_parallel_rank(), mine))
        first: dict[tuple[int, int], int] = {}
        for rank, (stage, tensor_rank, digests) in enumerate(ranks):
            reference = first.setdefault((stage, tensor_rank), rank)
            for name, digest in digests.items():
                if digest != ranks[reference][2][name]:
                    raise TrainingFailed(
                        f"iteration {iteration}: {name} of rank {rank} differs from that of rank {reference}, which "
                        "should be the same (--check-weight-hash-across-dp-replicas-interval); a device or a network "
                        "may be faulty"
                    )

    def _check_skipped(self, result: StepResult) -> None:
        """Count consecutive skipped steps; --max-skipped-steps of them end the run. fp16's own search for a loss scale
        does not count."""
        config, state = self.config, self.state
        lowest, is_fixed = config.optimizer.min_loss_scale, config.optimizer.loss_scale is not None
        is_search = config.precision == "fp16" and not is_fixed and self.active.loss_scale() > lowest
        state.skipped_steps = state.skipped_steps + 1 if result.skipped and not is_search else 0
        if state.skipped_steps < config.training.max_skipped_steps:
            return
        if self.saver is not None:
            self.saver.finish()
        raise TrainingFailed(
            f"iteration {state.iteration}: loss or gradient was not finite in {state.skipped_steps} steps in a row "
            f"(--max-skipped-steps), the weights are those before them; {self._where_to_resume()}. A lower --lr, a "
            "longer warm-up or --clip-grad may help"
        )

    def _step_metrics(self, phase_state: PhaseState) -> StepMetrics:
        """Metrics of the steps since the last log line, of all ranks; the loss is the mean of those that were not
        skipped, if any. `phase_state`: of the last of these steps."""
        active, state, interval = self.active, self.state, self.state.interval
        held = active.state_bytes()
        done = [result for result in interval if not result.skipped]
        milliseconds = statistics.fmean(result.milliseconds for result in interval)
        batch_size = get_current_global_batch_size()
        # each value by rank
        model_state, gradients, optimizer_state_, host_state, peak, reserved, saved, messages, hits, cached = zip(
            *collectives.gather_integers(
                held.model_state,
                held.gradients,
                held.optimizer_state,
                active.kept_bytes() + held.offloaded + (0 if self.groups is None else self.groups.host_bytes()),
                memory.peak_memory_bytes(),
                memory.reserved_memory_bytes(),
                self.meter.peak_bytes,
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
            loss=statistics.fmean(result.loss for result in done or interval),
            learning_rate=self._logged_learning_rate(),
            grad_norm=interval[-1].grad_norm,
            step_time_ms=milliseconds,
            tokens_per_second=batch_size * self.config.model.seq_length / milliseconds * 1e3,
            model_state_bytes=model_state,
            peak_memory_bytes=peak,
            reserved_memory_bytes=reserved,
            gradient_bytes=gradients,
            optimizer_state_bytes=optimizer_state_,
            host_state_bytes=host_state,
            saved_activation_bytes=saved,
            backward_messages=messages,
            loss_scale=active.loss_scale() if self.config.precision == "fp16" else None,
            skipped_iterations=len(interval) - len(done),
            global_batch_size=batch_size,
            data_seen=self.samples.share_seen(in_phase=state.samples_in_phase, seen_before=state.samples_seen_before),
            prefix_cache_hits=sum(hits),
            prefix_cache_bytes=max(cached),
            **self._optional_metrics(phase_state, milliseconds),
        )

    def _optional_metrics(self, phase_state: PhaseState, milliseconds: float) -> dict[str, Any]:
        """What flags add to a log line."""
        report, active = self.config.report, self.active
        found: dict[str, Any] = {"timers_ms": self.timers.take(), "straggler_ms": self.stragglers.take()}
        if self.groups is not None:
            own = self.groups.take_sent_bytes(), self.groups.take_waited_ms()
            sent, waited = zip(*collectives.gather_integers(*own), strict=True)
            found["exchanged_bytes"] = sent
            found["exchange_ms"] = max(waited)
        if report.log_params_norm:
            with active.whole_parameters():
                found["params_norm"] = active.params_norm()
        if report.log_num_zeros_in_grad:
            found["num_zeros"] = active.num_zeros
        if report.log_throughput:
            block = self.block_schedule.block(phase_state)
            vocab_size = unwrap_model(self.model).vocab_size
            per_sequence = phase_flops(self.config, self.partition, block, padded_vocab_size=vocab_size)
            per_second = per_sequence * get_current_global_batch_size() / milliseconds * 1e3
            found["tflops_per_gpu"] = per_second / torch.distributed.get_world_size() / 1e12
        return found

    # ---------------------------------------------------------------------------------------------------- evaluate

    @torch.no_grad()
    def evaluate(self, split: str, *, is_final: bool = False, can_stop: bool = True) -> float | None:
        """Mean loss per token over an evaluation of the "validation" or the "test" split, the same on every rank.

        None if a signal has ended it, unless it must not (`can_stop`). The next samples of the validation split count
        as consumed; with --eval-fixed the first ones, and with --full-validation all, do not.
        """
        training, state = self.config.training, self.state
        is_whole_split = split == "validation" and training.full_validation
        num_steps = training.eval_iters
        if is_whole_split:
            num_steps = math.ceil(self.splits.num_validation / self.global_batch_size)
        samples_at_once = training.micro_batch_size * parallel_state.get_data_parallel_world_size()
        batches = self._evaluation_batches(split)
        loss_sum, num_tokens, is_stopped = 0.0, 0.0, 0
        with self.active.whole_parameters():
            self.module.eval()
            for _ in range(num_steps):
                if training.empty_unused_memory_level >= 1:
                    memory.release_cached_memory()
                num_microbatches = self.global_batch_size // samples_at_once
                losses = self.forward_backward(batches, num_microbatches, forward_only=True)
                request = self.stop.signal if can_stop else 0
                loss_of_step, tokens_of_step, [is_stopped] = reduce_losses(losses, [request])
                loss_sum, num_tokens = loss_sum + loss_of_step, num_tokens + tokens_of_step
                if is_stopped:
                    break
            self.module.train()
        if split == "validation" and not self._is_evaluation_repeated:
            state.consumed_validation_samples += training.eval_iters * self.global_batch_size
        if is_stopped:
            self.reporter.note(f"the evaluation on the {split} split after iteration {state.iteration} was stopped")
            return None
        loss = loss_sum / max(num_tokens, 1.0)
        return self._report_evaluation(split, loss, is_final=is_final)

    def evaluate_at_end(self) -> None:
        """Evaluate on both splits after the last step, as stock does: on further validation samples, also where an
        interval ended just now. What would be evaluated on the same samples again is only reported."""
        if not self.config.training.eval_iters:
            return
        last = self._last_validation
        if self._is_evaluation_repeated and last is not None and last[0] == self.state.iteration:
            loss: float | None = self._report_evaluation("validation", last[1], is_final=True)
        else:
            loss = self.evaluate("validation", is_final=True)
        if self.splits.has_test and loss is not None:
            self.evaluate("test", is_final=True)

    def _report_evaluation(self, split: str, loss: float, *, is_final: bool) -> float:
        iteration, samples = self.state.iteration, self.state.consumed_samples
        self.reporter.evaluation(
            EvalMetrics(iteration=iteration, consumed_samples=samples, split=split, loss=loss, is_final=is_final)
        )
        if split == "validation":
            self._last_validation = iteration, loss
        return loss

    def _evaluation_batches(self, split: str) -> Iterator[data.Batch]:
        training = self.config.training
        dataset = self.splits.test if split == "test" else self.splits.validation
        if dataset is None:
            return data.empty_batches()
        if split == "validation" and training.full_validation:
            return data.one_pass(dataset, self.config)
        if split == "test" or training.eval_fixed:
            return data.batches(dataset, self.config, consumed_samples=0)
        if self._validation_batches is None:
            consumed = self.state.consumed_validation_samples
            self._validation_batches = data.batches(dataset, self.config, consumed_samples=consumed)
        return self._validation_batches

    @property
    def _is_evaluation_repeated(self) -> bool:
        """Whether every evaluation has the same validation samples."""
        return self.config.training.eval_fixed or self.config.training.full_validation

    def _is_evaluation_due(self, iteration: int) -> bool:
        training = self.config.training
        return bool(training.eval_iters) and iteration % training.eval_interval == 0

    # -------------------------------------------------------------------------------------------------------- save

    def save(self) -> bool:
        """Write a checkpoint; False if that failed."""
        assert self.saver is not None
        with self.active.whole_parameters():
            return self.saver.save(self._run_state(), self.model, self.active)

    def _run_state(self) -> run_state.RunState:
        """Everything of a checkpoint that is not a tensor, the same on every rank."""
        # after the last step of a phase the next block is due, while the present one is still built
        is_current = self.active.block == self._next_block()
        saves_optimizer = self.config.checkpoint.save_optim
        return run_state.RunState(
            **self.state.state_dict(),
            blocks=run_state.contents_of_blocks(self.partition),
            scheduler_steps=self.lr_scheduler.num_steps,
            optimizer_state=optimizer_state.summarize(self.active, is_current=is_current) if saves_optimizer else {},
            loss_scaler=self.active.loss_scaler_state(),
            layout=loader.current_layout(),
            flags=run_config_to_dict(self.config),
            versions={name: version(name) for name in ("torch", "megatron-core")} | {"megatron-bcd": __version__},
        )

    def _next_block(self) -> int | None:
        """The block of the coming step; None if greedy order has not selected it yet."""
        phase_state = self.state.phase_state
        return None if self.block_schedule.needs_scores(phase_state) else self.block_schedule.block(phase_state)

    def _stop_or_save(self, *, is_last: bool, requests: Sequence[int] | None) -> bool:
        """Agree with the other ranks on stopping, save if due, and complete what is being written; whether the run
        stops here.

        `requests`: what the step has exchanged, if nothing that takes long came after it.

        Raises:
            TrainingFailed: the run ends here and could not be saved.
        """
        saver, stop, iteration = self.saver, self.stop, self.state.iteration
        if requests is None:
            is_any_rank_writing = stop.agree(iteration, is_writing=saver is not None and saver.is_writing)
        else:
            is_any_rank_writing = stop.decide(iteration, requests)
        if saver is not None and saver.is_under_way and not is_any_rank_writing:
            saver.finish()
        if self.pipeline.is_ahead:  # forward-only stages have started the next iteration, which must be completed
            return False
        is_stopped = stop.reason is not None and not is_last
        is_end = is_last or is_stopped
        if is_stopped and self.groups is not None and self.groups.due is not None:
            try:
                self.groups.finish()  # if it fails, the others have this group's change all the same or not at all
            except ExchangeFailed as error:
                self.reporter.note(f"iteration {iteration}: {error}")
        is_saved = True
        if saver is not None and self._is_writer and (is_end or self._is_save_due(iteration, is_last=is_last)):
            is_saved = self.save()
            if not is_end:  # a signal that came while it was written: another save would write the same again
                stop.agree(iteration, is_writing=False)
                is_stopped = is_end = stop.reason is not None
        if is_end and saver is not None:
            is_saved = saver.finish() and is_saved
        if self._is_export_due(iteration, is_last=is_last):
            self._export(is_last=is_last)
        if is_stopped:
            self.reporter.note(f"stopping after iteration {iteration}: {stop.reason}")
        if is_end and not is_saved:
            raise TrainingFailed(f"iteration {iteration} could not be saved; {self._where_to_resume()}")
        return is_stopped

    def _is_save_due(self, iteration: int, *, is_last: bool) -> bool:
        interval = self.config.checkpoint.save_interval
        return self.saver is not None and (is_last or bool(interval and iteration % interval == 0))

    @property
    def _is_writer(self) -> bool:
        """Of all replica groups one writes."""
        return self.groups is None or self.groups.rank == 0

    def _is_export_due(self, iteration: int, *, is_last: bool) -> bool:
        interval = self.config.checkpoint.save_hf_interval
        return (
            self.exporter is not None and self._is_writer and (is_last or bool(interval and iteration % interval == 0))
        )

    def _export(self, *, is_last: bool) -> None:
        """Write the model of --save-hf. Raises TrainingFailed if the last one can't be written."""
        assert self.exporter is not None
        interval, iteration = self.config.checkpoint.save_hf_interval, self.state.iteration
        with self.active.whole_parameters():
            if interval and iteration % interval == 0:
                self.exporter.export(self.model, iteration=iteration)
            if is_last and not self.exporter.export(self.model):
                raise TrainingFailed(
                    f"the model of iteration {iteration} could not be written to --save-hf {self.exporter.root}; "
                    f"{self._where_to_resume()}"
                )

    def _where_to_resume(self) -> str:
        newest = self.saver.newest() if self.saver is not None else None
        return "there is no checkpoint to resume from" if newest is None else f"the last good checkpoint is {newest}"

    # ----------------------------------------------------------------------------------------------------- restore

    def restore(self) -> None:
        """Enter the first phase: of a new run, or of the checkpoint whose weights are loaded. With --skip-train only
        the place of the evaluation is taken from it.

        Raises:
            ValueError: the checkpoint can't be read.
        """
        state, source = self.state, self.source
        self._report_source()
        if self.config.training.skip_train:
            if source is not None:
                state.iteration, state.consumed_samples = source.iteration, source.consumed_samples
            return
        saved = None if source is None else source.state
        takes_optimizer = False
        if source is not None and saved is not None:
            self._restore_counters(saved)
            is_same = saved.blocks == run_state.contents_of_blocks(self.partition)
            is_same = is_same and run_state.has_same_optimizers(saved, self.config)
            takes_optimizer = self.config.checkpoint.load_optim and is_same
        if source is not None and takes_optimizer:
            loader.load_kept_state(source, self.active, next_block=self._next_block())
        memory.release_cached_memory()
        memory.reset_peak_memory()
        gc.freeze()  # modules and data live as long as the run: collections at a switch need not visit them
        self._build_block()
        if source is not None and saved is not None:
            if takes_optimizer:
                loader.load_optimizer(source, self.active)
            self._restore_random_states(source, saved.iteration)
            self.reporter.note(f"resuming from {source.path}, after iteration {saved.iteration}")
        self._begin_phase()
        if self.groups is not None:
            self._join(self.groups)
        if self.saver is not None:
            self.saver.log_progress("Starting job")

    def _report_source(self) -> None:
        checkpoint, source = self.config.checkpoint, self.source
        if source is None:
            if checkpoint.load is not None:
                self.reporter.note(f"--load {checkpoint.load} holds no checkpoint: starting from iteration 0")
            if checkpoint.load_hf is not None:
                self.reporter.note(f"weights of {checkpoint.load_hf} loaded")
            return
        for message in source.messages:
            self.reporter.warning(message)
        if source.state is None:
            self.reporter.note(f"weights of {source.path} loaded")

    def _restore_counters(self, saved: run_state.RunState) -> None:
        """Set the counters. Where the saved phase can't continue, its cycle starts again."""
        self.state.load(saved)
        self.state.phase_state, warning = run_state.resumed_phase(
            saved, self.config, self.partition, self.block_schedule
        )
        if warning is not None:
            self.reporter.warning(warning)
        if self.state.phase_state.to_dict() != saved.phase:
            self.state.samples_in_phase = 0
        self.active.remember_loss_scaler(saved.loss_scaler)
        self.lr_scheduler.num_steps = saved.scheduler_steps

    def _restore_random_states(self, source: loader.Source, iteration: int) -> None:
        loads = self.config.checkpoint.load_rng
        warning = loader.load_random_states(source) if loads else None
        if warning is not None or not loads:
            rng.seed_everything(self.config.training.seed + iteration)
        if warning is not None:
            self.reporter.warning(warning)


@contextlib.contextmanager
def _garbage_collector(*, is_manual: bool) -> Iterator[None]:
    """Off with --manual-gc, until the run ends: a program may continue."""
    if is_manual:
        gc.disable()
    try:
        yield
    finally:
        if is_manual:
            gc.enable()
