"""Build the DDP wrapper and optimizer of a phase, and the matrix optimizer with its rules."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.utils import get_model_config

from megatron.bcd.blocks.ownership import Ownership, sharing_group
from megatron.bcd.blocks.partition import Partition
from megatron.bcd.config import RunConfig, core_keywords
from megatron.bcd.model.builder import get_host_layers
from megatron.bcd.model.host_layers import LOW_BITS
from megatron.bcd.optim import update_rules
from megatron.bcd.optim.low_bit_adam import LowBitAdam
from megatron.bcd.optim.matrix import FACTORS, MOMENTS, MatrixRule, Rules
from megatron.bcd.optim.matrix_optimizer import MatrixOptimizer
from megatron.bcd.optim.param_shard import ALWAYS_ACTIVE
from megatron.bcd.optim.parameters import ParametersByBlock
from megatron.bcd.optim.state import MOMENTUM
from megatron.bcd.optim.update_rules import MatrixLayout
from megatron.bcd.runtime import memory, packages, replicas
from megatron.bcd.runtime.compat import megatron_core, pytorch
from megatron.bcd.runtime.device import DTYPES


class CopyingDDP(DistributedDataParallel):
    """Megatron Core's DDP that copies the first gradient of a step into its buffer, and does not add it to zeros.

    This saves two of four reads and writes of the gradients. Those of vectors wait for the microbatch's others: one
    kernel adds them all. Not for layers that add gradients to it themselves.
    """

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._without_gradient: set[torch.nn.Parameter] = set()
        self._waiting: dict[Any, torch.Tensor] = {}
        copy: Any = weakref.WeakMethod(self._take)  # the garbage collector sees no cycle through a hook
        self.handles = [
            each.register_post_accumulate_grad_hook(lambda parameter: copy()(parameter))
            for each in self.params_with_grad
        ]

    def _take(self, parameter: Any) -> None:
        is_first = parameter in self._without_gradient
        waits = parameter.dim() == 1 and not self.ddp_config.overlap_grad_reduce  # which reduces behind the last one
        # Megatron Core's hook comes next, and adds the gradient if False
        parameter.grad_added_to_main_grad = is_first or waits
        if waits:
            if parameter in self._waiting:
                self._add_waiting()
            self._waiting[parameter] = parameter.grad
        elif is_first:
            parameter.main_grad.copy_(parameter.grad)
            self._without_gradient.remove(parameter)

    def _add_waiting(self) -> None:
        for is_first in (True, False):
            chosen = [each for each in self._waiting if (each in self._without_gradient) == is_first]
            sums, gradients = [each.main_grad for each in chosen], [self._waiting[each] for each in chosen]
            if not chosen:
                continue
            if not is_first and gradients[0].dtype != sums[0].dtype:  # kernels add tensors of one dtype
                pytorch.copy_each(wide := [torch.empty_like(each) for each in sums], gradients)
                gradients = wide
            (pytorch.copy_each if is_first else pytorch.add_each)(sums, gradients)
        self._without_gradient.difference_update(self._waiting)
        self._waiting.clear()

    def zero_grad_buffer(self) -> None:
        """Prepare a step. The buffers keep the last step's gradients until new ones replace them.

        Megatron Core always adds a gradient with `zero_out_wgrad`, of a tied embedding.
        """
        self._waiting.clear()
        self._without_gradient = {each for each in self.params_with_grad if not hasattr(each, "zero_out_wgrad")}
        for parameter in self.params_with_grad:
            if parameter not in self._without_gradient:
                parameter.main_grad.zero_()
        for group in [*self.bucket_groups, *self.expert_parallel_bucket_groups]:
            group.reset()

    def start_grad_sync(self, *unused: Any) -> None:
        """Start to reduce the gradients. A collective."""
        self._complete()
        super().start_grad_sync(*unused)

    def finish_grad_sync(self, **keywords: Any) -> None:
        """Wait until the gradients are reduced. A collective."""
        self._complete()
        super().finish_grad_sync(**keywords)

    def _complete(self) -> None:
        self._add_waiting()
        for parameter in self._without_gradient:
            parameter.main_grad.zero_()
        self._without_gradient.clear()


def wrap_model(model: torch.nn.Module, config: RunConfig) -> DistributedDataParallel:
    """Wrap the model in Megatron Core's DDP, with buffers for the parameters that require a gradient."""
    ddp = config.ddp
    bucket_size = ddp.bucket_size or max(40_000_000, 1_000_000 * replicas.size())
    ddp_config = DistributedDataParallelConfig(
        **{**core_keywords(ddp), "bucket_size": bucket_size if ddp.overlap_grad_reduce else None},
        use_distributed_optimizer=True,
    )
    model_config = get_model_config(model)
    is_grouped = config.num_experts and config.transformer["moe_grouped_gemm"]  # then experts add their gradients
    layers_add = model_config.gradient_accumulation_fusion or is_grouped
    build: type = DistributedDataParallel if layers_add else CopyingDDP
    return build(config=model_config, ddp_config=ddp_config, module=model)


