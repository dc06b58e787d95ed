"""--recompute auto and --pipeline-cut auto keep fewer activations and change nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support import worlds
from support.dist import World

from megatron.bcd.blocks.partition import partition_from_config
from megatron.bcd.config import RunConfig
from megatron.bcd.model.builder import unwrap_model
from megatron.bcd.planner.run_state import RunMemory, model_state_of

Flags = Callable[..., dict[str, Any]]
AUTO = {"recompute": "auto"}


def test_a_phase_leaves_nothing_in_what_recomputes(world2: World, initial_weights: Flags) -> None:
    """With --recompute auto the losses stay the same when a block is visited again."""
    flags = initial_weights(bcd_num_blocks=2) | {"overlap_grad_reduce": True, "bcd_steps_per_block": 1}
    flags |= {"train_iters": 4, "eval_iters": 0}
    plain = world2.run(worlds.train_run, worlds.run_config(world_size=2, **flags))
    config = worlds.run_config(world_size=2, **flags | AUTO | {"recompute_memory_gib": 1.5e-3})
    again = world2.run(worlds.train_run, config)
    assert [rank["losses"] for rank in again] == [rank["losses"] for rank in plain]


def recomputed(config: RunConfig) -> list[tuple[int | None, int | None]]:
    """Return the block and the number of recomputed layers of each training pass."""
    told: list[tuple[int | None, int | None]] = []

    def tell(run: worlds.RecordedRun) -> None:
        told.append((run.active.block, unwrap_model(run.model).decoder.config.recompute_num_layers))

    with worlds.parallel(config):
        worlds.RecordedRun(config, after_schedule=tell).train()
    return told


def test_each_block_recomputes_its_own_number_of_layers(world1: World, text_data: str) -> None:
    """Every phase of a block recomputes the number of layers that was found for it."""
    [told] = world1.run(recomputed, worlds.run_config(data_path=text_data, recompute_memory_gib=1.1e-3, **AUTO))
    numbers = dict(told[:3])
    assert sorted(numbers) == [0, 1, 2] and len(set(numbers.values())) > 1, "blocks must differ"
    assert all(number == numbers[block] for block, number in told)


def test_the_full_batch_counts(world2: World, text_data: str) -> None:
    """On a ramp --recompute auto plans for the full batch from the first step on."""
    flags = {"data_path": text_data, "pipeline_model_parallel_size": 2, "world_size": 2, "bcd_num_blocks": 1} | AUTO
    flags |= {"recompute_memory_gib": 1.1e-3, "train_iters": 1, "micro_batch_size": 2, "global_batch_size": 16}
    configs = (worlds.run_config(**flags, **ramp) for ramp in ({}, {"rampup_batch_size": (2, 2, 64)}))
    whole, ramped = ([ranks[0] for ranks in world2.run(recomputed, config)] for config in configs)
    assert whole == ramped and any(number for _, number in whole)


@pytest.mark.parametrize(("asked", "counted"), [(None, 1), (3, 3), (9, 4)])
def test_the_run_ahead_counts(asked: int | None, counted: int) -> None:
    """The planned memory counts the run-ahead messages that --bcd-run-ahead allows, at most those of an iteration."""
    flags = {"pipeline_model_parallel_size": 2, "world_size": 2, "bcd_layout": "stage", "bcd_num_blocks": None}
    config = worlds.run_config(data_path="text", bcd_run_ahead=asked, **flags)
    partition = partition_from_config(config)
    state = model_state_of(config, partition, padded_vocab_size=264, num_replicas=1)
    run = RunMemory(config=config, state=state, num_microbatches=4)
    assert [run.activations(0, block).shape.run_ahead for block in (0, 1)] == [0, counted]
