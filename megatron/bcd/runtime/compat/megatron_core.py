"""Megatron Core 0.16.1 and 0.19.2: workarounds, and access to private parts of its schedules, DDP and optimizers.

This file alone knows which version is installed. Each `patch_` function is permanent and does its work once per
process.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from megatron.bcd.runtime.compat import pytorch


@functools.cache
def patch_recomputation() -> None:
    """Make a block's own full recomputation work in 0.19.

    It calls a function where 0.16 calls `_checkpointed_forward` of the block.
    """
    from megatron.core.transformer import transformer_block

    if hasattr(transformer_block, "checkpointed_forward"):
        plain = transformer_block.checkpointed_forward
        transformer_block.checkpointed_forward = lambda block, **inputs: (
            block._checkpointed_forward(**inputs) if hasattr(block, "_checkpointed_forward") else plain(block, **inputs)
        )


@functools.cache
def patch_experts() -> None:
    """Make experts work without Transformer Engine and without a compiler, and keep no graph after their forward pass.

    The router asks whether a name is None that is not defined. And it compiles a function that does nothing without an
    expert bias, which needs a C compiler on a GPU and fails on a CPU. The dispatcher stores the probabilities of the
    last tokens, whose graph holds the input of the pipeline stage or chunk, its gradient, and DDP's hooks.
    """
    from megatron.core.transformer.moe import moe_layer, moe_utils, router

    router.TopKRouter._apply_expert_bias = lambda *args, **kwargs: None
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    forward = moe_layer.MoELayer.forward

    @functools.wraps(forward)
    def forward_without_rest(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        for name, value in list(vars(self.token_dispatcher).items()):
            if torch.is_tensor(value) and value.requires_grad:
                setattr(self.token_dispatcher, name, None)
        return result

    moe_layer.MoELayer.forward = forward_without_rest


def clear_router_losses() -> None:
    """Forget what the routers of experts have collected for reports."""
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "get_moe_metrics_tracker"):  # Megatron Core 0.19; the older function returns a copy there
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

        destroy_moe_metrics_tracker()
    else:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()


def set_linear_function(module: Any, function: Callable[..., Any]) -> None:
    """Replace the function by which a tensor-parallel linear layer multiplies; called with keyword arguments."""
    module._forward_impl = function


@functools.cache
def patch_rotary_embedding() -> None:
    """Provide a compiled rotary embedding for `apply_rope_fusion`. Megatron Core has Transformer Engine's only.

    Evaluation and generation have other lengths than training, so their shapes are dynamic.
    """
    from megatron.core.models.common.embeddings import rope_utils

    if rope_utils.fused_apply_rotary_pos_emb is None:
        rotate = pytorch.compiled(_rotate, has_dynamic_shapes=True)
        rope_utils.fused_apply_rotary_pos_emb = lambda x, freqs, interleaved=False: rotate(x, freqs)


def _rotate(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys [S, B, N, D] by angles [S, 1, 1, R], R <= D: rotary embedding, not interleaved."""
    size = freqs.shape[-1]
    first, second = x[..., :size].chunk(2, dim=-1)
    cos, sin = torch.cos(freqs).to(x.dtype), torch.sin(freqs).to(x.dtype)
    rotated = x[..., :size] * cos + torch.cat((-second, first), dim=-1) * sin
    return rotated if size == x.shape[-1] else torch.cat((rotated, x[..., size:]), dim=-1)


