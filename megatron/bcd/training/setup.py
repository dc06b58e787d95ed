"""Builds everything that a run consists of, once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.bcd import data
from megatron.bcd.blocks.partition import Partition
from megatron.bcd.blocks.schedule import BlockSchedule, block_schedule_from_config
from megatron.bcd.blocks.stages import partition_from_config
from megatron.bcd.checkpoint import loader
from megatron.bcd.checkpoint.saver import Saver
from megatron.bcd.config import RunConfig
from megatron.bcd.data.samples import TrainingSamples
from megatron.bcd.huggingface import folder, load
from megatron.bcd.huggingface.architecture import Architecture
from megatron.bcd.huggingface.export import Exporter
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.model import builder
from megatron.bcd.model.implementation import Implementation, implementation_here
from megatron.bcd.optim.active_block import ActiveBlock
from megatron.bcd.optim.lr_schedule import build_scheduler
from megatron.bcd.pipeline.schedule import PipelineSchedule
from megatron.bcd.planner.run_recomputation import RunMemory
from megatron.bcd.planner.run_state import head_passes
from megatron.bcd.prefix_cache.controller import PrefixCache
from megatron.bcd.runtime import memory, replicas
from megatron.bcd.runtime.activation_meter import ActivationMeter
from megatron.bcd.tokenizer import Tokenizer, build_tokenizer, padded_vocab_size
from megatron.bcd.training.banner import summarize
from megatron.bcd.training.collect_metrics import StepMetricsCollector
from megatron.bcd.training.evaluate import Evaluator
from megatron.bcd.training.forward_backward import ForwardBackward
from megatron.bcd.training.phase import Phase
from megatron.bcd.training.profiler import StepProfiler
from megatron.bcd.training.recompute import Recomputation
from megatron.bcd.training.samples import evaluation_samples
from megatron.bcd.training.stop import StopRequests
from megatron.bcd.training.timers import StepTimers
from megatron.bcd.training.train_step import TrainStep

ModelBuilder = Callable[[RunConfig, int, Implementation], torch.nn.Module]


@dataclass(frozen=True, kw_only=True)
class Components:
    """The parts of a run on this rank. What changes during the run is in `TrainState` and in the parts themselves."""

    config: RunConfig
    reporter: Reporter
    partition: Partition
    block_schedule: BlockSchedule
    train_iters: int
    model: torch.nn.Module
    splits: data.Splits
    samples: TrainingSamples
    active: ActiveBlock
    pipeline: PipelineSchedule
    lr_scheduler: OptimizerParamScheduler
    forward_backward: ForwardBackward
    train_step: TrainStep
    phase: Phase
    evaluator: Evaluator
    metrics: StepMetricsCollector
    prefix_cache: PrefixCache
    saver: Saver | None
    """None without --save."""
    exporter: Exporter | None
    """None without --save-hf."""
    stop: StopRequests
    profiler: StepProfiler


@dataclass(frozen=True, kw_only=True)
class _Base:
    """What the rest of a run is built on: blocks, data, and the model with its first weights."""

    partition: Partition
    block_schedule: BlockSchedule
    train_iters: int
    tokenizer: Tokenizer
    vocab_size: int
    padded_vocab_size: int
    implementation: Implementation
    model: torch.nn.Module
    splits: data.Splits
    epoch_samples: int
    notes: tuple[str, ...]
    """Lines of the banner about the data."""


def setup(
    config: RunConfig,
    build_model: ModelBuilder,
    reporter: Reporter,
    *,
    source: loader.Source | None = None,
    is_restart: bool = False,
) -> Components:
    """Build a run; a collective. Prints the banner.

    Needs initialised parallel groups and seeded random generators. `source` is the checkpoint to load the weights from;
    without one they come from --load-hf, or are drawn. `is_restart`: torchrun has started the same command again.
    Files (the index cache of the data) are written only after everything has been checked.

    Raises:
        ValueError: data, tokenizer, model or checkpoint do not fit the flags or this machine; one line.
    """
    base = _base(config, build_model, source)
    exporter = None
    if config.checkpoint.save_hf is not None:
        is_continued = is_restart or (source is not None and source.state is not None)
        exporter = Exporter(config, reporter, is_continued=is_continued)
    components = _components(config, base, reporter, exporter)
    reporter.banner(
        summarize(
            config=config,
            partition=base.partition,
            model=base.model,
            vocab_size=base.vocab_size,
            padded_vocab_size=base.padded_vocab_size,
            global_batch_size=data.global_batch_size(config),
            train_iters=base.train_iters,
            implementation=base.implementation,
            block_schedule=base.block_schedule,
            samples=components.samples.subset,
            recomputation=components.phase.recomputation,
        )
    )
    for note in base.notes:
        reporter.note(note)
    return components


def _base(config: RunConfig, build_model: ModelBuilder, source: loader.Source | None) -> _Base:
    partition = partition_from_config(config)
    train_iters = data.num_iterations(config)
    block_schedule = block_schedule_from_config(config, partition, num_steps=train_iters)
    _init_num_microbatches(config)
    tokenizer = tokenizer_of(config)
    network = _network_to_load(config, tokenizer)
    num_ids = tokenizer.vocab_size if network is None else network.vocab_size
    vocab_size = padded_vocab_size(num_ids, config.model.make_vocab_size_divisible_by, config.tensor_size)
    plan = data.plan_fine_tuning if config.data.sft else data.plan_splits
    split_plan: data.SplitPlan | data.FineTuningPlan = plan(
        config, tokenizer, train_iters, least_steps_per_cycle=block_schedule.least_steps_per_cycle
    )
    implementation = implementation_here(config)
    model = build_model(config, vocab_size, implementation)
    if config.training.data_parallel_random_init:
        builder.broadcast_from_first_replica(model)
    if source is not None:
        loader.load_weights(source, model)
    elif config.checkpoint.load_hf is not None:
        load.load_weights(folder.ModelFolder(folder.locate(config.checkpoint.load_hf, flag="--load-hf")), model)
    return _Base(
        partition=partition,
        block_schedule=block_schedule,
        train_iters=train_iters,
        tokenizer=tokenizer,
        vocab_size=num_ids,
        padded_vocab_size=vocab_size,
        implementation=implementation,
        model=model,
        splits=data.build_splits(config, split_plan) if isinstance(split_plan, data.SplitPlan) else split_plan.splits,
        epoch_samples=split_plan.epoch_samples,
        notes=() if isinstance(split_plan, data.SplitPlan) else split_plan.notes,
    )


def _components(config: RunConfig, base: _Base, reporter: Reporter, exporter: Exporter | None) -> Components:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    samples = TrainingSamples(config, dataset=base.splits.train, epoch_samples=base.epoch_samples)
    active = ActiveBlock(model=base.model, config=config, partition=base.partition, stage=stage)
    pipeline = _pipeline(config, base)
    forward_backward = ForwardBackward(
        config, active=active, pipeline=pipeline, meter=ActivationMeter(memory.allocator())
    )
    lr_scheduler = _lr_scheduler(config)
    train_step = TrainStep(
        config,
        forward_backward=forward_backward,
        block_schedule=base.block_schedule,
        lr_scheduler=lr_scheduler,
        timers=StepTimers(config.report),
    )
    stop = StopRequests(config.checkpoint)
    prefix_cache = PrefixCache(
        config,
        model=base.model,
        partition=base.partition,
        stage=stage,
        dataset=base.splits.train,
        samples=samples,
        pipeline=pipeline,
        implementation=base.implementation,
        reporter=reporter,
        should_stop=stop.is_signalled,
    )
    return Components(
        config=config,
        reporter=reporter,
        partition=base.partition,
        block_schedule=base.block_schedule,
        train_iters=base.train_iters,
        model=base.model,
        splits=base.splits,
        samples=samples,
        active=active,
        pipeline=pipeline,
        lr_scheduler=lr_scheduler,
        forward_backward=forward_backward,
        train_step=train_step,
        phase=Phase(
            config,
            train_step=train_step,
            samples=samples,
            prefix_cache=prefix_cache,
            recomputation=Recomputation(config, model=base.model, stage=stage, run=_run_memory(config, base)),
            train_iters=base.train_iters,
            reporter=reporter,
        ),
        evaluator=_evaluator(config, base, forward_backward, reporter, stop),
        metrics=StepMetricsCollector(config, train_step=train_step, samples=samples, prefix_cache=prefix_cache),
        prefix_cache=prefix_cache,
        saver=Saver(config.checkpoint, reporter) if config.checkpoint.save else None,
        exporter=exporter,
        stop=stop,
        profiler=StepProfiler(config.report),
    )


def _pipeline(config: RunConfig, base: _Base) -> PipelineSchedule:
    return PipelineSchedule(
        name=config.bcd.bcd_schedule,
        partition=base.partition,
        run_ahead=config.bcd.bcd_run_ahead,
        timeout_minutes=config.training.distributed_timeout_minutes,
        head_passes=head_passes(config, padded_vocab_size=base.padded_vocab_size),
    )


def _run_memory(config: RunConfig, base: _Base) -> RunMemory | None:
    """What --recompute auto decides by."""
    if config.training.recompute is None:
        return None
    data_parallel_size = parallel_state.get_data_parallel_world_size()
    return RunMemory(
        config=config,
        partition=base.partition,
        padded_vocab_size=base.padded_vocab_size,
        num_replicas=replicas.size(),
        num_microbatches=data.global_batch_size(config) // config.training.micro_batch_size // data_parallel_size,
    )


def _evaluator(
    config: RunConfig, base: _Base, forward_backward: ForwardBackward, reporter: Reporter, stop: StopRequests
) -> Evaluator:
    samples = evaluation_samples(config, base.tokenizer, forward_backward, reporter, should_stop=stop.is_signalled)
    return Evaluator(config, base.splits, forward_backward, reporter, stop, samples)


def _lr_scheduler(config: RunConfig) -> OptimizerParamScheduler:
    """Without an optimizer: each phase attaches its own."""
    return build_scheduler(config, SimpleNamespace(param_groups=[]), functools.partial(data.samples_after, config))


def _init_num_microbatches(config: RunConfig) -> None:
    init_num_microbatches_calculator(
        torch.distributed.get_rank(),
        list(config.training.rampup_batch_size or ()) or None,
        data.global_batch_size(config),
        config.training.micro_batch_size,
        parallel_state.get_data_parallel_world_size(),
    )


def _network_to_load(config: RunConfig, tokenizer: Tokenizer) -> Architecture | None:
    """The network of --load-hf. Raises ValueError if its embedding is too small for the tokenizer."""
    name = config.checkpoint.load_hf
    if name is None:
        return None
    network = folder.read_architecture(folder.locate(name, flag="--load-hf", weights=False))
    if tokenizer.vocab_size > network.vocab_size:
        raise ValueError(
            f"--load-hf {name} has an embedding for {network.vocab_size} ids, and the tokenizer has "
            f"{tokenizer.vocab_size}: give the model's own tokenizer"
        )
    return network


def tokenizer_of(config: RunConfig) -> Tokenizer:
    """The tokenizer of the run. Raises ValueError as `build_tokenizer`."""
    return build_tokenizer(**vars(config.tokenizer))
