"""Check each step: equal weights on all replicas, and skipped steps in a row."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.utils import check_param_hashes_across_dp_replicas

from megatron.bcd.config import RunConfig
from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.runtime import collectives
from megatron.bcd.training.outputs import RunOutputs
from megatron.bcd.training.state import StepResult, TrainingFailed, TrainState


@dataclass(kw_only=True)
class StepChecks:
    """The checks of a run. Every method is a collective."""

    config: RunConfig
    active: ActiveBlock
    outputs: RunOutputs

    def after_step(self, result: StepResult, state: TrainState) -> None:
        """Run the checks that are due after a step.

        Raises:
            TrainingFailed: weights of replicas differ, or too many steps in a row were skipped.
        """
        self._check_replicas(state.iteration)
        self._check_skipped(result, state)

    def _check_replicas(self, iteration: int) -> None:
        """Check that all data-parallel ranks hold the same bits (--check-weight-hash-across-dp-replicas-interval)."""
        interval = self.config.training.check_weight_hash_across_dp_replicas_interval
        if interval is None or iteration % interval:
            return
        with self.active.whole_parameters():
            is_same = check_param_hashes_across_dp_replicas([unwrap_model(self.active.model)], cross_check=True)
        if not all(collectives.gather_objects(is_same)):
            raise TrainingFailed(
                f"iteration {iteration}: weights of data-parallel ranks differ "
                "(--check-weight-hash-across-dp-replicas-interval). A GPU or the network may be faulty."
            )

    def _check_skipped(self, result: StepResult, state: TrainState) -> None:
        """Count consecutive skipped steps, and end the run at --max-skipped-steps. Steps that fp16 skips to find its
        loss scale do not count."""
        config = self.config
        lowest, is_fixed = config.optimizer.min_loss_scale, config.optimizer.loss_scale is not None
        is_search = config.precision == "fp16" and not is_fixed and self.active.core.loss_scale() > lowest
        state.skipped_steps = state.skipped_steps + 1 if result.skipped and not is_search else 0
        if state.skipped_steps < config.training.max_skipped_steps:
            return
        if self.outputs.saver is not None:
            self.outputs.saver.finish()
        # breadth-first order steps the chunks whose gradients are finite
        weights = "" if config.is_breadth_first else ", the weights are those before them"
        raise TrainingFailed(
            f"iteration {state.iteration}: loss or gradient was not finite in {state.skipped_steps} steps in a row "
            f"(--max-skipped-steps){weights}; {self.outputs.where_to_resume()}. A lower "
            "--lr, a longer warm-up or --clip-grad may help"
        )
