"""Compute the number of training steps, and the number of sequences that the run draws."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megatron.core import parallel_state

from megatron.bcd.config import RunConfig


def global_batch_size(config: RunConfig) -> int:
    """Return the number of sequences per step: --global-batch-size, or one microbatch per data-parallel rank."""
    return config.training.global_batch_size or (
        config.training.micro_batch_size * parallel_state.get_data_parallel_world_size()
    )


def num_iterations(config: RunConfig) -> int:
    """Return the number of training steps. With --train-samples, an incomplete last batch is dropped as in stock.

    Raises:
        ValueError: --train-samples holds no full global batch.
    """
    training = config.training
    if training.train_iters is not None or training.skip_train:
        return training.train_iters or 0
    samples, full_batch = training.train_samples or 0, global_batch_size(config)
    consumed = iterations = 0
    for batch in _ramp(config):
        if consumed + batch > samples:
            break
        consumed += batch
        iterations += 1
    iterations += max(0, samples - consumed) // full_batch
    if iterations < 1:
        raise ValueError(f"--train-samples {samples}: is less than one global batch of {full_batch}. Give more.")
    return iterations


def samples_after(config: RunConfig, iterations: int) -> int:
    """Return the number of sequences in the first `iterations` steps, including the ramp of --rampup-batch-size."""
    ramp = list(itertools.islice(_ramp(config), iterations))
    return sum(ramp) + (iterations - len(ramp)) * global_batch_size(config)


def batch_size_after(config: RunConfig, consumed: int) -> int:
    """Return the number of sequences in the step after `consumed` ones, by stock's --rampup-batch-size."""
    full, ramp = global_batch_size(config), config.training.rampup_batch_size
    if not ramp or consumed > ramp[2] or ramp[0] == full:
        return full
    start, increment, samples = ramp
    return start + increment * int(consumed / (samples / ((full - start) // increment)))  # stock's rounding


def _ramp(config: RunConfig) -> Iterator[int]:
    """Yield the batch size of each training step until the ramp of --rampup-batch-size ends."""
    consumed = 0
    while config.training.rampup_batch_size and consumed <= config.training.rampup_batch_size[2]:
        batch_size = batch_size_after(config, consumed)
        yield batch_size
        consumed += batch_size


def num_samples(config: RunConfig, train_iters: int) -> tuple[int, int | None, int]:
    """Return the number of sequences drawn from the training, validation and test splits; None means one pass.

    The numbers equal those of stock Megatron-LM, because they determine the order of the samples. With --eval-fixed
    they do not depend on the run's length, so every run (also with --skip-train) evaluates the same samples.
    """
    training = config.training
    batch = global_batch_size(config)
    train = (training.train_samples or train_iters * batch) * config.groups.replica_groups
    if training.full_validation:
        return train, None, training.eval_iters * batch
    is_alike = training.skip_train or training.eval_fixed
    evaluations = 1 if is_alike else train_iters // training.eval_interval + 1
    return train, evaluations * training.eval_iters * batch, training.eval_iters * batch
