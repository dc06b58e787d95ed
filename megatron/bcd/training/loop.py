"""The loop: train block after block, evaluate, save, tell."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    init_num_microbatches_calculator,
    update_num_microbatches,
)
from megatron.core.timers import Timers

from megatron.bcd import data
from megatron.bcd.blocks.partition import partition_from_config
from megatron.bcd.blocks.phase_state import PhaseState
from megatron.bcd.blocks.schedule import block_schedule_from_config
from megatron.bcd.checkpoint import loader
from megatron.bcd.checkpoint.saver import Saver
from megatron.bcd.config import RunConfig
from megatron.bcd.data.samples import TrainingSamples
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.model import builder
from megatron.bcd.model.implementation import Implementation, implementation_here
from megatron.bcd.model.loss import forward_step, reduce_losses
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.optim.lr_schedule import build_scheduler
from megatron.bcd.pipeline.schedule import PipelineSchedule
from megatron.bcd.prefix_cache.controller import Prefix
from megatron.bcd.runtime import memory
from megatron.bcd.runtime.activation_meter import ActivationMeter
from megatron.bcd.tokenizer import build_tokenizer, padded_vocab_size
from megatron.bcd.training import banner, restore
from megatron.bcd.training.collect_metrics import collect_step_metrics
from megatron.bcd.training.evaluate import Evaluation
from megatron.bcd.training.select_block import gradient_scores
from megatron.bcd.training.stop import StopRequests
from megatron.bcd.training.train_step import StepResult, TrainingFailed

ModelBuilder = Callable[[RunConfig, int, Implementation], torch.nn.Module]


class Trainer:
    """State of one run. `run` trains and evaluates; everything it needs is passed in, nothing is global."""

    def __init__(
        self,
        config: RunConfig,
        build_model: ModelBuilder,
        reporter: Reporter,
        *,
        source: loader.Source | None = None,
    ) -> None:
        """`source` is the checkpoint to go on from, as `loader.find` gave it; looked for where it is None."""
        self.config = config
        self.reporter = reporter
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.partition = partition_from_config(config)
        self.phases = block_schedule_from_config(config, self.partition)
        self.global_batch_size = data.global_batch_size(config)
        init_num_microbatches_calculator(
            torch.distributed.get_rank(),
            list(config.training.rampup_batch_size or ()) or None,
            self.global_batch_size,
            config.training.micro_batch_size,
            parallel_state.get_data_parallel_world_size(),
        )

        tokenizer = build_tokenizer(
            config.tokenizer.tokenizer_type or "NullTokenizer",
            vocab_file=config.tokenizer.vocab_file,
            merge_file=config.tokenizer.merge_file,
            tokenizer_model=config.tokenizer.tokenizer_model,
            vocab_size=config.tokenizer.vocab_size,
        )
        vocab_size = padded_vocab_size(
            tokenizer.vocab_size, config.model.make_vocab_size_divisible_by, config.tensor_size
        )
        self.train_iters = data.num_iterations(config)
        plan = data.plan_splits(
            config, tokenizer, self.train_iters, least_steps_per_cycle=self.phases.least_steps_per_cycle
        )
        implementation = implementation_here(config)
        self.model = build_model(config, vocab_size, implementation)
        if config.training.data_parallel_random_init:
            builder.broadcast_from_first_replica(self.model)
        self.iteration = self.consumed_samples = 0
        self.state = PhaseState()
        source = source or loader.find(config)
        restore.load_weights(self, source)
        self.splits = data.build_splits(config, plan)  # the first to write: nothing that was asked for is wrong
        self.samples = TrainingSamples(config, dataset=self.splits.train, epoch_samples=plan.epoch_samples)
        self.evaluation = Evaluation(self)
        self.prefix = Prefix(self, implementation)
        self.active = ActiveBlock(model=self.model, config=config, partition=self.partition, stage=self.stage)
        self.saver = Saver(config.checkpoint, reporter) if config.checkpoint.save else None
        self.stopping = StopRequests(config.checkpoint)
        self._is_stopped = False
        self.interval: list[StepResult] = []
        self.skipped_in_a_row = 0
        self._switch_is_unchecked = True
        self.schedule = PipelineSchedule(
            name=config.bcd.bcd_schedule, partition=self.partition, run_ahead=config.bcd.bcd_run_ahead
        )
        self.activation_meter = ActivationMeter(memory.allocator())
        self._measured: tuple[int, int] | None = None
        self._timers = Timers(log_level=0, log_option="max")
        reporter.banner(
            banner.summarize(
                config=config,
                partition=self.partition,
                model=self.model,
                vocab_size=tokenizer.vocab_size,
                padded_vocab_size=vocab_size,
                global_batch_size=self.global_batch_size,
                train_iters=self.train_iters,
                implementation=implementation,
                phases=self.phases,
                samples=self.samples.subset,
            )
        )
        if not config.training.skip_train:
            restore.restore_counters(self, source)
            memory.release_cached_memory()
            memory.reset_peak_memory()
            gc.freeze()  # modules and data live as long as the run: a switch need not look through them for garbage
            self._begin_phase()
            self.scheduler = build_scheduler(self.config, self.active.optimizer, self.global_batch_size)
            restore.restore_after_build(self, source)

    def run(self) -> None:
        """Train to the end and evaluate, or with --skip-train only evaluate.

        Raises:
            TrainingFailed: too many steps in a row were not finite, or the last checkpoint can't be written.
        """
        training = self.config.training
        if not training.skip_train:
            with self.stopping.listening():
                self._train()
            self.prefix.close()
            if self._is_stopped:
                return
        if training.eval_iters:  # as stock does: on the next samples, also where an interval ended just now
            self.evaluation.run("validation", is_final=True)
        if training.eval_iters and self.splits.has_test:
            self.evaluation.run("test", is_final=True)

    def _train(self) -> None:
        """The loop."""
        training, report = self.config.training, self.config.report
        self.set_train_mode(True)
        if training.manual_gc:
            gc.disable()
        is_last = self.phases.is_converged(self.state)  # a run that has converged is not gone on with
        while self.iteration < self.train_iters and not (is_last or self._is_stopped):
            update_num_microbatches(self.consumed_samples, consistency_check=False)
            batches = self.prefix.batches()
            result = self.train_step(batches, num_microbatches_next=self._num_microbatches_next())
            self.interval.append(result)
            self.iteration += 1
            self.consumed_samples += get_current_global_batch_size()
            self.samples.after_step(get_current_global_batch_size())
            self.reporter.progress(self.iteration)
            self._check_switch_once(result)
            self._count_skipped(result)
            is_last = self.iteration == self.train_iters
            if self.iteration % report.log_interval == 0 or self.iteration == 1 or is_last:
                self.reporter.step(collect_step_metrics(self, self.state))
                # as stock does, the first iteration is told at once and counts in the first interval as well
                self.interval = self.interval if self.iteration == 1 else []
            if training.eval_iters and self.iteration % training.eval_interval == 0:
                self.evaluation.run("validation")
            was_in = self.state
            is_last = self._advance_phase(result.loss, is_last=is_last)
            if is_last and self.interval and self.iteration < self.train_iters:  # a run that ends by convergence
                self.reporter.step(collect_step_metrics(self, was_in))
                self.interval = []
            self._stop_or_save(is_last=is_last)
            if training.manual_gc and training.manual_gc_interval and self.iteration % training.manual_gc_interval == 0:
                gc.collect()

    def _count_skipped(self, result: StepResult) -> None:
        """End the run after --max-skipped-steps in a row; fp16's own search for a loss scale does not count."""
        lowest = self.config.optimizer.min_loss_scale
        is_search = self.config.precision == "fp16" and self.active.loss_scale() > lowest
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped and not is_search else 0
        if self.skipped_in_a_row < self.config.training.max_skipped_steps:
            return
        if self.saver is not None:
            self.saver.finish()
        raise TrainingFailed(
            f"iteration {self.iteration}: loss or gradient was not finite in {self.skipped_in_a_row} steps in a row "
            f"(--max-skipped-steps), the weights are those before them; {self._where_to_go_on()}. A lower --lr, a "
            "longer warm-up or --clip-grad may help"
        )

    def _where_to_go_on(self) -> str:
        newest = self.saver.newest() if self.saver is not None else None
        return "there is no checkpoint to go on from" if newest is None else f"the last good checkpoint is {newest}"

    def _is_save_due(self, iteration: int, *, is_last: bool) -> bool:
        interval = self.config.checkpoint.save_interval
        return self.saver is not None and (is_last or bool(interval and iteration % interval == 0))

    def _stop_or_save(self, *, is_last: bool) -> None:
        """Agree with the other ranks whether to stop; save where that is due, and finish what was saved meanwhile."""
        is_writing = self.saver is not None and self.saver.is_writing
        anyone_writes = self.stopping.agree(self.iteration, is_writing=is_writing)
        if self.saver is not None and self.saver.is_under_way and not anyone_writes:
            self.saver.finish()
        if self.schedule.is_ahead:  # forward-only stages have begun the next iteration: not before it is done
            return
        self._is_stopped = self.stopping.reason is not None and not is_last
        is_end = is_last or self._is_stopped
        is_saved = True
        if self.saver is not None and (is_end or self._is_save_due(self.iteration, is_last=is_last)):
            is_saved = self._save()
        if is_end and self.saver is not None:
            is_saved = self.saver.finish() and is_saved
        if self._is_stopped:
            self.reporter.note(f"stopping after iteration {self.iteration}: {self.stopping.reason}")
        if is_end and not is_saved:
            raise TrainingFailed(f"iteration {self.iteration} could not be saved; {self._where_to_go_on()}")

    def _save(self) -> bool:
        assert self.saver is not None
        self.active.pause_parameter_gather()
        is_saved = self.saver.save(restore.state_of(self), self.model, self.active)
        self.active.resume_parameter_gather()
        return is_saved

    def train_step(self, batches: Iterator[data.Batch], *, num_microbatches_next: int = 0) -> StepResult:
        """One step. Where another follows directly upon it in the same phase, `num_microbatches_next` is how many
        microbatches that one has, and forward-only stages run ahead with it."""
        assert self.active.optimizer is not None
        timer = self._timers("train-step", log_level=0)
        timer.start()
        self.active.zero_grad()
        self.schedule.prepare_next(num_microbatches_next)
        with self._measuring_once_a_phase():
            losses = self.run_schedule(batches, get_num_microbatches(), forward_only=False)
        loss_sum, num_tokens = reduce_losses(losses).tolist()
        loss = loss_sum / max(num_tokens, 1.0)
        learning_rate = self.learning_rate(self.state)
        if self.phases.scales_learning_rate:
            self.scheduler.step(0)  # a step that is skipped would leave the rates scaled
            self.active.scale_learning_rate(self.phases.learning_rate_factor(self.state))
        skips_non_finite = self.config.training.check_for_nan_in_loss_and_grad
        is_finite = math.isfinite(loss) or self.config.precision == "fp16"  # there the loss scale must hear of it
        grad_norm = self.active.step(skip_non_finite=skips_non_finite) if is_finite or not skips_non_finite else None
        if grad_norm is not None:
            self.scheduler.step(get_current_global_batch_size())
        timer.stop()
        return StepResult(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            milliseconds=timer.elapsed() * 1e3,
        )

    def run_schedule(
        self, batches: Iterator[data.Batch], num_microbatches: int, *, forward_only: bool
    ) -> list[dict[str, Any]]:
        return self.schedule(
            forward_step_func=self._forward_step,
            data_iterator=batches,
            model=self.active.wrapped or self.model,
            num_microbatches=num_microbatches,
            seq_length=self.config.model.seq_length,
            micro_batch_size=self.config.training.micro_batch_size,
            decoder_seq_length=self.config.model.seq_length,
            forward_only=forward_only,
        )

    def _forward_step(self, batches: Iterator[data.Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        output = forward_step(batches, model)
        self.activation_meter.after_forward()
        return output

    def _num_microbatches_next(self) -> int:
        """Microbatches of the iteration after the coming one, if it follows directly and in the same phase; else 0."""
        after = self.iteration + 1
        is_last = after == self.train_iters
        evaluates = self.config.training.eval_iters and after % self.config.training.eval_interval == 0
        stops = self.stopping.reason is not None or self.stopping.is_interval_over(after)
        saves = self._is_save_due(after, is_last=is_last)
        if is_last or evaluates or saves or stops or self.phases.ends_with_next_step(self.state):
            return 0
        if not self.config.training.rampup_batch_size:
            return get_num_microbatches()
        update_num_microbatches(self.consumed_samples + get_current_global_batch_size(), consistency_check=False)
        num_microbatches = get_num_microbatches()
        update_num_microbatches(self.consumed_samples, consistency_check=False)
        return num_microbatches

    def _measuring_once_a_phase(self) -> contextlib.AbstractContextManager[None]:
        """Count saved activations in a phase's first iteration, and where the batch size has changed."""
        now = (self.state.phase, get_num_microbatches())
        if now == self._measured:
            return contextlib.nullcontext()
        self._measured = now
        return self.activation_meter.measuring(self.model.parameters())

    def build(self, block: int) -> None:
        """Make `block` the active one."""
        self.active.build(block)
        self.schedule.begin_phase(block)

    def _begin_phase(self) -> None:
        """Make the present phase's block active; in greedy order choose it first."""
        if self.phases.needs_scores(self.state):
            self.state = self.phases.choose_block(self.state, gradient_scores(self))
        self.build(self.phases.block(self.state))

    def _advance_phase(self, loss: float, *, is_last: bool) -> bool:
        """Count the step; at the end of the phase make the next block active, unless no step follows.

        Returns whether no step follows: `is_last`, or a cycle has ended that improved too little.
        """
        before, self.state = self.state, self.phases.after_step(self.state, loss=loss)
        if self.state.phase == before.phase:
            return is_last
        self.samples.end_phase()
        if self.config.bcd.bcd_stop_cycle_improvement is not None and self.phases.is_cycle_end(self.state):
            self.state = self.phases.after_evaluation(self.state, self.evaluation.validation_loss_now())
            if self.phases.is_converged(self.state) and not is_last:
                self.reporter.note(self._describe_convergence())
                is_last = True
        if not is_last and self.phases.is_switch(before, self.state):
            self._switch()
        return is_last

    def _describe_convergence(self) -> str:
        before, last = (end.validation_loss for end in self.state.cycle_ends)
        return (
            f"the run ends after iteration {self.iteration}: cycle {self.phases.cycle(self.state) - 1} brought the "
            f"validation loss from {before:.6f} to {last:.6f}, an improvement of less than "
            f"--bcd-stop-cycle-improvement {self.config.bcd.bcd_stop_cycle_improvement}"
        )

    def _switch(self) -> None:
        """From the active block to that of the present phase."""
        timer = self._timers("switch", log_level=0)
        timer.start()
        self.scheduler.optimizer = None  # else the old optimizer and its gradients would outlive the new build
        self.active.dispose()
        memory.reset_peak_memory()  # a phase's peak includes the building of its own state
        self._begin_phase()
        self.scheduler.optimizer = self.active.optimizer
        self.scheduler.step(0)  # the new optimizer's groups get the learning rate of now
        self._switch_is_unchecked = True
        timer.stop()
        self.reporter.phase(
            iteration=self.iteration,
            cycle=self.phases.cycle(self.state),
            phase=self.state.phase,
            block=self.phases.block(self.state),
            switch_time_ms=timer.elapsed() * 1e3,
        )

    def learning_rate(self, state: PhaseState) -> float:
        """Of the block that is active in `state`, in the coming step."""
        return float(self.scheduler.get_lr({})) * self.phases.learning_rate_factor(state)

    def _check_switch_once(self, result: StepResult) -> None:
        """Once a phase, after the first step that had to change something: did it, and nothing else?"""
        if not self._switch_is_unchecked or result.skipped or not result.learning_rate or not result.grad_norm:
            return
        self._switch_is_unchecked = False
        self.active.pause_parameter_gather()
        problem = self.active.check_switch()
        self.active.resume_parameter_gather()
        if problem:
            raise RuntimeError(f"iteration {self.iteration}, phase {self.state.phase}: {problem}")

    def set_train_mode(self, train: bool) -> None:
        (self.active.wrapped or self.model).train(train)
