"""Megatron Core's TransformerConfig from the flags."""

from __future__ import annotations

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.bcd.blocks.partition import divide
from megatron.bcd.config import RunConfig
from megatron.bcd.model.implementation import Implementation
from megatron.bcd.runtime import device, packages

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Of weights and activations, by the run's precision."""


def build_transformer_config(config: RunConfig, implementation: Implementation) -> TransformerConfig:
    """Megatron Core's configuration from the flags, the precision and the available kernels.

    Raises:
        ValueError: a flag needs kernels that are not installed, or Megatron Core rejects the combination.
    """
    fields = dict(config.transformer)
    dtype = DTYPES[config.precision]
    fields.update(params_dtype=dtype, pipeline_dtype=dtype, deallocate_pipeline_outputs=True)
    if "attention_backend" in fields:
        fields["attention_backend"] = AttnBackend[str(fields["attention_backend"])]
    if config.model.swiglu:
        fields.update(gated_linear_unit=True, activation_func=torch.nn.functional.silu)
    has_bias = fields.get("add_bias_linear", True)
    has_fast_kernels = not device.has_cuda() and config.training.cpu_kernels == "fast"
    fuses_activation = device.has_cuda() and (config.model.swiglu or has_bias)
    if not (fuses_activation or has_fast_kernels and config.model.swiglu):
        fields["bias_activation_fusion"] = False
    if config.model.openai_gelu and not fields["bias_activation_fusion"]:
        # the fused kernel always computes the tanh form, but Megatron Core accepts it for torch's GELU only
        fields["activation_func"] = tanh_gelu
    if not device.has_cuda():
        fields["bias_dropout_fusion"] = False
        fields["cross_entropy_loss_fusion"] = False
        fields["fused_single_qkv_rope"] = has_fast_kernels and _has_plain_rotation(config)
    if implementation.layers == "local":
        fields["persist_layer_norm"] = False
        fields["apply_rope_fusion"] = False
        if fields.get("layernorm_zero_centered_gamma") and not implementation.norm.startswith("Apex"):
            raise ValueError(
                "--apply-layernorm-1p needs the layer norms of Apex or Transformer Engine, which are not importable "
                "here; leave it out"
            )
        if fields.get("sequence_parallel") and not implementation.norm.startswith("Apex"):
            raise ValueError(
                "--sequence-parallel needs the layer norms of Apex or Transformer Engine, which are not importable "
                "here; leave it out"
            )
        if "mlp" in (fields.get("recompute_modules") or ()) and fields.get("add_bias_linear", True):
            raise ValueError(
                "--recompute-modules mlp needs --disable-bias-linear without Transformer Engine: Megatron Core's "
                "recomputation of a layer with biases never ends; leave mlp out, or take --recompute-granularity full"
            )
    # also with Transformer Engine: the output head is Megatron Core's own linear layer
    if not device.has_cuda() or not packages.is_importable("fused_weight_gradient_mlp_cuda"):
        fields["gradient_accumulation_fusion"] = False
    if not device.has_cuda() or not packages.is_importable("scaled_masked_softmax_cuda"):
        fields["masked_softmax_fusion"] = False
    if config.num_layers % config.pipeline_size:
        fields["pipeline_model_parallel_layout"] = _uneven_layout(config.num_layers, config.pipeline_size)
    try:
        return TransformerConfig(**fields)
    except AssertionError as error:
        raise ValueError(f"Megatron Core refuses these flags: {error}") from error


def _has_plain_rotation(config: RunConfig) -> bool:
    """Whether the fused rotary embedding of `runtime.cpu_kernels` applies: all of each head, in halves, straight after
    the projection."""
    fields = config.transformer
    groups = int(fields.get("num_query_groups") or fields["num_attention_heads"])
    is_plain = config.model.rotary_percent == 1.0 and not fields.get("rotary_interleaved")
    # nothing comes between projection and rotation
    is_alone = not fields.get("qk_layernorm") and groups >= config.tensor_size
    return config.model.position_embedding_type == "rope" and is_plain and is_alone


def tanh_gelu(x: Tensor) -> Tensor:
    """GELU in the tanh form of OpenAI's GPT-2 (--openai-gelu), elementwise."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def describe_activation(config: TransformerConfig) -> str:
    """Name of the MLP's activation, for people."""
    if config.gated_linear_unit:
        return "SwiGLU"
    return "GELU (tanh form)" if config.bias_activation_fusion or config.activation_func is tanh_gelu else "GELU"


def _uneven_layout(num_layers: int, num_stages: int) -> list[list[str]]:
    """Megatron Core's pipeline layout if stages differ in their number of layers: as `blocks.partition.divide`."""
    stages = [["decoder"] * len(layers) for layers in divide(num_layers, num_stages)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages
