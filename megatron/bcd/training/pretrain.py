"""From a RunConfig to the end of the process: groups, seeds, folders, the run, the exit code."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch

from megatron.bcd import data
from megatron.bcd.checkpoint import loader, run_state
from megatron.bcd.checkpoint.saver import check_save_folder, claim_save_folder, clear_save_folder
from megatron.bcd.config import RunConfig
from megatron.bcd.metrics.reporter import Reporter
from megatron.bcd.metrics.silent import SilentReporter
from megatron.bcd.model import builder
from megatron.bcd.prefix_cache import folders as caches
from megatron.bcd.prefix_cache.serve import DamagedRecord
from megatron.bcd.runtime import device, dir_claim, distributed, rng, threads
from megatron.bcd.runtime.exit import exit_on_error
from megatron.bcd.training import fine_tuning, loop, restore
from megatron.bcd.training.setup import Components, ModelBuilder, setup
from megatron.bcd.training.state import TrainState
from megatron.bcd.training.train_step import TrainingFailed


def pretrain(
    config: RunConfig,
    build_model: ModelBuilder = builder.build_model,
    *,
    prog: str = "pretrain",
    notes: Sequence[str] = (),
) -> None:
    """Run `config` on all ranks that torchrun started, or without torchrun in this process.

    `build_model` makes the model of this rank's pipeline stage from the configuration, the padded vocabulary size and
    the kernels of this machine. `prog` begins every error message; `notes` are printed after the banner.

    Exits with code 2, after one line from rank 0 and before any training, if data, files or machine don't fit; with
    code 1, after one line, if training can't continue. In training SIGINT (Ctrl-C),
    SIGTERM and SIGUSR1 save, stop and return.
    """
    with exit_on_error(ValueError, prog=prog):
        if not device.has_cuda():
            notes = (threads.set_threads(), *notes)
        launch = _initialize(config)
        config = fine_tuning.with_length(config)
        save_dir = config.checkpoint.save
        is_new = not dir_claim.exists(save_dir)
        save_claim = dir_claim.DirClaim() if is_new else claim_save_folder(save_dir)
        config = _resuming_after_restart(config, launch)
        source = loader.find(config)
        if source is not None and source.state is not None:
            config = run_state.with_saved_schedule(source.state.flags, config)
        overwrites = check_save_folder(config, source)
        reporter = _reporter(config, source.state if source else None)
        components = setup(config, build_model, reporter, source=source, is_restart=launch.is_restart)
        for note in notes:
            reporter.note(note)
        if is_new:  # created only after everything has been checked
            save_claim = claim_save_folder(save_dir)
        if overwrites and save_dir is not None:
            clear_save_folder(save_dir)
        cache_claim = claim_prefix_cache(None if config.training.skip_train else config.bcd.bcd_prefix_cache)
        for warning in (*save_claim.warnings, *cache_claim.warnings):
            reporter.warning(warning)
        if save_dir is None and config.checkpoint.save_hf is None and not config.training.skip_train:
            reporter.note("without --save nothing is kept of this run: neither weights nor a way to resume it")
        start = restore.start_evaluation if config.training.skip_train else restore.start
        state = start(components, source)
    _run(components, state, prog=prog)
    # a program may train again: nothing of this run may stay
    del components, state
    gc.unfreeze()
    gc.collect()
    save_claim.release()
    cache_claim.release()


def _run(components: Components, state: TrainState, *, prog: str) -> None:
    """Train, end the phase, and leave the process groups; on an error end the process."""
    try:
        with components.reporter:
            loop.run(components, state)
    except DamagedRecord as error:  # on this rank alone: the others wait in a collective until torchrun ends them
        print(f"{prog}: error: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)
    except TrainingFailed as error:
        if torch.distributed.get_rank() == 0:
            print(f"{prog}: error: {error}", file=sys.stderr, flush=True)
        torch.distributed.barrier()
        sys.exit(1)
    if not components.config.training.skip_train:
        components.phase.exit()
    torch.distributed.barrier()
    distributed.leave()


def _initialize(config: RunConfig) -> distributed.Launch:
    """Deterministic kernels, process groups, random generators."""
    training = config.training
    if config.transformer.get("deterministic_mode"):  # first: groups choose NCCL's algorithms when they are created
        rng.use_deterministic_algorithms()
    if config.optimizer.optimizer_cpu_offload:
        device.check_can_offload()
    launch = distributed.initialize(
        backend=training.distributed_backend,
        timeout_minutes=training.distributed_timeout_minutes,
        tensor_size=config.tensor_size,
        pipeline_size=config.pipeline_size,
        context_size=config.context_size,
        hierarchical_context_sizes=config.transformer.get("hierarchical_context_parallel_sizes"),
        cpu_kernels=training.cpu_kernels,
    )
    rng.seed_everything(training.seed, data_parallel_random_init=training.data_parallel_random_init)
    return launch


def claim_prefix_cache(root: str | None) -> dir_claim.DirClaim:
    """See `dir_claim.claim`. A collective."""
    return dir_claim.claim(root, flag="--bcd-prefix-cache", contents="prefix caches", clean=caches.clean_leftovers)


def _resuming_after_restart(config: RunConfig, launch: distributed.Launch) -> RunConfig:
    """torchrun --max-restarts starts the same command again: resume all that --save holds, whatever the flags of
    loading say, which were meant for the first start."""
    checkpoint = config.checkpoint
    if checkpoint.save is None or not launch.is_restart or not loader.has_checkpoint(checkpoint.save):
        return config
    return config.replace_section(
        "checkpoint",
        load=checkpoint.save,
        finetune=False,
        ckpt_step=None,
        load_optim=checkpoint.save_optim,
        load_rng=checkpoint.save_rng,
    )


def _reporter(config: RunConfig, resumed: run_state.RunState | None) -> Reporter:
    report = config.report
    if torch.distributed.get_rank() != 0:
        return SilentReporter()
    return Reporter(
        train_iters=data.num_iterations(config),
        start_iteration=resumed.iteration if resumed else 0,
        run=run_state.name_of_run(config, resumed),
        metrics_file=report.metrics_file,
        tensorboard_dir=report.tensorboard_dir,
        wandb_project=report.wandb_project,
        wandb_exp_name=report.wandb_exp_name,
        wandb_entity=report.wandb_entity,
        wandb_save_dir=report.wandb_save_dir,
        run_config=asdict(config),
        timing_log_option=report.timing_log_option,
        straggler_minmax_count=report.straggler_minmax_count,
        log_timers_to_tensorboard=report.log_timers_to_tensorboard,
    )
