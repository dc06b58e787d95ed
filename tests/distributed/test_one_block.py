"""Invariant 1: one block that covers everything is plain full-parameter training, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.num_microbatches_calculator import get_num_microbatches, init_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel_state import get_data_parallel_world_size
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from support import worlds
from support.dist import World
from support.kernels import with_cpu_kernels

from megatron.bcd import data
from megatron.bcd.config import RunConfig, core_keywords
from megatron.bcd.model import builder, implementation, loss
from megatron.bcd.optim import lr_schedule
from megatron.bcd.tokenizer import build_tokenizer

CUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "data2": {"world_size": 2},
    "data2_plain_optimizer": {"world_size": 2, "no_use_distributed_optimizer": True},
    "tensor2": {"world_size": 2, "tensor_model_parallel_size": 2},
    "pipeline2": {"world_size": 2, "pipeline_model_parallel_size": 2},
}


def plain_training(config: RunConfig) -> dict[str, Any]:
    """Megatron Core's own pieces in the order of its training loop; nothing of blocks, phases or the active set."""
    with worlds.parallel(config):
        training = config.training
        init_num_microbatches_calculator(
            torch.distributed.get_rank(),
            None,
            training.global_batch_size,
            training.micro_batch_size,
            get_data_parallel_world_size(),
        )
        splits = data.build_splits(
            config,
            data.plan_splits(
                config, build_tokenizer("ByteLevelTokenizer"), training.train_iters, least_steps_per_cycle=1
            ),
        )
        model = builder.build_model(config, worlds.PADDED_VOCABULARY, implementation.implementation_here(config))
        is_sharded = training.use_distributed_optimizer
        wrapped = DistributedDataParallel(
            config=get_model_config(model),
            ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=is_sharded),
            module=model,
        )
        optimizer = get_megatron_optimizer(
            OptimizerConfig(**{**core_keywords(config.optimizer), "use_distributed_optimizer": is_sharded}), [wrapped]
        )
        scheduler = lr_schedule.build_scheduler(config, optimizer, training.global_batch_size)
        model_config = get_model_config(model)
        model_config.grad_scale_func = optimizer.scale_loss
        model_config.finalize_model_grads_func = finalize_model_grads
        batches = data.batches(splits.train, config, consumed_samples=0)
        losses = []
        for _ in range(training.train_iters):
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            per_microbatch = get_forward_backward_func()(
                forward_step_func=loss.forward_step,
                data_iterator=batches,
                model=wrapped,
                num_microbatches=get_num_microbatches(),
                seq_length=config.model.seq_length,
                micro_batch_size=training.micro_batch_size,
                forward_only=False,
            )
            optimizer.step()
            scheduler.step(training.global_batch_size)
            total, tokens = loss.reduce_losses(per_microbatch).tolist()
            losses.append(total / tokens)
        return {"losses": losses, "weights": worlds.weights_of(model)}


@pytest.mark.parametrize(("cut", "kernels"), with_cpu_kernels(CUTS, megatron=("one", "data2")))
def test_one_block_is_plain_training(
    worlds_of: dict[str, tuple[World, World]], text_data: str, cut: str, kernels: str
) -> None:
    """Anything of block coordinate descent that touches full-parameter training: order, groups, rebuilds, divisors."""
    flags = {"data_path": text_data, "bcd_num_blocks": 1, "bcd_steps_per_block": 2, "lr_warmup_iters": 2} | CUTS[cut]
    config = worlds.run_config(**flags | {"cpu_kernels": kernels})
    world = worlds_of[kernels][flags.get("world_size", 1) - 1]
    ours, plain = world.run(worlds.train_run, config), world.run(plain_training, config)
    assert ours[0]["losses"][-1] < ours[0]["losses"][0] - 0.5, "nothing was learnt: nothing would be compared"
    for mine, other in zip(ours, plain, strict=True):
        assert mine["losses"] == other["losses"]
        assert worlds.same_bits(mine["weights"], other["weights"]) == []


def run_and_watch_builds(config: RunConfig) -> dict[str, Any]:
    """Identity of the optimizer and its step count (Adam's own) after each step."""
    seen: list[tuple[int, float]] = []

    def look(one: worlds.RecordedRun) -> None:
        inner = one.active.optimizer.chained_optimizers[0].optimizer
        seen.append((id(one.active.optimizer), float(next(iter(inner.state.values()))["step"])))

    with worlds.started(config, after_step=look) as one:
        one.run()
        return {"seen": seen, **worlds.outcome(one)}


def test_the_same_block_again_rebuilds_nothing(world1: World, text_data: str) -> None:
    """A phase of a single block that throws the moments away: training restarts Adam without a reason."""
    flags = {"data_path": text_data, "bcd_num_blocks": 1, "bcd_steps_per_block": 2}
    outcome = world1.run(run_and_watch_builds, worlds.run_config(**flags))[0]
    assert len({identity for identity, _ in outcome["seen"]}) == 1
    assert [step for _, step in outcome["seen"]] == [1, 2, 3, 4, 5, 6]
    assert [step["phase"] for step in outcome["steps"]] == [0, 0, 1, 1, 2, 2]
    assert outcome["switches"] == []


def test_another_block_starts_with_fresh_moments(world1: World, text_data: str) -> None:
    """An optimizer that outlives its phase and steps on the moments of other layers."""
    flags = {"data_path": text_data, "bcd_num_blocks": 3, "bcd_steps_per_block": 2}
    outcome = world1.run(run_and_watch_builds, worlds.run_config(**flags))[0]
    assert [step for _, step in outcome["seen"]] == [1, 2, 1, 2, 1, 2]
    assert outcome["switches"] == [2, 4]
