"""Build the scheduler of the learning rate and the weight decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.bcd.config import RunConfig


def build_scheduler(config: RunConfig, optimizer: Any, samples_after: Callable[[int], int]) -> OptimizerParamScheduler:
    """Build Megatron Core's scheduler from the flags.

    The scheduler counts samples; `samples_after` returns the number of samples after a number of iterations.
    Megatron-LM multiplies iterations by the global batch, and refuses --rampup-batch-size with --train-iters.
    """
    training, schedule = config.training, config.schedule
    if training.train_iters is not None:
        decay_iters, wsd_iters = schedule.lr_decay_iters or training.train_iters, schedule.lr_wsd_decay_iters
        decay_steps, wsd_steps = samples_after(decay_iters), None
        if wsd_iters is not None:
            wsd_steps = decay_steps - samples_after(max(0, decay_iters - wsd_iters))
        warmup_steps: float = samples_after(schedule.lr_warmup_iters)
        weight_decay_steps = samples_after(training.train_iters)
    else:
        decay_steps = schedule.lr_decay_samples or training.train_samples or 1
        wsd_steps, warmup_steps, weight_decay_steps = (
            schedule.lr_wsd_decay_samples,
            schedule.lr_warmup_samples,
            training.train_samples or 1,
        )
    if schedule.lr_warmup_fraction is not None:
        warmup_steps = schedule.lr_warmup_fraction * decay_steps
    weight_decay = config.optimizer.weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=config.optimizer.lr or 0.0,
        min_lr=config.optimizer.min_lr or 0.0,
        lr_warmup_steps=warmup_steps,  # type: ignore[arg-type]
        lr_decay_steps=decay_steps,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=weight_decay if schedule.start_weight_decay is None else schedule.start_weight_decay,
        end_wd=weight_decay if schedule.end_weight_decay is None else schedule.end_weight_decay,
        wd_incr_steps=weight_decay_steps,
        wd_incr_style=schedule.weight_decay_incr_style,
        wsd_decay_steps=wsd_steps,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
    )
