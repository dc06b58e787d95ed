"""Trains transformers' model with BAdam (PyPI `badam`) under the flags of a training script, as a method of a study.

    python studies/badam_peer.py FLAG ...

Same initial weights, samples, blocks, learning-rate schedule and evaluations as pretrain_gpt_bcd.py with these flags.
Optimizer and weight decay are BAdam's. It writes no checkpoint: --save and --load are accepted, and a run that is
killed starts again.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.append(os.path.join(sys.path[0], "tools"))

import torch
from _compare_export import job_of
from _compare_peer import Peer

from megatron.bcd import data
from megatron.bcd.arguments import FAMILY_DEFAULTS, parse_run_config
from megatron.bcd.config import RunConfig
from megatron.bcd.metrics.reporter import SilentReporter
from megatron.bcd.metrics.sinks import MetricsFile
from megatron.bcd.model.builder import build_model
from megatron.bcd.optim.lr_schedule import build_scheduler
from megatron.bcd.runtime import distributed, rng
from megatron.bcd.runtime.exit import exit_on_error
from megatron.bcd.trainer import Trainer

PROG = "studies/badam_peer.py"


@torch.no_grad()
def mean_loss(peer: Peer, batches: Iterator[data.Batch], count: int) -> float:
    """Per token, over the next microbatches."""
    peer.model.eval()
    total = 0.0
    for _ in range(count):
        batch = next(batches)
        labels = batch["labels"]
        total += float(peer.model(batch["tokens"], labels=labels, shift_labels=labels, use_cache=False).loss)
    peer.model.train()
    return total / count


def train(config: RunConfig, peer: Peer, splits: data.Splits, write: Any) -> None:
    """All steps and evaluations; `write` gets the lines of metrics."""
    training = config.training
    assert training.global_batch_size is not None, "the parser fills it in"
    schedule: dict[str, Any] = {}
    scheduler = build_scheduler(
        config, SimpleNamespace(param_groups=[schedule]), functools.partial(data.samples_after, config)
    )
    validation = data.batches(splits.validation, config, consumed_samples=0)
    count = training.eval_iters * training.global_batch_size // training.micro_batch_size

    def validation_loss() -> float:
        nonlocal validation
        if training.eval_fixed:
            validation = data.batches(splits.validation, config, consumed_samples=0)
        return mean_loss(peer, validation, count)

    def set_rate(new_samples: int) -> None:
        scheduler.step(new_samples)
        for group in peer.optimizer.param_groups:  # weight decay stays BAdam's
            group["lr"] = schedule["lr"]

    set_rate(0)
    iteration = 0
    for line in peer.run():
        iteration = line["iteration"]
        write(line)
        if iteration % training.eval_interval == 0:
            write({"iteration": iteration, "validation_loss": validation_loss()})
        set_rate(training.global_batch_size)
    test = data.batches(splits.test, config, consumed_samples=0)
    for split, loss in (("validation", validation_loss()), ("test", mean_loss(peer, test, count))):
        write({"iteration": iteration, f"{split}_loss": loss, "is_final": True})


def main(argv: Sequence[str]) -> None:
    with exit_on_error(ValueError, prog=PROG):
        config = parse_run_config(list(argv), prog=PROG, defaults=FAMILY_DEFAULTS["gpt"], world_size=1)
        config = config.replace_section("checkpoint", save=None, load=None, save_interval=None)
        if config.training.full_validation:
            raise ValueError("--full-validation does not go with another program: give --eval-fixed")
        if config.report.metrics_file is None:
            raise ValueError("--metrics-file is missing")
        metrics = MetricsFile(config.report.metrics_file, start_iteration=0)
        distributed.initialize(backend="auto", timeout_minutes=10, tensor_size=1, pipeline_size=1)
        rng.seed_everything(config.training.seed)
        components = Trainer(config, build_model, reporter=SilentReporter())
        job, tensors = job_of(components)
        splits = components.splits
        del components  # its model
        train(config, Peer(job, tensors), splits, metrics.write)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
