"""The loss on the validation and the test split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state

from megatron.bcd import data
from megatron.bcd.metrics.schema import EvalMetrics
from megatron.bcd.model.loss import reduce_losses
from megatron.bcd.runtime import device

if TYPE_CHECKING:
    from megatron.bcd.training.loop import Trainer


class Evaluation:
    """Each evaluation on the validation split goes on where the one before ended."""

    def __init__(self, trainer: Trainer) -> None:
        self.consumed_samples = 0
        """Of the validation split."""
        self._trainer = trainer
        self._batches: Iterator[data.Batch] | None = None
        self._last: tuple[int, float] | None = None

    @torch.no_grad()
    def run(self, split: str, *, is_final: bool = False) -> float:
        """Mean loss per token over the next --eval-iters global batches of a split, the same on every rank."""
        trainer = self._trainer
        training = trainer.config.training
        num_microbatches = trainer.global_batch_size // (
            training.micro_batch_size * parallel_state.get_data_parallel_world_size()
        )
        batches = self._batches_of(split)
        trainer.active.pause_parameter_gather()
        trainer.set_train_mode(False)
        total = torch.zeros(2, device=device.current(), dtype=torch.float64)
        for _ in range(training.eval_iters):
            total += reduce_losses(trainer.run_schedule(batches, num_microbatches, forward_only=True))
        trainer.set_train_mode(True)
        trainer.active.resume_parameter_gather()
        if split == "validation":
            self.consumed_samples += training.eval_iters * trainer.global_batch_size
        loss_sum, num_tokens = total.tolist()
        loss = loss_sum / max(num_tokens, 1.0)
        trainer.reporter.evaluation(
            EvalMetrics(
                iteration=trainer.iteration,
                consumed_samples=trainer.consumed_samples,
                split=split,
                loss=loss,
                is_final=is_final,
            )
        )
        if split == "validation":
            self._last = trainer.iteration, loss
        return loss

    def validation_loss_now(self) -> float:
        """The validation loss after this iteration: of the evaluation that was just made, or else of another one."""
        if self._last is not None and self._last[0] == self._trainer.iteration:
            return self._last[1]
        return self.run("validation")

    def _batches_of(self, split: str) -> Iterator[data.Batch]:
        splits, config = self._trainer.splits, self._trainer.config
        dataset = splits.test if split == "test" else splits.validation
        if dataset is None:
            return data.no_batches()
        if split == "test":
            return data.batches(dataset, config, consumed_samples=0)
        if self._batches is None:
            self._batches = data.batches(dataset, config, consumed_samples=self.consumed_samples)
        return self._batches
