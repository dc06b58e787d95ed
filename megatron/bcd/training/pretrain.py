"""From a RunConfig to the end of the process: groups, seeds, folders, the run, the exit code."""

from __future__ import annotations

import datetime
import gc
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from megatron.bcd import data
from megatron.bcd.arguments.validate import check_learning_rate
from megatron.bcd.checkpoint import layout, loader, run_state
from megatron.bcd.checkpoint.saver import check_save_folder, claim_save_folder, clear_save_folder
from megatron.bcd.config import RunConfig
from megatron.bcd.model import builder
from megatron.bcd.runtime import collectives, device, dir_claim, distributed, rng, threads
from megatron.bcd.runtime.exit import exit_on_error, report_to_torchrun, torchrun_store
from megatron.bcd.tokenizer import build_tokenizer
from megatron.bcd.trainer import ModelBuilder, Trainer
from megatron.bcd.training.state import TrainingFailed

_PATIENCE = datetime.timedelta(minutes=1)


def pretrain(
    config: RunConfig,
    build_model: ModelBuilder = builder.build_model,
    *,
    prog: str = "pretrain",
    notes: Sequence[str] = (),
) -> None:
    """Run `config` on all ranks that torchrun started, or without torchrun in this process.

    `build_model` makes the model of this rank's pipeline stage from the configuration, the padded vocabulary size and
    the kernels of this machine. `prog` begins every error message; `notes` are printed after the run summary.

    Exits with code 2, after one line from rank 0 and before any training, if data, files or machine don't fit; with
    code 1, after one line, if training can't continue. In training SIGINT (Ctrl-C),
    SIGTERM and SIGUSR1 save, stop and return.
    """
    with exit_on_error(ValueError, prog=prog):
        trainer, claims = _set_up(config, build_model, notes)
    try:
        with trainer.reporter:
            trainer.train()
    except TrainingFailed as error:
        report_to_torchrun(f"{prog}: error: {error}")
        if torch.distributed.get_rank() == 0:
            print(f"{prog}: error: {error}", file=sys.stderr, flush=True)
        torch.distributed.barrier()
        sys.exit(1)
    if not trainer.config.training.skip_train:
        trainer.end_phase(is_end_of_run=True)
    if trainer.groups is not None:
        trainer.groups.leave()
    torch.distributed.barrier()
    distributed.leave()
    # a program may train again: nothing of this run may stay
    del trainer
    gc.unfreeze()
    gc.collect()
    for claim in claims:
        claim.release()


def _set_up(
    config: RunConfig, build_model: ModelBuilder, notes: Sequence[str]
) -> tuple[Trainer, list[dir_claim.DirClaim]]:
    """A run that is about to train, and the folders that it has claimed."""
    if not device.has_cuda():
        notes = (threads.set_threads(), *notes)
    is_restart = _initialize(config)
    config = with_length(config)
    save_dir = config.checkpoint.save
    is_new = not collectives.on_rank_0(lambda: save_dir is not None and os.path.isdir(save_dir))
    is_shared = config.groups.lighthouse is not None  # by replica groups, of which one writes
    save_claim = dir_claim.DirClaim() if is_new or is_shared else claim_save_folder(save_dir)
    config = _resuming_after_restart(config, is_restart=is_restart)
    source = loader.find(config)
    if source is not None and source.state is not None:
        run_state.check_same_tokens(source.state.flags, config, source=source.name)
        config = run_state.with_saved_schedule(source.state.flags, config)
    overwrites = check_save_folder(config, source)
    trainer = Trainer(config, build_model, source=source, is_restart=is_restart)
    for note in notes:
        trainer.reporter.note(note)
    if is_new and not is_shared:  # created only after everything has been checked
        save_claim = claim_save_folder(save_dir)
    if overwrites and save_dir is not None:
        clear_save_folder(save_dir)
    cache = None if config.training.skip_train else config.bcd.bcd_prefix_cache
    cache_claim = dir_claim.claim(cache, flag="--bcd-prefix-cache", contents="prefix caches")
    for warning in (*save_claim.warnings, *cache_claim.warnings):
        trainer.reporter.warning(warning)
    if save_dir is None and config.checkpoint.save_hf is None and not config.training.skip_train:
        trainer.reporter.note("without --save nothing is kept of this run: neither weights nor a way to resume it")
    trainer.restore()
    return trainer, [save_claim, cache_claim]


def with_length(config: RunConfig) -> RunConfig:
    """`config` with --num-epochs as --train-iters. A collective; reads the data.

    Raises:
        ValueError: as `data.resolve_epochs`; or the learning rate's schedule does not fit that number of steps.
    """
    if config.training.num_epochs is None:
        return config
    tokenizer = build_tokenizer(**vars(config.tokenizer))
    config = data.resolve_epochs(config, tokenizer, global_batch_size=data.global_batch_size(config))
    check_learning_rate(config)
    return config


def _initialize(config: RunConfig) -> bool:
    """Deterministic kernels, process groups, random generators; returns as `distributed.initialize`."""
    training = config.training
    if config.transformer.get("deterministic_mode"):  # first: groups choose NCCL's algorithms when they are created
        rng.use_deterministic_algorithms()
    if config.optimizer.optimizer_cpu_offload and not device.has_cuda():
        raise ValueError(
            "--optimizer-cpu-offload needs a CUDA GPU, and none is visible here: leave it out (without a GPU all is in "
            "host memory anyway)"
        )
    is_restart = distributed.initialize(
        backend=training.distributed_backend,
        timeout_minutes=training.distributed_timeout_minutes,
        tensor_size=config.tensor_size,
        pipeline_size=config.pipeline_size,
        context_size=config.context_size,
        hierarchical_context_sizes=config.transformer.get("hierarchical_context_parallel_sizes"),
    )
    rng.seed_everything(training.seed, data_parallel_random_init=training.data_parallel_random_init)
    return is_restart


def _resuming_after_restart(config: RunConfig, *, is_restart: bool) -> RunConfig:
    """torchrun --max-restarts starts the same command again: once this job has saved, resume all that --save holds,
    whatever the flags of loading say, which were meant for its start. A collective.

    Until then they hold: --save may have checkpoints that --ckpt-step was to leave behind.
    """
    checkpoint = config.checkpoint
    if checkpoint.save is None:
        return config
    save = checkpoint.save
    has_saved = collectives.on_rank_0(lambda: _has_saved(save, torchrun_store(_PATIENCE)))
    if not (is_restart and has_saved):
        return config
    return config.replace_section(
        "checkpoint",
        load=checkpoint.save,
        finetune=False,
        ckpt_step=None,
        load_optim=checkpoint.save_optim,
        load_rng=checkpoint.save_rng,
    )


def _has_saved(save: str, store: Any) -> bool:
    """Whether the tracker of --save was written after this job's first start, of which `store` keeps what was there.

    Without a store that outlives restarts, whether there is a checkpoint: to start the run anew would lose more.
    """
    if store is None:
        return bool(layout.candidates(save))
    try:
        found = os.stat(os.path.join(save, layout.TRACKER))
        tracker = f"{found.st_mtime_ns} {found.st_ino} {found.st_size}"
    except FileNotFoundError:
        tracker = ""
    key = f"bcd/tracker at the first start: {os.path.realpath(save)}"
    if not store.check([key]):  # also where the starts before did not come this far, so saved nothing
        store.set(key, tracker)
    return bool(tracker) and store.get(key).decode() != tracker
