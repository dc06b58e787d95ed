"""Between a run and its checkpoints: what is saved of its state, and how a run resumes from it."""

from __future__ import annotations

import gc
from importlib.metadata import version

from megatron.bcd import __version__
from megatron.bcd.blocks.phase_state import PhaseState
from megatron.bcd.blocks.schedule import BlockSchedule
from megatron.bcd.checkpoint import loader, optimizer_state, run_state
from megatron.bcd.config import RunConfig, run_config_to_dict
from megatron.bcd.runtime import memory, rng
from megatron.bcd.training.setup import Components
from megatron.bcd.training.state import TrainState


def start(components: Components, source: loader.Source | None) -> TrainState:
    """The state of a run that is about to train, its first phase entered: a new one, or that of the checkpoint
    `source`, whose weights `setup` has loaded. A collective.

    Raises:
        ValueError: the checkpoint can't be read.
    """
    state = TrainState()
    _report_source(components, source)
    saved = None if source is None else source.state
    if saved is not None:
        _load_counters(state, saved, components)
    state.run = run_state.name_of_run(components.config, saved)
    takes_optimizer = saved is not None and _takes_optimizer_state(components, saved)
    if source is not None and takes_optimizer:
        next_block = _next_block(state.phase_state, components.block_schedule)
        loader.load_kept_state(source, components.active, next_block=next_block)
    memory.release_cached_memory()
    memory.reset_peak_memory()
    gc.freeze()  # modules and data live as long as the run: collections at a switch need not visit them

    def on_built() -> None:
        if source is not None and saved is not None:
            _restore_built(components, source, saved, takes_optimizer=takes_optimizer)

    components.phase.enter(state, on_built=on_built)
    if components.saver is not None:
        components.saver.log_progress("Starting job")
    return state


def start_evaluation(components: Components, source: loader.Source | None) -> TrainState:
    """The state of a run that only evaluates (--skip-train): where the checkpoint's run stood, but from
    the first validation sample on."""
    _report_source(components, source)
    if source is None:
        return TrainState()
    return TrainState(iteration=source.iteration, consumed_samples=source.consumed_samples)


_TOKENIZER = ("tokenizer_type", "vocab_size", "tiktoken_pattern", "tiktoken_num_special_tokens")
"""Flags on which the meaning of an id depends. Files of the tokenizer may have been moved."""


def check_same_tokens(source: loader.Source, config: RunConfig) -> None:
    """Compare what tokens are with the run that wrote the checkpoint; other data of the same tokenizer may follow.

    Raises:
        ValueError: one of the two trained on mock data, or they have different tokenizers.
    """
    if source.state is None:
        return
    written, saved = f"--load {source.root}: {source.path} was written", source.state.flags
    remedy = "or other folders for --save and --load (--finetune starts a new run with these weights)"
    now = config.data.mock_data
    if saved.get("data", {}).get("mock_data", now) != now:
        was, here, again = (
            ("without", "has it", "leave it out") if now else ("with", "does not have it", "give it again")
        )
        raise ValueError(f"{written} {was} --mock-data, but this run {here}: {again}, {remedy}")
    before = saved.get("tokenizer", {})
    for name in _TOKENIZER:
        value = getattr(config.tokenizer, name)
        if before.get(name, value) != value:  # older versions wrote less
            raise ValueError(
                f"{written} with --{name.replace('_', '-')} {before[name]}, but this run has {value}: give the same "
                f"value, {remedy}"
            )


def _report_source(components: Components, source: loader.Source | None) -> None:
    load, reporter = components.config.checkpoint.load, components.reporter
    if source is None:
        if load is not None:
            reporter.note(f"--load {load} holds no checkpoint: starting from iteration 0")
        if components.config.checkpoint.load_hf is not None:
            reporter.note(f"weights of {components.config.checkpoint.load_hf} loaded")
        return
    for message in source.messages:
        reporter.warning(message)
    if source.state is None:
        reporter.note(f"weights of {source.path} loaded")


def _load_counters(state: TrainState, saved: run_state.RunState, components: Components) -> None:
    """Set the counters. Where the saved phase can't continue, its cycle starts again."""
    state.load_state_dict(vars(saved))
    state.phase_state, restarted = run_state.resumed_phase(
        saved, components.config, components.partition, components.block_schedule
    )
    if restarted is not None:
        components.reporter.warning(restarted)
    if state.phase_state.to_dict() != saved.phase:
        state.samples_in_phase = 0
    components.active.remember_loss_scaler(saved.loss_scaler)
    components.lr_scheduler.num_steps = saved.scheduler_steps


def _takes_optimizer_state(components: Components, saved: run_state.RunState) -> bool:
    """Whether it is wanted, and belongs to the same blocks and optimizers."""
    is_same = saved.blocks == run_state.contents_of_blocks(components.partition)
    is_same = is_same and run_state.has_same_optimizers(saved, components.config)
    return components.config.checkpoint.load_optim and is_same


def _restore_built(
    components: Components, source: loader.Source, saved: run_state.RunState, *, takes_optimizer: bool
) -> None:
    """Optimizer state of the active block, and random generators."""
    config, reporter = components.config, components.reporter
    if takes_optimizer:
        loader.load_optimizer(source, components.active)
    message = loader.load_random_states(source) if config.checkpoint.load_rng else None
    if message is not None or not config.checkpoint.load_rng:
        rng.seed_everything(config.training.seed + saved.iteration)
    if message is not None:
        reporter.warning(message)
    reporter.note(f"resuming from {source.path}, after iteration {saved.iteration}")


def _next_block(phase_state: PhaseState, block_schedule: BlockSchedule) -> int | None:
    """The block of the coming step; None if greedy order has not selected it yet."""
    return None if block_schedule.needs_scores(phase_state) else block_schedule.block(phase_state)


def state_to_save(components: Components, state: TrainState) -> run_state.RunState:
    """Everything of a checkpoint that is not a tensor, the same on every rank. A collective."""
    active = components.active
    # after the last step of a phase the next block is due, while the present one is still built
    is_current = active.block == _next_block(state.phase_state, components.block_schedule)
    saves = components.config.checkpoint.save_optim
    summaries = optimizer_state.summarize(active, is_current=is_current) if saves else {}
    return run_state.RunState(
        **state.state_dict(),
        blocks=run_state.contents_of_blocks(components.partition),
        scheduler_steps=components.lr_scheduler.num_steps,
        optimizer_state=optimizer_state.summaries_to_dict(summaries),
        loss_scaler=active.loss_scaler_state(),
        layout=vars(loader.current_layout()),
        flags=run_config_to_dict(components.config),
        versions={name: version(name) for name in ("torch", "megatron-core")} | {"megatron-bcd": __version__},
    )
