"""The run, from top to bottom: setup, train, train_step, switch_block, exchange, restore.

`Trainer` trains block after block (arXiv 2506.12037, Algorithm 1). All methods are collectives: every rank calls them
in the same order, and decisions use values that are reduced over all ranks. What changes during a run is in
`TrainState`, which a checkpoint stores, and in the parts that `__init__` builds once.

Tensor shapes: B micro-batch size, S sequence length, H hidden size.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    reconfigure_num_microbatches_calculator,
)
from megatron.core.utils import check_param_hashes_across_dp_replicas

from megatron.bcd import __version__, data
from megatron.bcd.blocks.schedule import PhaseState
from megatron.bcd.checkpoint import loader, optimizer_state, run_state
from megatron.bcd.checkpoint.saver import Saver
from megatron.bcd.config import RunConfig, run_config_to_dict
from megatron.bcd.data import lengths
from megatron.bcd.data.batches import TrainingSamples
from megatron.bcd.huggingface import run_models
from megatron.bcd.huggingface.run_models import Exporter
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.model import builder
from megatron.bcd.model.implementation import Implementation, available_implementation
from megatron.bcd.model.loss import masked_loss
from megatron.bcd.optim import switch_check
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.optim.lr_schedule import build_scheduler
from megatron.bcd.optim.step import Step
from megatron.bcd.pipeline.schedule import PipelineSchedule
from megatron.bcd.prefix_cache.controller import PrefixCache
from megatron.bcd.runtime import collectives, device, memory, rng
from megatron.bcd.runtime.compat import megatron_core, pytorch
from megatron.bcd.training.evaluation import Evaluator
from megatron.bcd.training.outputs import RunOutputs
from megatron.bcd.training.profiler import StepProfiler
from megatron.bcd.training.replica_groups import ReplicaGroups, check_lighthouse
from megatron.bcd.training.reporting import build_reporter, collect_step_metrics, report_source, summarize
from megatron.bcd.training.resolve import ResolvedRun
from megatron.bcd.training.state import StepResult, TrainingFailed, TrainState
from megatron.bcd.training.stop import StopRequests

ModelBuilder = Callable[[RunConfig, int, Implementation], torch.nn.Module]


class Trainer:
    """A run on this rank: `restore` enters its first phase, `train` does the rest."""

    # ------------------------------------------------------------------------------------------------------- setup

    def __init__(
        self,
        run: ResolvedRun,
        build_model: ModelBuilder = builder.build_model,
        *,
        reporter: Reporter | None = None,
    ) -> None:
        """Build everything once and print the run summary.

        Needs initialized parallel groups and seeded random generators. The weights come from the checkpoint
        `run.source`, from --load-hf, or are drawn.

        Args:
            reporter: replaces the reporter that the flags describe.

        Raises:
            ValueError: data, model or checkpoint do not fit the flags or this machine.
        """
        self.config = config = run.config
        self.partition, self.block_schedule = run.partition, run.block_schedule
        self.train_iters, self.global_batch_size = run.train_iters, run.global_batch_size
        self.padded_vocab_size = run.padded_vocab_size
        self.source = run.source
        """The checkpoint whose weights are loaded."""
        self.state = TrainState(run=run.name)
        """All counters; a checkpoint stores them."""
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        resumed = None if run.source is None else run.source.state
        self.reporter = reporter or build_reporter(run, start_iteration=resumed.iteration if resumed else 0)
        self._set_batch_size(0)
        if config.groups.lighthouse is not None:  # before anything is written
            check_lighthouse(config.groups.lighthouse)
        data_notes = self._build_model_and_data(run, build_model)
        self._build_parts(run, is_continued=resumed is not None)
        self.reporter.run_summary(
            summarize(
                run,
                model=self.model,
                implementation=self.implementation,
                samples=self.samples.subset,
            )
        )
        for note in data_notes:
            self.reporter.note(note)

    def _build_model_and_data(self, run: ResolvedRun, build_model: ModelBuilder) -> tuple[str, ...]:
        """Build the splits and the model, and load its first weights. Return lines for the run summary."""
        config, hf_name = self.config, self.config.checkpoint.load_hf
        # no file is written before everything has been checked: the plan is built below
        make_plan = data.plan_fine_tuning if config.data.sft else data.plan_splits
        plan = make_plan(config, run.tokenizer, self.train_iters)
        self.implementation = available_implementation(config)
        self.model = build_model(config, run.padded_vocab_size, self.implementation)
        """The layers of this stage, without Megatron Core's DDP."""
        if self.source is not None:
            loader.load_weights(self.source, self.model)
        elif hf_name is not None:
            run_models.load_published(config, self.model)
        builder.get_host_layers(self.model).begin_phase(())  # the ranks that share them have loaded them
        self.splits = plan.build()
        self.samples = TrainingSamples(config, dataset=self.splits.train, epoch_samples=plan.epoch_samples)
        return plan.notes

    def _build_parts(self, run: ResolvedRun, *, is_continued: bool) -> None:
        """Build the parts that train, evaluate, log, check and save the model. Each phase builds its own optimizer."""
        config = self.config
        self.active = ActiveBlock(model=self.model, config=config, partition=self.partition, stage=self.stage)
        self.pipeline = PipelineSchedule(config, self.active.passes, kept=run.memory.kept)
        self.lr_scheduler = build_scheduler(
            config, SimpleNamespace(param_groups=[]), functools.partial(data.samples_after, config)
        )
        self.stop = StopRequests(config.checkpoint)
        self.prefix_cache = PrefixCache(
            active=self.active,
            samples=self.samples,
            pipeline=self.pipeline,
            implementation=self.implementation,
            reporter=self.reporter,
            should_stop=self.stop.is_signalled,
        )
        self._recomputed = run.recomputed
        self.profiler = StepProfiler(config.report)
        self.groups = None if config.groups.lighthouse is None else ReplicaGroups(self)
        self._has_joined = False
        """Whether this replica group joined others at the end of one of their steps."""
        self._compile_seconds = 0.0
        """Time of compilation that was printed."""
        self._at_start: dict[str, switch_check.Fingerprint] = {}
        """The weights before the step that `_check_switch` checks."""
        self.evaluator = Evaluator(
            config=config,
            splits=self.splits,
            global_batch_size=self.global_batch_size,
            state=self.state,
            active=self.active,
            forward_backward=self.forward_backward,
            stop=self.stop,
            reporter=self.reporter,
        )
        self.saver = Saver(config.checkpoint, self.reporter) if config.checkpoint.save else None
        exporter = None
        if config.checkpoint.save_hf is not None:
            exporter = Exporter(config, self.reporter, run=run.name, is_continued=is_continued)
        self.outputs = RunOutputs(
            config=config.checkpoint,
            active=self.active,
            saver=self.saver,
            exporter=exporter,
            stop=self.stop,
            pipeline=self.pipeline,
            groups=self.groups,
            reporter=self.reporter,
            collect_run_state=self._run_state,
        )

    # ------------------------------------------------------------------------------------------------------- train

    def train(self) -> None:
        """Train to the end and evaluate, or with --skip-train only evaluate. Signals save and stop.

        Raises:
            TrainingFailed: too many consecutive steps were not finite, or the last checkpoint can't be written.
        """
        state = self.state
        with self.stop.listening(), contextlib.ExitStack() as stack:
            if self.config.training.manual_gc:
                gc.disable()
                stack.callback(gc.enable)  # a program may go on behind the run
            if self.config.training.skip_train:
                self.evaluator.evaluate_at_end()
                return
            if state.iteration < self.train_iters:
                self._warn_untrained(num_steps=self.train_iters - state.iteration)
            is_at_end, is_stopped = state.iteration >= self.train_iters, False
            if self._has_joined:  # this may be the first group, and only the first one saves after this step
                is_stopped = self.outputs.after_step(state.iteration, is_last=is_at_end)
            self.module.train()
            if state.owes_evaluation and self.config.training.eval_iters and not is_stopped:
                is_stopped = self.evaluator.evaluate("validation") is None
            if is_at_end and not self._has_joined:
                self.outputs.export(state.iteration, is_last=True)  # the run may have been killed here before
            while state.iteration < self.train_iters and not is_stopped:
                is_stopped = self._train_one_iteration()
            self.prefix_cache.close()
            if not is_stopped:
                self._warn_untrained(num_steps=0)
                self.evaluator.evaluate_at_end()

    def _train_one_iteration(self) -> bool:
        """Train one step and do what is due after it. Return whether the run stops early."""
        state = self.state
        self._set_batch_size(state.consumed_samples)
        self.profiler.before_step(state.iteration)
        phase = state.phase_state.phase
        result = self.train_step(self._batches(), num_microbatches_next=self._num_microbatches_next())
        self._after_step(result)
        is_last = state.iteration >= self.train_iters
        # the step has exchanged the requests to stop, unless something that takes long followed it
        is_step_alone = state.phase_state.phase == phase and not self.evaluator.is_due(state.iteration)
        requests = result.requests if is_step_alone else None
        is_stopped = self.outputs.after_step(state.iteration, is_last=is_last, requests=requests)
        self.profiler.after_step(state.iteration, is_last=is_last or is_stopped)
        training = self.config.training
        if training.manual_gc and training.manual_gc_interval and state.iteration % training.manual_gc_interval == 0:
            gc.collect()
        return is_stopped

    def _after_step(self, result: StepResult) -> None:
        """Finish a step: count, check, log, exchange, evaluate, and switch blocks at the end of a phase."""
        state = self.state
        num_groups = 1 if self.groups is None else self.groups.size
        state.after_step(result, num_samples=get_current_global_batch_size() * num_groups)
        self._check_switch(result)
        self._check_replicas()
        self._check_skipped(result)
        is_last = state.iteration == self.train_iters
        if state.iteration % self.config.report.log_interval == 0 or state.iteration == 1 or is_last:
            self.reporter.step(collect_step_metrics(self, state.phase_state))
            compile_seconds = pytorch.compile_seconds()
            if compile_seconds > self._compile_seconds + 1.0:
                self.reporter.note(f"this time has {compile_seconds - self._compile_seconds:.0f} s of compilation")
                self._compile_seconds = compile_seconds
            if state.iteration > 1:  # as in stock, the first iteration also counts in the first interval
                state.interval = []
        if self.groups is not None and self.groups.is_due(state.iteration, state.phase_state):
            is_in_step = self.groups.exchange()
            self._take_reference()
            if not is_in_step:
                return
        self._end_step(loss=result.loss)

    def _take_reference(self) -> None:
        """Store the weights before the steps of which the first one is checked, unless that is done. A collective."""
        if not self.active.is_checked:
            self.active.leave_buffers()
            self._at_start = switch_check.fingerprints(self.active)

    def _check_switch(self, result: StepResult) -> None:
        """Check once per block that only the block changed. Wait for a step with a learning rate and a gradient."""
        if self.active.is_checked or result.skipped or not result.learning_rate or not result.grad_norm:
            return
        self.active.is_checked = True
        with self.active.whole_parameters():
            problem = switch_check.problem(self.active, self._at_start)
        if problem:
            raise RuntimeError(f"iteration {self.state.iteration}, phase {self.state.phase_state.phase}: {problem}")

    def _check_replicas(self) -> None:
        """Check that all data-parallel ranks hold the same bits (--check-weight-hash-across-dp-replicas-interval)."""
        interval = self.config.training.check_weight_hash_across_dp_replicas_interval
        if interval is None or self.state.iteration % interval:
            return
        with self.active.whole_parameters():
            is_same = check_param_hashes_across_dp_replicas([builder.unwrap_model(self.model)], cross_check=True)
        if not all(collectives.gather_objects(is_same)):
            raise TrainingFailed(
                f"iteration {self.state.iteration}: weights of data-parallel ranks differ "
                "(--check-weight-hash-across-dp-replicas-interval). A GPU or the network may be faulty."
            )

    def _check_skipped(self, result: StepResult) -> None:
        """Count consecutive skipped steps, and end the run at --max-skipped-steps. Steps that fp16 skips to find its
        loss scale do not count."""
        config, state = self.config, self.state
        lowest, is_fixed = config.optimizer.min_loss_scale, config.optimizer.loss_scale is not None
        is_search = config.precision == "fp16" and not is_fixed and self.active.core.loss_scale() > lowest
        state.skipped_steps = state.skipped_steps + 1 if result.skipped and not is_search else 0
        if state.skipped_steps < config.training.max_skipped_steps:
            return
        if self.saver is not None:
            self.saver.finish()
        # breadth-first order steps the chunks whose gradients are finite
        weights = "" if config.is_breadth_first else ", the weights are those before them"
        raise TrainingFailed(
            f"iteration {state.iteration}: loss or gradient was not finite in {state.skipped_steps} steps in a row "
            f"(--max-skipped-steps){weights}; {self.outputs.where_to_resume()}. A lower "
            "--lr, a longer warm-up or --clip-grad may help"
        )

    def _end_step(self, *, loss: float | None) -> None:
        """Finish a step after its exchange. A group that has just copied the others' state continues here, too."""
        state = self.state
        if self.evaluator.is_due(state.iteration):
            self.evaluator.evaluate("validation")
        before = state.phase_state
        state.phase_state = self.block_schedule.after_step(before, loss=loss)
        if state.phase_state.phase == before.phase:
            return
        state.after_phase(num_distinct_samples=self.samples.num_distinct(state.samples_in_phase))
        self.samples.end_phase()
        if state.iteration < self.train_iters:
            self.switch_block(before)

    def _num_microbatches_next(self) -> int:
        """Return the number of microbatches in the iteration after the next one.

        Return 0 if that iteration does not follow directly, or belongs to another phase.
        """
        state, after = self.state, self.state.iteration + 1
        is_last = after == self.train_iters
        if (
            is_last
            or self.stop.reason is not None
            or self.stop.is_interval_over(after)
            or self.evaluator.is_due(after)
            or (self.groups is not None and self.groups.is_due(after, state.phase_state))
            or self.outputs.is_due(after, is_last=is_last)
            or (self.block_schedule.num_blocks > 1 and self.block_schedule.may_end_with_next_step(state.phase_state))
        ):
            return 0
        batch_size = lengths.batch_size_after(self.config, state.consumed_samples + get_current_global_batch_size())
        return batch_size // (self.config.training.micro_batch_size * parallel_state.get_data_parallel_world_size())

    def _set_batch_size(self, consumed_samples: int) -> None:
        """Set the batch size and the number of microbatches of the coming step."""
        reconfigure_num_microbatches_calculator(
            1,  # the rank; rank 0 logs
            None,
            lengths.batch_size_after(self.config, consumed_samples),
            self.config.training.micro_batch_size,
            parallel_state.get_data_parallel_world_size(),
        )

    def _warn_untrained(self, *, num_steps: int) -> None:
        """Warn of blocks that will certainly not be active in `num_steps` more steps, or with 0 have not been."""
        schedule, phase_state = self.block_schedule, self.state.phase_state
        number = phase_state.phase + (phase_state.step_in_phase > 0)
        if num_steps > 0:
            number = schedule.phases_within(phase_state, num_steps)
        if number < schedule.num_blocks and not self.partition.has_inactive_updates:
            self.reporter.warning(
                f"{number} of {schedule.num_blocks} blocks are active in {self.train_iters:,} steps "
                f"({schedule.describe()}); the others stay as at the start: give more steps, fewer blocks or shorter "
                "phases"
            )

    # -------------------------------------------------------------------------------------------------- train_step

    def train_step(self, batches: Iterator[data.Batch], *, num_microbatches_next: int = 0) -> StepResult:
        """Train on the next global batch.

        `num_microbatches_next` is the number of microbatches of the next step if it follows directly in the same phase.
        Forward-only stages run ahead with them.
        """
        training, active = self.config.training, self.active
        stopwatch = device.Stopwatch()
        active.zero_grad()
        megatron_core.clear_router_losses()
        learning_rate = float(self.lr_scheduler.get_lr({}))
        active.set_learning_rate(self.lr_scheduler)
        step = Step(active, lambda: self.stop.on_this_rank(is_writing=self.outputs.is_writing))
        reported = self.forward_backward(
            batches, get_num_microbatches(), step, num_microbatches_next=num_microbatches_next
        )
        if training.empty_unused_memory_level >= 1:
            memory.release_cached_memory()
        step.reduce_loss(reported)
        step.finish()
        if step.grad_norm is not None:
            self.lr_scheduler.num_steps += get_current_global_batch_size()
        if training.empty_unused_memory_level >= 2:
            memory.release_cached_memory()
        stopwatch.stop()
        return StepResult(
            loss=step.loss,
            grad_norm=step.grad_norm,
            learning_rate=learning_rate,
            duration=stopwatch,
            skipped_layers=step.skipped_layers,
            requests=step.requests,
        )

    @property
    def module(self) -> torch.nn.Module:
        """The model as the pipeline schedule takes it: in Megatron Core's DDP while a block is active."""
        return self.active.wrapped or self.model

    def forward_backward(
        self,
        batches: Iterator[data.Batch],
        num_microbatches: int,
        step: Step | None = None,
        *,
        num_microbatches_next: int = 0,
    ) -> list[dict[str, Any]]:
        """Run all passes of a training step, or without one those of an evaluation. See `PipelineSchedule.__call__`.

        On the last stage return what the loss function reported for each microbatch, on other stages an empty list.
        """
        return self.pipeline(
            forward_step_func=self.forward_step,
            data_iterator=batches,
            model=self.module,
            num_microbatches=num_microbatches,
            seq_length=self.config.model.seq_length,
            micro_batch_size=self.config.training.micro_batch_size,
            step=step,
            num_microbatches_next=num_microbatches_next,
        )

    def forward_step(self, batches: Iterator[data.Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        """Run one microbatch through this stage (one chunk of it). If the batch holds `prefix_output` [S, B, H], the
        stage starts at its first active layer.

        Returns:
            The output of the stage (token losses [B, S] on the last stage), and the function that reduces it to the
            loss.
        """
        batch = next(batches)
        prefix_inputs: dict[str, Any] = {}
        if "prefix_output" in batch:
            prefix_inputs = {"decoder_input": batch["prefix_output"], "extra_block_kwargs": {"behind_prefix": True}}
        output = model(
            batch.get("tokens"),
            batch.get("position_ids"),
            labels=batch.get("labels"),
            **data.attention_inputs(batch),
            **prefix_inputs,
        )
        return output, functools.partial(masked_loss, batch.get("loss_mask"))

    def _batches(self) -> Iterator[data.Batch]:
        """Return the coming microbatches of this rank. Call it before each step."""
        batches = self.samples.batches(
            phase=self.state.phase_state.phase,
            consumed_samples=self.state.consumed_samples,
            position=self.state.samples_in_phase,
        )
        return self.prefix_cache.add_prefix_outputs(batches, position=self.state.samples_in_phase)

    # ------------------------------------------------------------------------------------------------ switch_block

    def switch_block(self, before: PhaseState) -> None:
        """Go from the phase `before` to the present one. If the block is the same, its optimizer stays."""
        state, schedule = self.state, self.block_schedule
        if not schedule.is_switch(before, state.phase_state):
            self._begin_phase()
            return
        stopwatch = device.Stopwatch()
        if self.saver is not None and self.config.bcd.bcd_layers_on == "host":
            self.saver.finish()  # the writer reads frozen weights from the memory that the switch reuses
        self.end_phase()
        self._build_block()
        self._begin_phase()
        stopwatch.stop()
        self.reporter.phase(
            iteration=state.iteration,
            cycle=schedule.cycle(state.phase_state),
            phase=state.phase_state.phase,
            block=schedule.block(state.phase_state),
            switch_time_ms=stopwatch.milliseconds,
        )

    def end_phase(self, *, is_end_of_run: bool = False) -> None:
        """Free gradients, optimizer and reader threads. Unless the run ends, offload the state of the block that is to
        be restored at its next phase. If it ends, also stop the data workers."""
        self.prefix_cache.close()
        if is_end_of_run:
            self.samples.close()
            self.evaluator.close()
        self.active.dispose(is_end_of_run=is_end_of_run)
        memory.reset_peak_memory()  # a phase's peak includes the allocation of its state

    def _build_block(self) -> None:
        """Build gradient buffers and optimizer of the block of the present phase, and set what its phase recomputes."""
        block = self.block_schedule.block(self.state.phase_state)
        self.active.build(block)
        if self._recomputed:
            choice = self._recomputed[self.stage][block]
            for number, chunk in enumerate(builder.get_chunks(self.model)):
                chunk.decoder.recompute(choice.granularity, choice.num_whole(number))

    def _begin_phase(self) -> None:
        """Begin a phase, also if the same block continues: switch check, prefix cache and pipeline schedule."""
        state, block = self.state, self.block_schedule.block(self.state.phase_state)
        self._take_reference()
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

    # ---------------------------------------------------------------------------------------------------- exchange

    def continue_from(self, peer: Mapping[str, Any], load: Callable[[], None]) -> None:
        """Continue from another group: adopt the counters of `peer` (`ReplicaGroups._state`), call `load`, which loads
        its tensors while no block is active, and build its block."""
        if self.saver is not None:
            self.saver.finish()
        self.end_phase(is_end_of_run=True)
        self.state.load(peer["counters"], PhaseState.from_dict(peer["phase"]))
        self.lr_scheduler.num_steps = peer["scheduler_steps"]
        load()
        self._build_block()
        self._begin_phase()

    # -------------------------------------------------------------------------------------------------------- save

    def _run_state(self) -> run_state.RunState:
        """Collect the non-tensor part of a checkpoint. It is identical on all ranks."""
        # after the last step of a phase the next block is due, while the present one is still built
        is_current = self.active.block == self.block_schedule.block(self.state.phase_state)
        saves_optimizer = self.config.checkpoint.save_optim
        return run_state.RunState(
            **self.state.state_dict(),
            blocks=run_state.block_contents(self.partition),
            scheduler_steps=self.lr_scheduler.num_steps,
            optimizer_state=optimizer_state.summarize(self.active, is_current=is_current) if saves_optimizer else {},
            loss_scaler=self.active.core.loss_scaler_state(),
            layout=loader.current_layout(),
            flags=run_config_to_dict(self.config),
            versions={name: version(name) for name in ("torch", "megatron-core")} | {"megatron-bcd": __version__},
        )

    # ----------------------------------------------------------------------------------------------------- restore

    def restore(self) -> None:
        """Enter the first phase of a new run, or of the checkpoint whose weights are loaded.

        With --skip-train, take only the iteration from the checkpoint.

        Raises:
            ValueError: the checkpoint can't be read.
        """
        state, source = self.state, self.source
        report_source(self.config.checkpoint, source, self.reporter)
        if self.config.training.skip_train:
            if source is not None:
                state.iteration, state.consumed_samples = source.iteration, source.consumed_samples
            return
        saved = None if source is None else source.state
        if source is not None and saved is not None:
            is_continued = self._restore_counters(saved)
            if is_continued and self.config.checkpoint.load_optim:
                next_block = self.block_schedule.block(state.phase_state)
                loader.load_optimizer(source, self.active, next_block=next_block)
        memory.release_cached_memory()
        memory.reset_peak_memory()
        gc.freeze()  # modules and data live as long as the run: collections at a switch need not visit them
        self._build_block()
        if source is not None and saved is not None:
            loads_states = self.config.checkpoint.load_rng
            warning = loader.load_random_states(source) if loads_states else None
            if warning is not None or not loads_states:
                rng.seed_everything(self.config.training.seed + saved.iteration)
            if warning is not None:
                self.reporter.warning(warning)
            self.reporter.note(f"resuming from {source.path}, after iteration {saved.iteration}")
        self._begin_phase()
        if self.groups is not None:
            self._has_joined = self.groups.join()
            self._take_reference()
            if self._has_joined:
                self._end_step(loss=None)

    def _restore_counters(self, saved: run_state.RunState) -> bool:
        """Set the counters. If the saved phase can't continue, its cycle starts again. Return whether it continues."""
        phase_state, warning = run_state.resumed_phase(saved, self.config, self.partition, self.block_schedule)
        self.state.load(vars(saved), phase_state, saved.interval)
        if warning is not None:
            self.reporter.warning(warning)
            self.state.samples_in_phase = 0
        self.active.core.next_loss_scaler = saved.loss_scaler
        self.lr_scheduler.num_steps = saved.scheduler_steps
        return warning is None
