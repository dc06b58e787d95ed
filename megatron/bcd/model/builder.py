"""Builds the model of one pipeline stage."""

from __future__ import annotations

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.bcd.config import RunConfig
from megatron.bcd.model.attention import ScaledDotProductAttention
from megatron.bcd.model.bias_gradient import add_bias_gradients
from megatron.bcd.model.chunks import ChunkedModel
from megatron.bcd.model.implementation import SCALED_DOT_PRODUCT, Implementation
from megatron.bcd.model.norm import PlainNorm
from megatron.bcd.model.transformer_block import BcdTransformerBlock
from megatron.bcd.model.transformer_config import build_transformer_config
from megatron.bcd.runtime import device, replicas, rng


def _layer_spec(
    config: RunConfig, implementation: Implementation, stage_config: TransformerConfig, vp_stage: int | None
) -> ModuleSpec | TransformerBlockSubmodules:
    """What the stage's layers are built from."""
    qk_layernorm = bool(config.transformer.get("qk_layernorm", False))
    if implementation.layers == "transformer_engine":
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_layernorm)
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=qk_layernorm, normalization=config.transformer.get("normalization", "LayerNorm")
        )
    if implementation.attention == SCALED_DOT_PRODUCT:
        spec.submodules.self_attention.submodules.core_attention = ScaledDotProductAttention
    is_special = stage_config.layernorm_zero_centered_gamma or stage_config.sequence_parallel
    if not (is_special and implementation.norm.startswith("PyTorch")):
        return spec
    of_layer, of_attention = spec.submodules, spec.submodules.self_attention.submodules
    of_layer.input_layernorm = of_layer.pre_mlp_layernorm = PlainNorm
    if qk_layernorm:
        of_attention.q_layernorm = of_attention.k_layernorm = PlainNorm
    num_layers = get_num_layers_to_build(stage_config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=PlainNorm)


def build_model(config: RunConfig, padded_vocab_size: int, implementation: Implementation) -> torch.nn.Module:
    """Build this rank's pipeline stage on its device, in the run's precision, with all parameters trainable.

    Megatron Core's virtual pipeline size is set for the process.

    Parallel groups and random generators must be initialised.

    Returns:
        A GPTModel, or a ChunkedModel of several; in 16-bit precision wrapped in a Float16Module.

    Raises:
        ValueError: as `build_transformer_config`.
    """
    stage_config = build_transformer_config(config, implementation)
    if not device.has_cuda():
        rng.draw_as_stock_warm_up_does(
            seq_length=config.model.seq_length,
            micro_batch_size=config.training.micro_batch_size,
            hidden_size=stage_config.hidden_size,
            dtype=stage_config.params_dtype,
            ffn_hidden_size=stage_config.ffn_hidden_size // stage_config.tensor_model_parallel_size,
        )
    num_chunks = config.num_chunks
    parallel_state.set_virtual_pipeline_model_parallel_world_size(num_chunks if num_chunks > 1 else None)
    chunks = [
        _build_chunk(config, stage_config, padded_vocab_size, implementation, chunk) for chunk in range(num_chunks)
    ]
    model: torch.nn.Module = ChunkedModel(chunks) if num_chunks > 1 else chunks[0]
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    model.to(device.current())
    if config.precision != "fp32":
        model = Float16Module(stage_config, model)
    return model


def _build_chunk(
    config: RunConfig,
    stage_config: TransformerConfig,
    padded_vocab_size: int,
    implementation: Implementation,
    chunk: int,
) -> GPTModel:
    vp_stage = chunk if config.num_chunks > 1 else None
    model = GPTModel(
        config=stage_config,
        transformer_layer_spec=_layer_spec(config, implementation, stage_config, vp_stage),
        vocab_size=padded_vocab_size,
        max_sequence_length=config.model.max_position_embeddings or config.model.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage() and chunk == 0,
        post_process=parallel_state.is_pipeline_last_stage() and chunk == config.num_chunks - 1,
        share_embeddings_and_output_weights=config.tied,
        position_embedding_type=config.model.position_embedding_type,  # type: ignore[arg-type]
        rotary_percent=config.model.rotary_percent,
        rotary_base=config.model.rotary_base,
        rope_scaling=config.model.use_rope_scaling,
        rope_scaling_factor=config.model.rope_scaling_factor,
        vp_stage=vp_stage,
    )
    if "biases" in config.bcd.always_active:
        add_bias_gradients(model)
    # GPTModel takes no class for its decoder; BcdTransformerBlock only overrides methods, so the class can be changed
    # after the decoder is built
    model.decoder.__class__ = BcdTransformerBlock
    return model


@torch.no_grad()
def broadcast_from_first_replica(model: torch.nn.Module) -> None:
    """Copy the weights of the first replica to the others (--data-parallel-random-init). A collective."""
    for parameter in model.parameters():
        torch.distributed.broadcast(parameter, src=replicas.first(), group=replicas.group())


def unwrap_model(model: torch.nn.Module) -> GPTModel:
    """The GPTModel, or ChunkedModel, inside DDP and Float16Module wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model  # type: ignore[return-value]


def select_chunk(model: torch.nn.Module, chunk: int) -> None:
    """Let the forward pass of a stage of several chunks be that of one of them."""
    unwrapped: torch.nn.Module = unwrap_model(model)
    assert isinstance(unwrapped, ChunkedModel)
    unwrapped.select(chunk)


def chunks_of(model: torch.nn.Module) -> list[GPTModel]:
    """The GPTModels of this stage."""
    unwrapped: torch.nn.Module = unwrap_model(model)
    return list(unwrapped.chunks) if isinstance(unwrapped, ChunkedModel) else [unwrap_model(model)]  # type: ignore[arg-type]


def count_parameters(model: torch.nn.Module) -> int:
    """Number of parameters of this stage over its tensor-parallel ranks; replicated parameters count once."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return sum(p.numel() * (ranks if getattr(p, "tensor_model_parallel", False) else 1) for p in model.parameters())
