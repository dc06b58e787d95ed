"""Between a Trainer and its checkpoints: where a run stands, and how one takes up where another stood."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING

from megatron.bcd import __version__
from megatron.bcd.checkpoint import loader, optimizer_state, run_state
from megatron.bcd.config import run_config_to_dict
from megatron.bcd.runtime import rng
from megatron.bcd.training.train_step import StepResult

if TYPE_CHECKING:
    from megatron.bcd.training.loop import Trainer


def load_weights(trainer: Trainer, source: loader.Source | None) -> None:
    """Before the first phase is built: weights, and the phase to build. A collective.

    Raises:
        ValueError: the checkpoint is of another model, or can't be read.
    """
    if source is None:
        if trainer.config.checkpoint.load is not None:
            trainer.reporter.note(f"--load {trainer.config.checkpoint.load} holds no checkpoint: starting afresh")
        return
    for message in source.messages:
        trainer.reporter.warning(message)
    loader.load_weights(source, trainer.model)
    if source.state is None:
        trainer.reporter.note(f"weights of {source.path} loaded")
        return
    trainer.state, restarted = run_state.resumed_phase(source.state, trainer.partition, trainer.phases)
    if restarted is not None:
        trainer.reporter.warning(restarted)


def restore_counters(trainer: Trainer, source: loader.Source | None) -> None:
    """Before the first phase is built: how far the run is in its data, and what was kept of the other blocks. A
    collective.

    Raises:
        ValueError: the checkpoint can't be read.
    """
    if source is None or source.state is None:
        return
    saved = source.state
    trainer.iteration, trainer.consumed_samples = saved.iteration, saved.consumed_samples
    trainer.evaluation.consumed_samples = saved.consumed_validation_samples
    trainer.active.remember_loss_scaler(saved.loss_scaler)
    is_same_phase = trainer.state.to_dict() == saved.phase
    trainer.samples.restore_after_build(
        in_phase=saved.samples_in_phase if is_same_phase else 0, seen_before=saved.samples_seen_before
    )
    if _takes_optimizer_state(trainer, source):
        loader.load_kept_state(source, trainer.active, next_block=_next_block(trainer))


def _takes_optimizer_state(trainer: Trainer, source: loader.Source | None) -> bool:
    """Whether it was saved, is wanted, and belongs to the same blocks."""
    if source is None or source.state is None or not trainer.config.checkpoint.load_optim:
        return False
    return source.state.blocks == run_state.contents_of_blocks(trainer.partition)


def _next_block(trainer: Trainer) -> int | None:
    """The block of the coming step; None where greedy order has yet to choose it."""
    return None if trainer.phases.needs_scores(trainer.state) else trainer.phases.block(trainer.state)


def restore_after_build(trainer: Trainer, source: loader.Source | None) -> None:
    """After the first phase is built: optimizer state, scheduler, random generators. A collective.

    Raises:
        ValueError: the checkpoint can't be read.
    """
    if source is None or source.state is None:
        return
    saved, checkpoint = source.state, trainer.config.checkpoint
    trainer.interval = [StepResult(**step) for step in saved.interval]
    trainer.skipped_in_a_row = saved.skipped_steps
    trainer.scheduler.num_steps = saved.scheduler_steps
    if _takes_optimizer_state(trainer, source):
        loader.load_optimizer(source, trainer.active)
    trainer.scheduler.step(0)  # the optimizer's groups get the learning rate of now
    message = loader.load_random_states(source) if checkpoint.load_rng else None
    if message is not None or not checkpoint.load_rng:
        rng.seed_everything(trainer.config.training.seed + saved.iteration)
    if message is not None:
        trainer.reporter.warning(message)
    trainer.reporter.note(f"going on from {source.path}, after iteration {saved.iteration}")


def state_of(trainer: Trainer) -> run_state.RunState:
    """Where the run stands, the same on every rank. A collective."""
    # after the last step of a phase the next block's turn has come
    is_current = trainer.active.block == _next_block(trainer)
    summaries = optimizer_state.summarize(trainer.active, is_current=is_current)
    return run_state.RunState(
        iteration=trainer.iteration,
        consumed_samples=trainer.consumed_samples,
        consumed_validation_samples=trainer.evaluation.consumed_samples,
        samples_in_phase=trainer.samples.in_phase,
        samples_seen_before=trainer.samples.seen_before,
        phase=trainer.state.to_dict(),
        blocks=run_state.contents_of_blocks(trainer.partition),
        scheduler_steps=trainer.scheduler.num_steps,
        optimizer_state=optimizer_state.summaries_to_dict(summaries),
        loss_scaler=trainer.active.loss_scaler_state(),
        skipped_steps=trainer.skipped_in_a_row,
        interval=[asdict(step) for step in trainer.interval],
        layout=asdict(loader.current_layout()),
        flags=run_config_to_dict(trainer.config),
        versions={name: version(name) for name in ("torch", "megatron-core")} | {"megatron-bcd": __version__},
    )
