"""The run: set up, train block after block, evaluate, tell."""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
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

from megatron.bcd import checkpoint, data, models, platform, summary
from megatron.bcd.active_set import ActiveSet
from megatron.bcd.blocks import Partition, partition
from megatron.bcd.config import RunConfig
from megatron.bcd.loss import forward_step, reduce_losses
from megatron.bcd.lr_schedule import build_scheduler
from megatron.bcd.phases import PhaseSchedule, PhaseState
from megatron.bcd.pipeline import PipelineSchedule
from megatron.bcd.refusal import refusing
from megatron.bcd.report import EvalRecord, Reporter, StepRecord
from megatron.bcd.report.silent import SilentReporter
from megatron.bcd.saved_activations import SavedActivations
from megatron.bcd.tokenizer import build_tokenizer, padded_vocab_size

ModelBuilder = Callable[[RunConfig, int, models.Implementation], torch.nn.Module]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one training step gave, equal on every rank."""

    loss: float
    grad_norm: float | None  # None if the step was skipped
    learning_rate: float  # the one that the step used
    milliseconds: float

    @property
    def skipped(self) -> bool:
        return self.grad_norm is None


class Trainer:
    """State of one run. `run` trains and evaluates; everything it needs is passed in, nothing is global."""

    def __init__(self, config: RunConfig, build_model: ModelBuilder, reporter: Reporter) -> None:
        self.config = config
        self.reporter = reporter
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.partition: Partition = partition(
            num_layers=config.num_layers,
            num_stages=config.pipeline_size,
            num_blocks=config.bcd.bcd_num_blocks,
            layout=config.bcd.bcd_layout,
            tied=config.tied,
        )
        self.phases = PhaseSchedule(
            num_blocks=self.partition.num_blocks, steps_per_block=config.bcd.bcd_steps_per_block
        )
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
        plan = data.plan_splits(config, tokenizer, self.train_iters)
        implementation = models.implementation_here(config)
        self.model = build_model(config, vocab_size, implementation)
        if config.training.data_parallel_random_init:
            models.broadcast_from_first_replica(self.model)
        self.iteration = self.consumed_samples = self.consumed_validation_samples = 0
        checkpoint.load_weights_if_asked(config, self.model, reporter)
        self.splits = data.build_splits(config, plan)  # the first to write: nothing that was asked for is wrong
        self.active = ActiveSet(model=self.model, config=config, partition=self.partition, stage=self.stage)
        self.state = PhaseState()
        self._switch_is_unchecked = True
        self._validation_batches: Iterator[data.Batch] | None = None
        self.schedule = PipelineSchedule(
            name=config.bcd.bcd_schedule, partition=self.partition, run_ahead=config.bcd.bcd_run_ahead
        )
        self._saved_activations = SavedActivations(platform.allocator())
        self._measured: tuple[int, int] | None = None
        self._timers = Timers(log_level=0, log_option="max")
        reporter.banner(
            summary.summarize(
                config=config,
                partition=self.partition,
                model=self.model,
                vocab_size=tokenizer.vocab_size,
                padded_vocab_size=vocab_size,
                global_batch_size=self.global_batch_size,
                train_iters=self.train_iters,
                implementation=implementation,
            )
        )
        if not config.training.skip_train:
            platform.reset_peak_memory()
            self._build(self.phases.block(self.state))
            self.scheduler = build_scheduler(self.config, self.active.optimizer, self.global_batch_size)

    def run(self) -> None:
        """Train to the end and evaluate, or with --skip-train only evaluate."""
        training = self.config.training
        if not training.skip_train:
            self._train()
        if training.eval_iters:  # as stock does: on the next samples, also where an interval ended just now
            self._evaluate("validation", is_final=True)
        if training.eval_iters and self.splits.has_test:
            self._evaluate("test", is_final=True)

    def _train(self) -> None:
        """The loop."""
        training, report = self.config.training, self.config.report
        batches = self._batches(self.splits.train, consumed_samples=0)
        self._set_train_mode(True)
        gc.freeze()  # modules and data live as long as the run: a switch need not look through them for garbage
        if training.manual_gc:
            gc.disable()
        interval: list[StepResult] = []
        while self.iteration < self.train_iters:
            update_num_microbatches(self.consumed_samples, consistency_check=False)
            result = self.train_step(batches, num_microbatches_next=self._num_microbatches_next())
            interval.append(result)
            self.iteration += 1
            self.consumed_samples += get_current_global_batch_size()
            self.reporter.progress(self.iteration)
            self._check_switch_once(result)
            is_last = self.iteration == self.train_iters
            if self.iteration % report.log_interval == 0 or self.iteration == 1 or is_last:
                self._log(interval)
                # as stock does, the first iteration is told at once and counts in the first interval as well
                interval = interval if self.iteration == 1 else []
            if training.eval_iters and self.iteration % training.eval_interval == 0:
                self._evaluate("validation")
            checkpoint.save_if_due(
                self.config,
                self.model,
                self.active,
                iteration=self.iteration,
                is_last=is_last,
                reporter=self.reporter,
            )
            if not is_last:
                self._advance_phase(result.loss)
            if training.manual_gc and training.manual_gc_interval and self.iteration % training.manual_gc_interval == 0:
                gc.collect()

    def train_step(self, batches: Iterator[data.Batch], *, num_microbatches_next: int = 0) -> StepResult:
        """One step. Where another follows directly upon it in the same phase, `num_microbatches_next` is how many
        microbatches that one has, and forward-only stages run ahead with it."""
        assert self.active.optimizer is not None
        timer = self._timers("train-step", log_level=0)
        timer.start()
        self.active.zero_grad()
        self.schedule.prepare_next(num_microbatches_next)
        with self._measuring_once_a_phase():
            losses = self._run_schedule(batches, get_num_microbatches(), forward_only=False)
        loss_sum, num_tokens = reduce_losses(losses).tolist()
        loss = loss_sum / max(num_tokens, 1.0)
        if (
            self.config.precision != "fp16"
            and self.config.training.check_for_nan_in_loss_and_grad
            and not math.isfinite(loss)
        ):
            raise RuntimeError(
                f"iteration {self.iteration + 1}: the loss is {loss}; the weights of iteration {self.iteration} are "
                "untouched. A lower --lr, a longer warm-up or --clip-grad may help"
            )
        learning_rate = self.scheduler.get_lr({})
        successful, grad_norm, _ = self.active.optimizer.step()
        if successful:
            self.scheduler.step(get_current_global_batch_size())
        timer.stop()
        return StepResult(
            loss=loss,
            grad_norm=float(grad_norm) if successful else None,
            learning_rate=learning_rate,
            milliseconds=timer.elapsed() * 1e3,
        )

    def _run_schedule(
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
        self._saved_activations.after_forward()
        return output

    def _num_microbatches_next(self) -> int:
        """Microbatches of the iteration after the coming one, if it follows directly and in the same phase; else 0."""
        after = self.iteration + 1
        is_last = after == self.train_iters
        evaluates = self.config.training.eval_iters and after % self.config.training.eval_interval == 0
        saves = checkpoint.is_due(self.config, iteration=after, is_last=is_last)
        if is_last or evaluates or saves or self.phases.ends_with_next_step(self.state):
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
        return self._saved_activations.measuring(self.model.parameters())

    def _build(self, block: int) -> None:
        self.active.build(block)
        self.schedule.begin_phase(block)

    def _advance_phase(self, loss: float) -> None:
        """Count the step; at the end of the phase make the next block active."""
        before, self.state = self.state, self.phases.after_step(self.state, loss=loss)
        if not self.phases.is_switch(before, self.state):
            return
        timer = self._timers("switch", log_level=0)
        timer.start()
        self.scheduler.optimizer = None  # else the old optimizer and its gradients would outlive the new build
        self.active.dispose()
        platform.reset_peak_memory()  # a phase's peak includes the building of its own state
        self._build(self.phases.block(self.state))
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

    @torch.no_grad()
    def _evaluate(self, split: str, *, is_final: bool = False) -> None:
        """Mean loss over the next --eval-iters global batches of a split."""
        num_microbatches = self.global_batch_size // (
            self.config.training.micro_batch_size * parallel_state.get_data_parallel_world_size()
        )
        batches = self._evaluation_batches(split)
        self.active.pause_parameter_gather()
        self._set_train_mode(False)
        total = torch.zeros(2, device=platform.device(), dtype=torch.float64)
        for _ in range(self.config.training.eval_iters):
            total += reduce_losses(self._run_schedule(batches, num_microbatches, forward_only=True))
        self._set_train_mode(True)
        self.active.resume_parameter_gather()
        if split == "validation":
            self.consumed_validation_samples += self.config.training.eval_iters * self.global_batch_size
        loss_sum, num_tokens = total.tolist()
        self.reporter.evaluation(
            EvalRecord(
                iteration=self.iteration,
                consumed_samples=self.consumed_samples,
                split=split,
                loss=loss_sum / max(num_tokens, 1.0),
                is_final=is_final,
            )
        )

    def _evaluation_batches(self, split: str) -> Iterator[data.Batch]:
        """Each evaluation on the validation split goes on where the one before ended."""
        if split == "test":
            return self._batches(self.splits.test, consumed_samples=0)
        if self._validation_batches is None:
            self._validation_batches = self._batches(
                self.splits.validation, consumed_samples=self.consumed_validation_samples
            )
        return self._validation_batches

    def _log(self, interval: list[StepResult]) -> None:
        """One record for the steps since the last one; the loss is the mean of those that were not skipped, if any."""
        done = [result for result in interval if not result.skipped]
        milliseconds = statistics.fmean(result.milliseconds for result in interval)
        model_state, gradients, optimizer_state, peak, saved, messages = _gather(
            self.active.model_state_bytes(),
            self.active.gradient_bytes(),
            self.active.optimizer_state_bytes(),
            platform.peak_memory_bytes(),
            self._saved_activations.peak_bytes,
            self.schedule.backward_messages,
        )
        self.reporter.step(
            StepRecord(
                iteration=self.iteration,
                consumed_samples=self.consumed_samples,
                cycle=self.phases.cycle(self.state),
                phase=self.state.phase,
                block=self.phases.block(self.state),
                loss=statistics.fmean(result.loss for result in done or interval),
                learning_rate=self.scheduler.get_lr({}),
                grad_norm=interval[-1].grad_norm,
                step_time_ms=milliseconds,
                tokens_per_second=get_current_global_batch_size() * self.config.model.seq_length / milliseconds * 1e3,
                model_state_bytes=model_state,
                peak_memory_bytes=peak,
                gradient_bytes=gradients,
                optimizer_state_bytes=optimizer_state,
                saved_activation_bytes=saved,
                backward_messages=messages,
                loss_scale=self.active.loss_scale() if self.config.precision == "fp16" else None,
                skipped_iterations=len(interval) - len(done),
                global_batch_size=get_current_global_batch_size(),
            )
        )

    def _batches(self, dataset: Any, *, consumed_samples: int) -> Iterator[data.Batch]:
        if dataset is None:
            return data.no_batches()
        return data.batches(dataset, self.config, consumed_samples=consumed_samples)

    def _set_train_mode(self, train: bool) -> None:
        (self.active.wrapped or self.model).train(train)


def _gather(*values: int) -> list[tuple[int, ...]]:
    """Each value from every rank, by rank."""
    mine = torch.tensor(values, dtype=torch.int64, device=platform.device())
    ranks = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(ranks, mine)
    return [tuple(column) for column in zip(*(rank.tolist() for rank in ranks), strict=True)]


def pretrain(config: RunConfig, build_model: ModelBuilder, *, prog: str) -> None:
    """Run what `config` says, on all ranks that torchrun started.

    Exits with code 2, after one line from rank 0 and before any training, where data, files or machine don't fit.
    """
    with refusing(ValueError, prog=prog):
        platform.initialize_distributed(
            backend=config.training.distributed_backend,
            timeout_minutes=config.training.distributed_timeout_minutes,
            tensor_size=config.tensor_size,
            pipeline_size=config.pipeline_size,
        )
        platform.seed_everything(
            config.training.seed, data_parallel_random_init=config.training.data_parallel_random_init
        )
        if config.transformer.get("deterministic_mode"):
            platform.use_deterministic_algorithms()
        reporter = _reporter(config)
        trainer = Trainer(config, build_model, reporter)
    with reporter:
        trainer.run()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _reporter(config: RunConfig) -> Reporter:
    report = config.report
    if torch.distributed.get_rank() != 0:
        return SilentReporter()
    return Reporter(
        train_iters=data.num_iterations(config),
        metrics_file=report.metrics_file,
        tensorboard_dir=report.tensorboard_dir,
        wandb_project=report.wandb_project,
        wandb_exp_name=report.wandb_exp_name,
        wandb_entity=report.wandb_entity,
        wandb_save_dir=report.wandb_save_dir,
        run_config=asdict(config),
    )