def build_optimizer(
    wrapped: DistributedDataParallel, config: RunConfig, *, always_active: Iterable[torch.nn.Parameter]
) -> MegatronOptimizer:
    """Build Megatron Core's optimizer of the parameters that require a gradient.

    Always-active parameters are stepped more often than any block. They get separate groups, because fused
    optimizers count steps by group.
    """
    settings = config.optimizer
    if config.is_muon:  # `matrix_optimizer` steps Muon's matrices
        settings = config.replace_section("optimizer", optimizer="adam").optimizer
    optimizer_config = OptimizerConfig(
        **core_keywords(settings),
        params_dtype=DTYPES[config.precision],
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=settings.optimizer_cpu_offload,  # as in stock, offload is a variant of it
    )
    overrides = get_standard_config_overrides(optimizer_config)
    for parameter in always_active:
        setattr(parameter, ALWAYS_ACTIVE, True)
        overrides[ParamKey(attr=ALWAYS_ACTIVE)] = {ALWAYS_ACTIVE: True}
    optimizer = get_megatron_optimizer(optimizer_config, [wrapped], config_overrides=overrides)
    if optimizer_config.optimizer_cpu_offload:
        # Megatron Core builds two optimizers and drops the first, whose hooks form a reference cycle
        gc.collect()
        memory.release_cached_memory()
    for each in getattr(optimizer, "chained_optimizers", []):
        if config.training.adam_moments_dtype != "fp32" and each.optimizer is not None:
            decoupled = config.optimizer.decoupled_weight_decay
            each.optimizer = LowBitAdam(each.optimizer.param_groups, decoupled_weight_decay=decoupled)
        megatron_core.retain_shard_gradients(each)
        if not each.get_parameters():
            each.is_stub_optimizer = True  # this rank steps nothing, but it joins every reduction
    return optimizer


