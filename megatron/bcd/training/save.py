"""When a run saves, and when it stops."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.bcd.training import restore
from megatron.bcd.training.setup import Components
from megatron.bcd.training.state import TrainState
from megatron.bcd.training.train_step import StepResult, TrainingFailed


def is_save_due(components: Components, iteration: int, *, is_last: bool) -> bool:
    """Whether a checkpoint follows this iteration, as far as the flags say."""
    interval = components.config.checkpoint.save_interval
    return components.saver is not None and (is_last or bool(interval and iteration % interval == 0))


def is_export_due(components: Components, iteration: int, *, is_last: bool) -> bool:
    """Whether a model in Hugging Face's format follows this iteration (--save-hf)."""
    interval = components.config.checkpoint.save_hf_interval
    return components.exporter is not None and (is_last or bool(interval and iteration % interval == 0))


def export(components: Components, state: TrainState, *, is_last: bool) -> None:
    """Write the model in Hugging Face's format. A collective.

    Raises:
        TrainingFailed: it is the last one and could not be written.
    """
    assert components.exporter is not None
    interval = components.config.checkpoint.save_hf_interval
    with components.active.whole_parameters():
        if interval and state.iteration % interval == 0:
            components.exporter.export(components.model, iteration=state.iteration)
        if is_last and not components.exporter.export(components.model):
            raise TrainingFailed(
                f"the model of iteration {state.iteration} could not be written to --save-hf "
                f"{components.exporter.root}; {_where_to_resume(components)}"
            )


def save(components: Components, state: TrainState) -> bool:
    """Write a checkpoint; False if that failed. A collective."""
    assert components.saver is not None
    with components.active.whole_parameters():
        return components.saver.save(restore.state_to_save(components, state), components.model, components.active)


def requests(components: Components) -> tuple[int, int]:
    """What this rank adds to the decision of `stop_or_save`."""
    saver = components.saver
    return components.stop.on_this_rank(is_writing=saver is not None and saver.is_writing)


def stop_or_save(
    components: Components, state: TrainState, *, is_last: bool, maxima: Sequence[int] | None = None
) -> bool:
    """Agree with the other ranks on stopping, save if due, and complete what is being written; whether the run stops
    here. A collective.

    `maxima`: of the `requests` of all ranks, if a step has exchanged them and nothing that takes long came after it.

    Raises:
        TrainingFailed: the run ends here and could not be saved.
    """
    saver, stop = components.saver, components.stop
    if maxima is None:
        is_any_rank_writing = stop.agree(state.iteration, is_writing=saver is not None and saver.is_writing)
    else:
        is_any_rank_writing = stop.decide(state.iteration, maxima)
    if saver is not None and saver.is_under_way and not is_any_rank_writing:
        saver.finish()
    if components.pipeline.is_ahead:  # forward-only stages have started the next iteration, which must be completed
        return False
    is_stopped = stop.reason is not None and not is_last
    is_end = is_last or is_stopped
    is_saved = True
    if saver is not None and (is_end or is_save_due(components, state.iteration, is_last=is_last)):
        is_saved = save(components, state)
        if not is_end:  # a signal that came while it was written: another save would write the same again
            stop.agree(state.iteration, is_writing=False)
            is_stopped = is_end = stop.reason is not None
    if is_end and saver is not None:
        is_saved = saver.finish() and is_saved
    if is_export_due(components, state.iteration, is_last=is_last):
        export(components, state, is_last=is_last)
    if is_stopped:
        components.reporter.note(f"stopping after iteration {state.iteration}: {stop.reason}")
    if is_end and not is_saved:
        raise TrainingFailed(f"iteration {state.iteration} could not be saved; {_where_to_resume(components)}")
    return is_stopped


def check_skipped(components: Components, state: TrainState, result: StepResult) -> None:
    """Count consecutive skipped steps. fp16's own search for a loss scale does not count.

    Raises:
        TrainingFailed: there were --max-skipped-steps of them.
    """
    config = components.config
    lowest, is_fixed = config.optimizer.min_loss_scale, config.optimizer.loss_scale is not None
    is_search = config.precision == "fp16" and not is_fixed and components.active.loss_scale() > lowest
    state.skipped_steps = state.skipped_steps + 1 if result.skipped and not is_search else 0
    if state.skipped_steps < config.training.max_skipped_steps:
        return
    if components.saver is not None:
        components.saver.finish()
    raise TrainingFailed(
        f"iteration {state.iteration}: loss or gradient was not finite in {state.skipped_steps} steps in a row "
        f"(--max-skipped-steps), the weights are those before them; {_where_to_resume(components)}. A lower --lr, a "
        "longer warm-up or --clip-grad may help"
    )


def _where_to_resume(components: Components) -> str:
    newest = components.saver.newest() if components.saver is not None else None
    return "there is no checkpoint to resume from" if newest is None else f"the last good checkpoint is {newest}"