@functools.cache
def patch_optimizer_offload() -> None:
    """Make --optimizer-cpu-offload work without Transformer Engine and in fp32.

    OptimizerConfig compares the version of Transformer Engine even if it is absent. HybridDeviceOptimizer gets fp32
    weights as views, which torch.optim.Optimizer rejects as non-leaf tensors unless they retain their gradient. It also
    does not set the gradient of fp32 weights that stay on the device.
    """
    from megatron.core import utils
    from megatron.core.optimizer import optimizer_config
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    megatron_set_gradients = HybridDeviceOptimizer._set_sub_optimizer_grads

    def is_te_min_version(version: str, check_equality: bool = True) -> bool:
        return utils.get_te_version() is not None and utils.is_te_min_version(version, check_equality)

    def add_param_group(self: Any, group: dict[str, Any]) -> None:
        for weight in group["params"]:
            if not weight.is_leaf:
                weight.retain_grad()
        torch.optim.Optimizer.add_param_group(self, group)

    def set_gradients(self: Any) -> None:
        megatron_set_gradients(self)
        for weight, main_param in self.param_to_inner_param.items():
            if main_param is weight:  # fp32, and not offloaded
                weight.grad = getattr(weight, "decoupled_grad", weight.grad)

    optimizer_config.is_te_min_version = is_te_min_version
    HybridDeviceOptimizer.add_param_group = add_param_group
    HybridDeviceOptimizer._set_sub_optimizer_grads = set_gradients


@functools.cache
def patch_grad_norm() -> None:
    """Compute the gradient norm on the device and clip all gradients at once, without Transformer Engine and Apex.

    Megatron Core's implementation copies one norm per gradient to the host, so the CPU waits for the device once per
    gradient. Its clipping scales and copies the gradients one by one.
    """
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale_in_place


def l2_norm(_chunk_size: int, _noop_flag: Any, tensor_lists: Any, *_: Any) -> tuple[torch.Tensor, None]:
    """Return the norm of all tensors' elements, fp32 of shape [1]. Equals `local_multi_tensor_l2_norm` bit for bit."""
    [tensors] = tensor_lists
    return torch.nn.utils.get_total_norm(tensors).float().view(1), None


def scale_in_place(_chunk_size: int, _noop_flag: Any, tensor_lists: Any, scale: float) -> None:
    """Scale the tensors in place. Equals `local_multi_tensor_scale` bit for bit if both lists are the same tensors."""
    if tensors := tensor_lists[1]:  # by a tensor: a CPU would round a Python number to the dtype of 16-bit tensors
        torch._foreach_mul_(list(tensors), torch.full((), scale, device=tensors[0].device))


