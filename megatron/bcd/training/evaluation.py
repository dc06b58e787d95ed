"""Evaluate on the validation and the test split."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state

from megatron.bcd import data
from megatron.bcd.config import RunConfig
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.metrics.schema import EvalMetrics
from megatron.bcd.model.loss import reduce_losses
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.runtime import memory
from megatron.bcd.training.state import TrainState
from megatron.bcd.training.stop import StopRequests


@dataclass(kw_only=True)
class Evaluator:
    """Evaluates the weights of a run and reports the loss. Every method but the properties is a collective."""

    config: RunConfig
    splits: data.Splits
    global_batch_size: int
    state: TrainState
    active: ActiveBlock
    forward_backward: Callable[[Iterator[data.Batch], int], list[dict[str, Any]]]
    stop: StopRequests
    reporter: Reporter
    _validation_batches: Iterator[data.Batch] | None = field(default=None, init=False)
    _last_validation: tuple[int, float] | None = field(default=None, init=False)
    """Iteration and loss of the last validation."""

    @torch.no_grad()
    def evaluate(self, split: str, *, is_final: bool = False) -> float | None:
        """Return the mean loss per token on "validation" or "test", the same on every rank.

        The validation split continues where the last evaluation ended, and its samples count as consumed. With
        --eval-fixed each evaluation reads the first samples, with --full-validation all of them. Returns None if a
        signal ended the evaluation.
        """
        training, state = self.config.training, self.state
        num_steps = training.eval_iters
        if split == "validation" and training.full_validation:
            num_steps = math.ceil(self.splits.num_validation / self.global_batch_size)
        per_microbatch = training.micro_batch_size * parallel_state.get_data_parallel_world_size()
        batches = self._batches(split)
        loss_sum, num_tokens, is_stopped = 0.0, 0.0, 0
        with self.active.whole_parameters():
            module = self.active.wrapped or self.active.model
            module.eval()
            for _ in range(num_steps):
                if training.empty_unused_memory_level >= 1:
                    memory.release_cached_memory()
                losses = self.forward_backward(batches, self.global_batch_size // per_microbatch)
                step_loss, step_tokens, [is_stopped] = reduce_losses(losses, [self.stop.signal])
                loss_sum, num_tokens = loss_sum + step_loss, num_tokens + step_tokens
                if is_stopped:
                    break
            module.train()
        if is_stopped:
            state.owes_evaluation = not is_final
            self.reporter.note(f"the evaluation on the {split} split after iteration {state.iteration} was stopped")
            return None
        if split == "validation":
            state.owes_evaluation = False
            if not self._reads_same_samples:
                state.consumed_validation_samples += training.eval_iters * self.global_batch_size
        return self._report(split, loss_sum / max(num_tokens, 1.0), is_final=is_final)

    def evaluate_at_end(self) -> None:
        """Evaluate on both splits after the last step, like stock.

        Stock reads further validation samples even if an interval has just ended. If the samples would be the same,
        report the previous loss without computing it again.
        """
        if not self.config.training.eval_iters:
            return
        last = self._last_validation
        if self._reads_same_samples and last is not None and last[0] == self.state.iteration:
            loss: float | None = self._report("validation", last[1], is_final=True)
        else:
            loss = self.evaluate("validation", is_final=True)
        if self.splits.has_test and loss is not None:
            self.evaluate("test", is_final=True)
        self.close()

    def is_due(self, iteration: int) -> bool:
        """Return whether --eval-interval asks for an evaluation after `iteration`."""
        return bool(self.config.training.eval_iters) and iteration % self.config.training.eval_interval == 0

    def close(self) -> None:
        """Stop the data workers. The next evaluation starts at `state.consumed_validation_samples`."""
        self._validation_batches = None

    @property
    def _reads_same_samples(self) -> bool:
        """Whether every evaluation reads the same validation samples."""
        return self.config.training.eval_fixed or self.config.training.full_validation

    def _report(self, split: str, loss: float, *, is_final: bool) -> float:
        iteration, samples = self.state.iteration, self.state.consumed_samples
        self.reporter.evaluation(
            EvalMetrics(iteration=iteration, consumed_samples=samples, split=split, loss=loss, is_final=is_final)
        )
        if split == "validation":
            self._last_validation = iteration, loss
        return loss

    def _batches(self, split: str) -> Iterator[data.Batch]:
        dataset = self.splits.test if split == "test" else self.splits.validation
        if dataset is None:
            return itertools.repeat({})  # in the middle of the pipeline
        if split == "validation" and self.config.training.full_validation:
            return data.one_pass(dataset, self.config)
        if split == "test" or self.config.training.eval_fixed:
            return data.batches(dataset, self.config, consumed_samples=0)
        if self._validation_batches is None:
            consumed = self.state.consumed_validation_samples
            self._validation_batches = data.batches(dataset, self.config, consumed_samples=consumed)
        return self._validation_batches
