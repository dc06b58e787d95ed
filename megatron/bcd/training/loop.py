"""The training loop (arXiv 2506.12037, Algorithm 1)."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)

from megatron.bcd.blocks.phase_state import PhaseState
from megatron.bcd.training.check_replicas import check_replicas
from megatron.bcd.training.save import check_skipped, export, is_export_due, is_save_due, requests, stop_or_save
from megatron.bcd.training.setup import Components
from megatron.bcd.training.state import TrainState


def run(components: Components, state: TrainState) -> None:
    """Train to the end and evaluate, or with --skip-train only evaluate.

    Raises:
        TrainingFailed: too many consecutive steps were not finite, or the last checkpoint can't be written.
    """
    with components.stop.listening(), _garbage_collector(is_manual=components.config.training.manual_gc):
        if not components.config.training.skip_train:
            if state.iteration < components.train_iters:
                _warn_of_untrained(components, state, num_steps=components.train_iters - state.iteration)
            is_stopped = train(components, state)
            components.prefix_cache.close()
            if is_stopped:
                return
            _warn_of_untrained(components, state, num_steps=0)
        components.evaluator.at_end(state)


def _warn_of_untrained(components: Components, state: TrainState, *, num_steps: int) -> None:
    """Name what `num_steps` more steps leave untrained for certain; with none, what the run has left untrained."""
    schedule, after = components.block_schedule, state.phase_state
    if num_steps > 0:
        after = PhaseState(phase=schedule.phases_within(after, num_steps))
    is_unknown = num_steps > 0 and components.config.bcd.bcd_order == "greedy"
    visited = range(min(after.phase, schedule.num_blocks)) if is_unknown else schedule.visited(after)
    parts = components.partition.describe_untrained(visited)
    if parts:
        components.reporter.warning(
            f"{len(visited)} of {schedule.num_blocks} blocks are active in {components.train_iters:,} steps "
            f"({schedule.describe()}); {'the other blocks' if is_unknown else ', '.join(parts)} "
            f"{'will stay' if num_steps > 0 else 'stayed'} as at the start: give more steps, fewer blocks or "
            "shorter phases"
        )


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


def train(components: Components, state: TrainState) -> bool:
    """Train block after block; True if the run was stopped before its end. Raises as `run`."""
    training, phase, evaluator = components.config.training, components.phase, components.evaluator
    components.forward_backward.module.train()
    is_last = components.block_schedule.is_converged(state.phase_state)  # a checkpoint of a converged run
    is_stopped = False
    if components.exporter is not None and (is_last or state.iteration >= components.train_iters):
        export(components, state, is_last=True)  # the run that got here may have ended before, or had no --save-hf
    while state.iteration < components.train_iters and not (is_last or is_stopped):
        update_num_microbatches(state.consumed_samples, consistency_check=False)
        components.profiler.before_step(state.iteration)
        phase_before = state.phase_state.phase
        result = components.train_step(
            phase.batches(state),
            state.phase_state,
            num_microbatches_next=_num_microbatches_next(components, state),
            requests=lambda: requests(components),
        )
        state.after_step(result, num_samples=get_current_global_batch_size())
        components.reporter.progress(state.iteration)
        phase.check_switch(state, result)
        check_replicas(components, state.iteration)
        check_skipped(components, state, result)
        is_last = state.iteration == components.train_iters
        if state.iteration % components.config.report.log_interval == 0 or state.iteration == 1 or is_last:
            components.reporter.step(components.metrics.collect(state))
            if state.iteration > 1:  # as in stock, the first iteration also counts in the first interval
                state.interval = []
        if evaluator.is_due(state.iteration):
            evaluator.run("validation", state)
        is_last = _advance(components, state, result.loss, is_last=is_last)
        is_only_a_step = state.phase_state.phase == phase_before and not evaluator.is_due(state.iteration)
        is_stopped = stop_or_save(
            components, state, is_last=is_last, maxima=result.requests if is_only_a_step else None
        )
        components.profiler.after_step(state.iteration, is_last=is_last or is_stopped)
        if training.manual_gc and training.manual_gc_interval and state.iteration % training.manual_gc_interval == 0:
            gc.collect()
    return is_stopped


def _advance(components: Components, state: TrainState, loss: float, *, is_last: bool) -> bool:
    """Count the step in its phase; at the end of the phase start the next one, unless no step follows.

    Returns whether no step follows: `is_last`, or a cycle has ended that improved too little.
    """
    schedule, samples, before = components.block_schedule, components.samples, state.phase_state
    state.phase_state = schedule.after_step(before, loss=loss)
    if state.phase_state.phase == before.phase:
        return is_last
    is_converged = False
    state.after_phase(num_distinct_samples=samples.num_distinct(state.samples_in_phase))
    samples.end_phase()
    if components.config.bcd.bcd_stop_cycle_improvement is not None and schedule.is_cycle_end(state.phase_state):
        loss = components.evaluator.validation_loss(state)
        state.phase_state = schedule.after_evaluation(state.phase_state, loss)
        is_converged = schedule.is_converged(state.phase_state) and not is_last
    if is_converged:
        components.reporter.note(_describe_convergence(components, state))
        if state.interval:
            components.reporter.step(components.metrics.collect(state, phase_state=before))
            state.interval = []
    if is_last or is_converged:
        return True
    components.phase.advance(state, before)
    return False


def _describe_convergence(components: Components, state: TrainState) -> str:
    schedule = components.block_schedule
    before, last = (end.validation_loss for end in state.phase_state.cycle_ends)
    return (
        f"the run ends after iteration {state.iteration}: cycle {schedule.cycle(state.phase_state) - 1} brought the "
        f"validation loss from {before:.6f} to {last:.6f}, an improvement of less than "
        f"--bcd-stop-cycle-improvement {components.config.bcd.bcd_stop_cycle_improvement}"
    )


def _num_microbatches_next(components: Components, state: TrainState) -> int:
    """Microbatches of the iteration after the coming one, if it follows directly and in the same phase; else 0."""
    config, after = components.config, state.iteration + 1
    is_last = after == components.train_iters
    is_stopped = components.stop.reason is not None or components.stop.is_interval_over(after)
    if (
        is_last
        or is_stopped
        or components.evaluator.is_due(after)
        or is_save_due(components, after, is_last=is_last)
        or is_export_due(components, after, is_last=is_last)
        or components.block_schedule.ends_with_next_step(state.phase_state)
    ):
        return 0
    if not config.training.rampup_batch_size:
        return get_num_microbatches()
    update_num_microbatches(state.consumed_samples + get_current_global_batch_size(), consistency_check=False)
    num_microbatches = get_num_microbatches()
    update_num_microbatches(state.consumed_samples, consistency_check=False)
    return num_microbatches