@functools.cache
def patch_adam() -> None:
    """Use the fused implementation of PyTorch's Adam, Megatron Core's fallback without Transformer Engine and Apex.

    Megatron Core uses it only with --optimizer-cpu-offload. The results differ by rounding.
    """
    from megatron.core import optimizer

    builder_name = "_get_megatron_optimizer_based_on_param_groups"
    build = getattr(optimizer, builder_name)

    @functools.wraps(build)
    def build_fused(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        take_fused_adam(built.optimizer)
        return built

    setattr(optimizer, builder_name, build_fused)


def take_fused_adam(optimizer: torch.optim.Optimizer | None) -> None:
    """Switch an Adam to the fused implementation. Call it before the first step. Ignore other optimizers."""
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        for group in optimizer.param_groups:
            group["fused"] = True


@functools.cache
def patch_main_param_copies() -> None:
    """Copy the main parameters of all 16-bit parameters in one kernel. Megatron Core launches one for each."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    def copy_main_params(self: Any) -> None:
        if self.is_stub_optimizer or self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            return  # nothing to step, or its inner optimizer copies
        groups = zip(self.shard_fp32_from_float16_groups, self.model_float16_groups, strict=True)
        pairs = [pair for mains, parameters in groups for pair in zip(mains, parameters, strict=True)]
        if pairs:
            shards = [each.data.view(-1)[slice(*shard_range(self, each))] for _, each in pairs]
            pytorch.copy_each(shards, [main_param for main_param, _ in pairs])

    DistributedOptimizer._copy_main_params_to_model_params = copy_main_params


def gather_parameters(wrapped: Any) -> None:
    """Finish pending all-gathers of DDP's parameters, and gather none in forward passes (--overlap-param-gather)."""
    if wrapped.use_forward_hook and wrapped.remove_forward_pre_hook_handles:
        wrapped.disable_forward_pre_hook(param_sync=True)


def gather_in_forward(wrapped: Any) -> None:
    """Gather parameters in forward passes again: the opposite of `gather_parameters`."""
    if wrapped.use_forward_hook and not wrapped.remove_forward_pre_hook_handles:
        wrapped.enable_forward_pre_hook()


def drop_gradient_hooks(wrapped: Any) -> None:
    """Remove DDP's hooks and the autograd nodes that hold them, and with them DDP's buffers."""
    wrapped.grad_accs.clear()
    for handle in getattr(wrapped, "handles", []):
        handle.remove()


def recompute(block: Any, layers: Sequence[Any], **inputs: Any) -> torch.Tensor:
    """Run layers of a TransformerBlock by --recompute-granularity full. `inputs` are those of `_checkpointed_forward`.

    The recomputation in the backward pass runs the same layers, whatever `block.layers` are then.
    """
    from megatron.core.transformer.transformer_block import TransformerBlock

    view = types.SimpleNamespace(
        layers=layers,
        _get_layer=layers.__getitem__,
        num_layers_per_pipeline_rank=len(layers),
        config=block.config,
        pg_collection=block.pg_collection,
    )
    if hasattr(TransformerBlock, "_checkpointed_forward"):  # 0.16
        return TransformerBlock._checkpointed_forward(view, **inputs)
    from megatron.core.recompute import checkpointed_forward

    return checkpointed_forward(view, **inputs)


@functools.cache
def _accepted(function: Any, **values: Any) -> dict[str, Any]:
    """Return those of the keyword arguments that this version of a function has."""
    return {name: value for name, value in values.items() if name in inspect.signature(function).parameters}


def backward_step(received: Any, output: Any, gradient: Any, config: Any) -> Any:
    """Run the backward pass of one chunk. Return the gradient of its input, or None."""
    from megatron.core.pipeline_parallel.schedules import backward_step as run

    return run(received, output, gradient, config=config, **_accepted(run, model_type=None))  # which 0.16 ignores


def context_part(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this context-parallel rank's part of tensors [B, S, ...]; of the key "attention_mask", [B, 1, S, S]."""
    from megatron.core import parallel_state, utils

    split, group = utils.get_batch_on_this_cp_rank, parallel_state.get_context_parallel_group()
    return split(batch, cp_group=group, **_accepted(split, is_hybrid_cp=False))


def load_sharded(sharded: dict[str, Any], folder: str) -> dict[str, Any]:
    """Load the shards of a checkpoint, without ``common.pt``: it is not needed, and stock's contains more than data."""
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import common

    reader, name = serialization, "load_common_state_dict"
    if hasattr(common, "TorchCommonLoadStrategy"):  # 0.16
        reader, name = common.TorchCommonLoadStrategy, "load_common"
    with mock.patch.object(reader, name, lambda *_: {}):
        return serialization.load(sharded, folder)  # type: ignore[no-any-return]


def retain_shard_gradients(optimizer: Any) -> None:
    """Retain the gradients of a DistributedOptimizer's shards, which are views.

    Otherwise PyTorch spends 10 microseconds on a warning each time that Megatron Core reads one.
    """
    for shard in (each for group in optimizer.shard_fp32_groups + optimizer.shard_float16_groups for each in group):
        if not shard.is_leaf:
            shard.retain_grad()


def group_positions(optimizer: Any) -> dict[torch.nn.Parameter, tuple[int, int]]:
    """Return (index of the group, index in the group) of each parameter that a DistributedOptimizer shards here."""
    return optimizer.model_param_group_index_map


def shard_range(optimizer: Any, parameter: torch.nn.Parameter) -> tuple[int, int]:
    """Return the start and end of this rank's shard of a flat parameter of a DistributedOptimizer."""
    shard = optimizer._get_model_param_range_map(parameter)["param"]
    return shard.start, shard.end