def build_matrix_optimizer(
    config: RunConfig, model: torch.nn.Module, parameters: ParametersByBlock, passes: Partition | None
) -> MatrixOptimizer:
    """Build the optimizer of this stage's matrices. `passes` is what breadth-first order runs at once."""
    if not config.has_matrix_optimizer:
        return MatrixOptimizer({}, group=replicas.group(), is_used=False)
    model_config, settings = get_model_config(model), config.optimizer
    heads, groups, width = model_config.num_attention_heads, model_config.num_query_groups, model_config.kv_channels
    assert groups is not None and width is not None
    matrices = parameters.matrices()
    qkv_parts = (heads // groups * width, width, width)

    def layout_of(name: str, parameter: torch.nn.Parameter) -> MatrixLayout:
        tensor_group = replicas.tensor_group(parameter)
        is_qkv = settings.muon_split_qkv and name.endswith("linear_qkv.weight")
        dim = getattr(parameter, "partition_dim", -1)  # Megatron Core's: -1 where each rank has all of it
        is_sliced = tensor_group.size() > 1 and dim >= 0
        return MatrixLayout(
            parts=qkv_parts if is_qkv and parameter.shape[0] % sum(qkv_parts) == 0 else (),
            sharded_dim=dim if is_sliced else None,
            group=tensor_group if is_sliced else None,
            tensor_mode=settings.muon_tp_mode,
            is_gram_iterated=config.bcd.muon_gram_iteration,
        )

    return MatrixOptimizer(
        {name: (parameter, layout_of(name, parameter)) for name, parameter in matrices.items()},
        group=replicas.group(),
        groups={name: _groups(config, parameters.ownership(name)) for name in matrices},
        sharing_groups={
            name: sharing_group(parameters.ownership(name), passes, has_moments=not config.is_muon) for name in matrices
        },
        offloads_low_bits=config.bcd.bcd_inactive_update == "none",  # only Muon's own blocks step the matrices
        moments_dtype=DTYPES[config.bcd.muon_momentum_dtype if config.is_muon else config.training.adam_moments_dtype],
        has_signed_squares=_steps_adam_by_chunk(config),
        overlaps_reduction=config.ddp.overlap_grad_reduce,
        max_norm=config.optimizer.clip_grad if config.clips_matrices else 0.0,
        places=get_host_layers(model).places,
        is_compiled=packages.compiles(config.bcd.bcd_compile),
        stage_group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        pipeline_group=(
            parallel_state.get_pipeline_model_parallel_group()
            if config.is_breadth_first and config.pipeline_size > 1
            else None
        ),
    )


def _groups(config: RunConfig, owned: Ownership) -> dict[str, tuple[str, int | None]]:
    """Return `Matrix.groups` of a matrix. With updates by chunk, Adam's moments and main parameters are one group."""
    block, groups = owned.block, dict[str, tuple[str, int | None]]()
    if block is not None:
        groups |= {MOMENTUM: (f"momentum {block}", block)} if config.is_muon else {MOMENTS: (str(block), block)}
    is_with_moments = _steps_adam_by_chunk(config) and block is not None
    groups[LOW_BITS] = (str(block), block) if is_with_moments else ("matrices", None)
    if owned.module != "layer":
        groups[FACTORS] = "factored embedding", None
    elif owned.inactive_updates_in and config.bcd.bcd_inactive_update == update_rules.FACTORED:
        groups[FACTORS] = f"factored {'no block' if block is None else block}", None
    return groups


def phase_rules(config: RunConfig, parameters: ParametersByBlock, block: int) -> Rules:
    """Return the matrices that the matrix optimizer steps in a phase, with their rules.

    These are the matrices of the block and of inactive layers, and the embedding and the head with rule `factored`.
    """
    if not config.has_matrix_optimizer:
        return []
    bcd, settings = config.bcd, config.optimizer
    assert bcd.bcd_inactive_lr_ratio is not None, "arguments.derive sets the default of the rule"
    no_state = MatrixRule(
        name=bcd.bcd_inactive_update,
        scale=bcd.bcd_inactive_lr_ratio,
        grad_dtype=DTYPES[bcd.bcd_inactive_grad_dtype],
        num_steps=settings.muon_num_ns_steps,
    )
    embedding = replace(no_state, name=bcd.bcd_embedding_update, scale=1.0)
    rules: Rules = [
        (no_state, parameters.inactive_updates_in(block), False),
        (embedding, parameters.outside_layers(), False),
    ]
    if config.is_muon:
        rule = MatrixRule(
            name=update_rules.ORTHOGONAL,
            scale=settings.muon_extra_scale_factor,
            grad_dtype=DTYPES[bcd.muon_grad_dtype],
            momentum=settings.muon_momentum,
            is_by_chunk=config.steps_block_by_chunk,
            nesterov=settings.muon_use_nesterov,
            num_steps=settings.muon_num_ns_steps,
        )
    else:
        adam = {"betas": (settings.adam_beta1, settings.adam_beta2), "eps": settings.adam_eps}
        adam |= {"decoupled_weight_decay": settings.decoupled_weight_decay}
        rule = MatrixRule(
            name=update_rules.ADAM,
            grad_dtype=DTYPES[config.main_grad_dtype],
            is_by_chunk=config.steps_block_by_chunk,
            adam=adam,
        )
    return [*rules, (rule, [name for name in parameters.owned_by(block) if name in parameters.matrices()], True)]


def _steps_adam_by_chunk(config: RunConfig) -> bool:
    return config.steps_block_by_chunk and not config.is_muon
