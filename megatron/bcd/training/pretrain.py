"""Run a RunConfig in this process: groups, seeds, folders, training, exit code."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

import torch

from megatron.bcd.checkpoint import loader, run_state
from megatron.bcd.checkpoint.saver import check_save_folder, claim_save_folder
from megatron.bcd.config import RunConfig
from megatron.bcd.model import builder
from megatron.bcd.runtime import collectives, device, dir_claim, distributed, rng, threads
from megatron.bcd.runtime.exit import exit_on_error, report_to_torchrun
from megatron.bcd.trainer import ModelBuilder, Trainer
from megatron.bcd.training.resolve import resolve_run
from megatron.bcd.training.state import TrainingFailed


def pretrain(
    config: RunConfig,
    build_model: ModelBuilder = builder.build_model,
    *,
    prog: str = "pretrain",
    notes: Sequence[str] = (),
) -> None:
    """Train `config` on all ranks that torchrun started, or in this process without torchrun.

    SIGINT (Ctrl-C), SIGTERM and SIGUSR1 during training save, stop and return.

    Args:
        build_model: builds the model of this rank's pipeline stage from the configuration, the padded vocabulary size
            and the kernels of this machine.
        prog: the start of every error message.
        notes: lines that follow the run summary.

    Raises:
        SystemExit: code 2 after one line from rank 0 if data, files or machine don't fit, before any training; code 1
            after one line if training can't continue.
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
    """Return a run that is about to train, and the folders that it has claimed."""
    if not device.has_cuda():
        notes = (threads.set_threads(), *notes)
    _initialize(config)
    save_dir = config.checkpoint.save
    is_new = not collectives.on_rank_0(lambda: save_dir is not None and os.path.isdir(save_dir))
    is_shared = config.groups.lighthouse is not None  # replica groups share the folder, and one of them writes
    save_claim = dir_claim.DirClaim() if is_new or is_shared else claim_save_folder(save_dir)
    source = loader.find(config)
    if source is not None and source.state is not None:
        run_state.check_same_tokens(source.state.flags, config, source=source.name)
    check_save_folder(config, source)
    trainer = Trainer(resolve_run(config, source), build_model)
    for note in notes:
        trainer.reporter.note(note)
    if is_new and not is_shared:  # created only after everything has been checked
        save_claim = claim_save_folder(save_dir)
    cache = None if config.training.skip_train else config.bcd.bcd_prefix_cache
    cache_claim = dir_claim.claim(cache, flag="--bcd-prefix-cache", contents="prefix caches")
    for warning in (*save_claim.warnings, *cache_claim.warnings):
        trainer.reporter.warning(warning)
    if save_dir is None and config.checkpoint.save_hf is None and not config.training.skip_train:
        trainer.reporter.note("without --save nothing is kept of this run: neither weights nor a way to resume it")
    trainer.restore()
    return trainer, [save_claim, cache_claim]


def _initialize(config: RunConfig) -> None:
    """Set kernels of matrix products, and initialize process groups and random generators."""
    training = config.training
    if config.transformer.get("deterministic_mode"):  # first: groups choose NCCL's algorithms when they are created
        rng.use_deterministic_algorithms()
    device.set_fp16_accumulation(training.fp16_accumulation)
    if config.optimizer.optimizer_cpu_offload and not device.has_cuda():
        raise ValueError(
            "--optimizer-cpu-offload: no CUDA GPU is visible. Leave it out; without a GPU everything is in host memory."
        )
    distributed.initialize(
        backend=training.distributed_backend,
        timeout_minutes=training.distributed_timeout_minutes,
        tensor_size=config.tensor_size,
        pipeline_size=config.pipeline_size,
        context_size=config.context_size,
        hierarchical_context_sizes=config.transformer.get("hierarchical_context_parallel_sizes"),
        expert_size=config.expert_size,
        expert_tensor_size=config.expert_tensor_size,
    )
    rng.seed_everything(training.seed)
