"""Full-parameter training with Megatron Core's parts only, in the order of stock Megatron-LM's training loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.num_microbatches_calculator import get_num_microbatches, init_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel_state import get_data_parallel_world_size
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megatron.bcd import data
from megatron.bcd.config import RunConfig, core_keywords
from megatron.bcd.model import builder, implementation, loss
from megatron.bcd.optim import lr_schedule
from megatron.bcd.runtime.compat import megatron_core
from megatron.bcd.tokenizer import build_tokenizer
from support import worlds


def forward_step(batches: Iterator[data.Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    """Run a forward step like stock Megatron-LM."""
    batch = next(batches)
    inputs = data.attention_inputs(batch)
    output = model(batch.get("tokens"), batch.get("position_ids"), labels=batch.get("labels"), **inputs)
    return output, functools.partial(loss.masked_loss, batch.get("loss_mask"))


def plain_training(config: RunConfig) -> dict[str, Any]:
    """Train without blocks and phases; return the losses and the last weights.

    With several chunks per stage it uses Megatron Core's interleaved schedule, and one DDP wrapper per chunk.
    """
    megatron_core.clear_router_losses()
    with worlds.parallel(config):
        training = config.training
        init_num_microbatches_calculator(
            torch.distributed.get_rank(),
            None,
            training.global_batch_size,
            training.micro_batch_size,
            get_data_parallel_world_size(),
        )
        tokenizer = build_tokenizer("ByteLevelTokenizer")
        splits = data.plan_splits(config, tokenizer, training.train_iters).build()
        model = builder.build_model(config, worlds.PADDED_VOCABULARY, implementation.available_implementation(config))
        model_config = get_model_config(model)
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=config.ddp.grad_reduce_in_fp32,  # stock's default with --bf16
        )
        wrapped = [
            DistributedDataParallel(config=model_config, ddp_config=ddp_config, module=module)
            for module in (builder.get_chunks(model) if config.num_chunks > 1 else [model])
        ]
        optimizer_config = OptimizerConfig(**core_keywords(config.optimizer), use_distributed_optimizer=True)
        optimizer = get_megatron_optimizer(optimizer_config, wrapped)
        scheduler = lr_schedule.build_scheduler(config, optimizer, functools.partial(data.samples_after, config))
        model_config.grad_scale_func = optimizer.scale_loss
        model_config.finalize_model_grads_func = finalize_model_grads
        batches = [data.batches(splits.train, config, consumed_samples=0) for _ in wrapped]
        if config.num_chunks > 1:
            # stock sets it for two stages, but it frees an output while gloo sends it, which crashes
            model_config.overlap_p2p_comm, model_config.batch_p2p_comm = True, False
            model_config.deallocate_pipeline_outputs = False
        losses = []
        for _ in range(training.train_iters):
            for module in wrapped:
                module.zero_grad_buffer()
            optimizer.zero_grad()
            per_microbatch = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=batches if config.num_chunks > 1 else batches[0],
                model=wrapped if config.num_chunks > 1 else wrapped[0],
                num_microbatches=get_num_microbatches(),
                seq_length=config.model.seq_length,
                micro_batch_size=training.micro_batch_size,
                forward_only=False,
            )
            optimizer.step()
            scheduler.step(training.global_batch_size)
            total, tokens, _ = loss.reduce_losses(per_microbatch)
            losses.append(total / tokens)
        return {"losses": losses, "weights": worlds.weights_of(model)}
