"""Build Megatron Core's TransformerConfig from the flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.bcd.blocks.partition import layout_text, partition_from_config
from megatron.bcd.config import RunConfig
from megatron.bcd.model.implementation import SCALED_DOT_PRODUCT, Implementation
from megatron.bcd.runtime import device, packages
from megatron.bcd.runtime.compat import megatron_core
from megatron.bcd.runtime.device import DTYPES

PHASE_FIELDS = ("grad_scale_func", "finalize_model_grads_func", "no_sync_func", "grad_sync_func", "param_sync_func")
"""Fields that belong to a phase. A copy of the configuration with them would keep the phase's wrapper and optimizer."""


def build_transformer_config(config: RunConfig, implementation: Implementation) -> TransformerConfig:
    """Return Megatron Core's configuration, given the flags, the precision and the available kernels.

    Raises:
        ValueError: a flag needs kernels that are not installed, or Megatron Core rejects the combination.
    """
    dtype = DTYPES[config.precision]
    fields = dict(config.transformer, params_dtype=dtype, pipeline_dtype=dtype, deallocate_pipeline_outputs=True)
    if "attention_backend" in fields:
        fields["attention_backend"] = AttnBackend[str(fields["attention_backend"])]
    if config.model.swiglu:
        fields.update(gated_linear_unit=True, activation_func=torch.nn.functional.silu)
    if config.model.squared_relu:
        fields["activation_func"] = squared_relu
    has_bias = fields.get("add_bias_linear", True)
    has_fused_gelu = has_bias and not (config.model.squared_relu or config.num_experts)
    if not (device.has_cuda() and (config.model.swiglu or has_fused_gelu)):
        fields["bias_activation_fusion"] = False
    if config.model.openai_gelu and not fields["bias_activation_fusion"]:
        # the fused kernel always computes the tanh form, but Megatron Core accepts it for torch's GELU only
        fields["activation_func"] = tanh_gelu
    fields.pop("cross_entropy_fusion_impl", None)
    if config.fp8_products:  # Megatron Core knows only Transformer Engine's
        del fields["fp8"], fields["fp8_recipe"]
    if fields.get("cross_entropy_loss_fusion") is None:
        fields["cross_entropy_loss_fusion"] = packages.compiles(config.bcd.bcd_compile)
    if config.has_linear_loss or not device.has_cuda():
        fields["cross_entropy_loss_fusion"] = False
    if not device.has_cuda():
        fields["bias_dropout_fusion"] = False
    if config.context_size > 1 and config.data.reset_attention_mask and implementation.attention != SCALED_DOT_PRODUCT:
        raise ValueError(
            f"--reset-attention-mask: does not work with --context-parallel-size {config.context_size}, because "
            "Transformer Engine's attention splits only causal masks. Give --transformer-impl local."
        )
    if implementation.layers != "transformer_engine":
        fields["persist_layer_norm"] = False
        is_compiled = packages.compiles(config.bcd.bcd_compile) and not fields.get("rotary_interleaved")
        fields["apply_rope_fusion"] = is_compiled and bool(fields.get("apply_rope_fusion"))
        if is_compiled:
            megatron_core.patch_rotary_embedding()
        kernels = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")  # Transformer Engine's
        fields |= {field: False for field in kernels if field in fields}
        if "mlp" in (fields.get("recompute_modules") or ()) and fields.get("add_bias_linear", True):
            raise ValueError(
                "--recompute-modules mlp: Megatron Core's recomputation of a layer with biases never ends without "
                "Transformer Engine. Give --disable-bias-linear, omit mlp, or give --recompute-granularity full."
            )
    # the output head is Megatron Core's linear layer even with Transformer Engine
    has_kernel = device.has_cuda() and packages.is_importable("fused_weight_gradient_mlp_cuda")
    if not has_kernel or _has_narrow_gradients(config):
        fields["gradient_accumulation_fusion"] = False
    if not device.has_cuda() or not packages.is_importable("scaled_masked_softmax_cuda"):
        fields["masked_softmax_fusion"] = False
    _check_compiled_fusions(config, fields)
    cut = partition_from_config(config)
    if cut.num_chunks > 1:
        fields["virtual_pipeline_model_parallel_size"] = cut.num_chunks
    if cut.num_chunks > 1 or len({*map(len, cut.virtual_stages)}) > 1:
        fields["pipeline_model_parallel_layout"] = layout_text(map(len, cut.virtual_stages))
    try:
        return TransformerConfig(**fields)
    except AssertionError as error:
        raise ValueError(f"Megatron Core rejects these flags: {error}") from error


def _has_narrow_gradients(config: RunConfig) -> bool:
    """Return whether gradients of fp32 weights are summed in bf16, which the fused kernel does not support."""
    dtypes = [config.bcd.bcd_inactive_grad_dtype] if config.bcd.bcd_inactive_update != "none" else []
    dtypes += [config.bcd.muon_grad_dtype] if config.is_muon else []
    return config.precision == "fp32" and "bf16" in dtypes


def _check_compiled_fusions(config: RunConfig, fields: Mapping[str, Any]) -> None:
    """Raise ValueError if Megatron Core's compiled functions would fail on this GPU in the first step."""
    ways = {
        "bias_activation_fusion": f"with --no-bias-{'swiglu' if config.model.swiglu else 'gelu'}-fusion",
        "bias_dropout_fusion": "with --no-bias-dropout-fusion",
        "cross_entropy_loss_fusion": "without --cross-entropy-loss-fusion",
    }
    compiled = [way for field, way in ways.items() if fields.get(field)]
    if compiled and device.has_cuda() and (missing := packages.missing_for_compilation()):
        raise ValueError(
            f"{missing} is missing, but Megatron Core's fused functions need it on a GPU (torch.compile). Install gcc "
            f"and python3-dev, or run {', '.join(compiled)}."
        )


def tanh_gelu(x: Tensor) -> Tensor:
    """Return GELU in the tanh form of OpenAI's GPT-2 (--openai-gelu), elementwise."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """Return relu(x)^2 (--squared-relu), elementwise. Megatron Core's needs a compiler."""
    return torch.nn.functional.relu(x).pow(2)


def describe_activation(config: TransformerConfig) -> str:
    """Return the name of the MLP's activation."""
    names = {torch.nn.functional.silu: "SwiGLU", squared_relu: "squared ReLU"}
    if config.activation_func in names:
        return names[config.activation_func]
    return "GELU (tanh form)" if config.bias_activation_fusion or config.activation_func is tanh_gelu else "GELU"
