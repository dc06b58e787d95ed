"""Build the Megatron Core objects of a phase: the DDP wrapper with its buffers, and the optimizer."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import replace

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.utils import get_model_config

from megatron.bcd.config import RunConfig, core_keywords
from megatron.bcd.optim.low_bit_adam import LowBitAdam
from megatron.bcd.optim.param_shard import ALWAYS_ACTIVE, chained_optimizers, param_shards
from megatron.bcd.runtime import memory, replicas
from megatron.bcd.runtime.device import DTYPES


def wrap_model(model: torch.nn.Module, config: RunConfig) -> DistributedDataParallel:
    """Wrap the model in Megatron Core's DDP, with buffers for the parameters that require a gradient."""
    ddp = config.ddp
    bucket_size = ddp.bucket_size or max(40_000_000, 1_000_000 * replicas.size())
    ddp_config = DistributedDataParallelConfig(
        **{**core_keywords(ddp), "bucket_size": bucket_size if ddp.overlap_grad_reduce else None}
    )
    return DistributedDataParallel(config=get_model_config(model), ddp_config=ddp_config, module=model)


def build_optimizer(
    wrapped: DistributedDataParallel, config: RunConfig, *, always_active: Iterable[torch.nn.Parameter]
) -> MegatronOptimizer:
    """Build Megatron Core's optimizer of the parameters that require a gradient.

    Always-active parameters are stepped more often than any block. They get separate groups, because fused
    optimizers count steps by group.
    """
    settings = config.optimizer
    if config.is_muon:  # `matrix_optimizer` steps Muon's matrices
        settings = replace(settings, optimizer="adam")
    keywords = core_keywords(settings)
    if config.is_precision_aware:
        exp_avg, exp_avg_sq = (DTYPES[dtype] for dtype in config.moment_dtypes)
        keywords |= {
            "use_precision_aware_optimizer": True,
            "store_param_remainders": True,
            "main_grads_dtype": DTYPES["fp32" if config.ddp.grad_reduce_in_fp32 else "bf16"],
            "exp_avg_dtype": exp_avg,
            "exp_avg_sq_dtype": exp_avg_sq,
        }
    optimizer_config = OptimizerConfig(**keywords, params_dtype=DTYPES[config.precision])
    overrides = get_standard_config_overrides(optimizer_config)
    for parameter in always_active:
        setattr(parameter, ALWAYS_ACTIVE, True)
        overrides[ParamKey(attr=ALWAYS_ACTIVE)] = {ALWAYS_ACTIVE: True}
    optimizer = get_megatron_optimizer(optimizer_config, [wrapped], config_overrides=overrides)
    if optimizer_config.optimizer_cpu_offload:
        # Megatron Core builds two optimizers and drops the first, whose hooks form a reference cycle
        gc.collect()
        memory.release_cached_memory()
    for each in chained_optimizers(optimizer):
        if config.training.adam_moments_dtype != "fp32" and each.optimizer is not None:
            shards = param_shards([each], dict(wrapped.module.named_parameters()))
            each.optimizer = LowBitAdam(
                each.optimizer.param_groups,
                starts={shard.stepped: shard.start for shard in shards.values()},
                dtype=config.training.adam_moments_dtype,
                decoupled_weight_decay=config.optimizer.decoupled_weight_decay,
            )
        if not each.get_parameters():
            each.is_stub_optimizer = True  # this rank steps nothing, but it joins every reduction
    return optimizer
