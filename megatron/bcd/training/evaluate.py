"""The loss on the validation and the test split."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from megatron.core import parallel_state

from megatron.bcd import data
from megatron.bcd.config import RunConfig
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.metrics.schema import EvalMetrics
from megatron.bcd.model.loss import reduce_losses
from megatron.bcd.runtime import device, memory
from megatron.bcd.training.forward_backward import ForwardBackward
from megatron.bcd.training.samples import EvaluationSamples
from megatron.bcd.training.state import TrainState
from megatron.bcd.training.stop import StopRequests


class Evaluator:
    """Evaluates on the next samples of the validation split (on the first ones with --eval-fixed, on all with
    --full-validation), or on the first ones of the test split."""

    def __init__(
        self,
        config: RunConfig,
        splits: data.Splits,
        forward_backward: ForwardBackward,
        reporter: Reporter,
        stop: StopRequests,
        samples: EvaluationSamples | None = None,
    ) -> None:
        """`samples` are reported after every validation."""
        self._config = config
        self._splits = splits
        self._forward_backward = forward_backward
        self._reporter = reporter
        self._stop = stop
        self._samples = samples
        self._global_batch_size = data.global_batch_size(config)
        self._validation_batches: Iterator[data.Batch] | None = None
        self._last: tuple[int, float] | None = None

    @torch.no_grad()
    def run(self, split: str, state: TrainState, *, is_final: bool = False, can_stop: bool = True) -> float | None:
        """Mean loss per token over the global batches of an evaluation of a split, the same on every rank.

        None if a signal has ended it, unless it must not (`can_stop`). The next samples of the validation split count
        as consumed; the first ones and the whole split do not.
        """
        training = self._config.training
        num_microbatches = self._global_batch_size // (
            training.micro_batch_size * parallel_state.get_data_parallel_world_size()
        )
        batches = self._batches(split, state)
        is_stopped = False
        total = torch.zeros(2, device=device.current(), dtype=torch.float64)
        module = self._forward_backward.module
        with self._forward_backward.active.whole_parameters():
            module.eval()
            for _ in range(self._num_steps(split)):
                is_stopped = can_stop and self._stop.is_signalled()
                if is_stopped:
                    break
                if training.empty_unused_memory_level >= 1:
                    memory.release_cached_memory()
                total += reduce_losses(self._forward_backward(batches, num_microbatches, forward_only=True))
            module.train()
        if split == "validation" and not self._is_repeated:
            state.consumed_validation_samples += training.eval_iters * self._global_batch_size
        if is_stopped:
            self._reporter.note(f"the evaluation on the {split} split after iteration {state.iteration} was stopped")
            return None
        loss_sum, num_tokens = total.tolist()
        loss = self._report(split, state, loss_sum / max(num_tokens, 1.0), is_final=is_final)
        if split == "validation" and self._samples is not None:
            self._samples.run(state.iteration)
        return loss

    def _report(self, split: str, state: TrainState, loss: float, *, is_final: bool) -> float:
        self._reporter.evaluation(
            EvalMetrics(
                iteration=state.iteration,
                consumed_samples=state.consumed_samples,
                split=split,
                loss=loss,
                is_final=is_final,
            )
        )
        if split == "validation":
            self._last = state.iteration, loss
        return loss

    def at_end(self, state: TrainState) -> None:
        """Evaluate on both splits after the last step, as stock does: on further validation samples, also where an
        interval ended just now. What would be evaluated on the same samples again is only reported."""
        if not self._config.training.eval_iters:
            return
        if self._is_repeated and self._last is not None and self._last[0] == state.iteration:
            loss: float | None = self._report("validation", state, self._last[1], is_final=True)
        else:
            loss = self.run("validation", state, is_final=True)
        if self._splits.has_test and loss is not None:
            self.run("test", state, is_final=True)

    def is_due(self, iteration: int) -> bool:
        """Whether --eval-interval asks for an evaluation after this iteration."""
        training = self._config.training
        return bool(training.eval_iters) and iteration % training.eval_interval == 0

    def validation_loss(self, state: TrainState) -> float:
        """The validation loss after the present iteration: of an evaluation just made, else of a new one."""
        if self._last is not None and self._last[0] == state.iteration:
            return self._last[1]
        loss = self.run("validation", state, can_stop=False)
        assert loss is not None
        return loss

    @property
    def _is_repeated(self) -> bool:
        """Whether every evaluation has the same validation samples."""
        return self._config.training.eval_fixed or self._config.training.full_validation

    def _num_steps(self, split: str) -> int:
        """Global batches of one evaluation."""
        if split == "validation" and self._config.training.full_validation:
            return math.ceil(self._splits.num_validation / self._global_batch_size)
        return self._config.training.eval_iters

    def _batches(self, split: str, state: TrainState) -> Iterator[data.Batch]:
        dataset = self._splits.test if split == "test" else self._splits.validation
        if dataset is None:
            return data.no_batches()
        if split == "validation" and self._config.training.full_validation:
            return data.one_pass(dataset, self._config)
        if split == "test" or self._config.training.eval_fixed:
            return data.batches(dataset, self._config, consumed_samples=0)
        if self._validation_batches is None:
            self._validation_batches = data.batches(
                dataset, self._config, consumed_samples=state.consumed_validation_samples
            )
        return self._validation_batches
