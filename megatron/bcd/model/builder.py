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

from megatron.bcd.config import RunConfig
from megatron.bcd.model.attention import ScaledDotProductAttention
from megatron.bcd.model.implementation import SCALED_DOT_PRODUCT, Implementation
from megatron.bcd.model.transformer_block import BcdTransformerBlock
from megatron.bcd.model.transformer_config import build_transformer_config
from megatron.bcd.runtime import device, rng


def _layer_spec(config: RunConfig, implementation: Implementation) -> ModuleSpec:
    qk_layernorm = bool(config.transformer.get("qk_layernorm", False))
    if implementation.layers == "transformer_engine":
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_layernorm)
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=qk_layernorm, normalization=config.transformer.get("normalization", "LayerNorm")
        )
    if implementation.attention == SCALED_DOT_PRODUCT:
        spec.submodules.self_attention.submodules.core_attention = ScaledDotProductAttention
    return spec


def build_model(config: RunConfig, padded_vocab_size: int, implementation: Implementation) -> torch.nn.Module:
    """Build this rank's pipeline stage on its device, in the run's precision, with all parameters trainable.

    Parallel groups and random generators must be initialised.

    Returns:
        A GPTModel; in 16-bit precision wrapped in a Float16Module.

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
    model: torch.nn.Module = GPTModel(
        config=stage_config,
        transformer_layer_spec=_layer_spec(config, implementation),
        vocab_size=padded_vocab_size,
        max_sequence_length=config.model.max_position_embeddings or config.model.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config.tied,
        position_embedding_type=config.model.position_embedding_type,  # type: ignore[arg-type]
        rotary_percent=config.model.rotary_percent,
        rotary_base=config.model.rotary_base,
    )
    # GPTModel takes no class for its decoder; BcdTransformerBlock only overrides methods, so the class can be changed
    # after the decoder is built
    model.decoder.__class__ = BcdTransformerBlock
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    model.to(device.current())
    if config.precision != "fp32":
        model = Float16Module(stage_config, model)
    return model


@torch.no_grad()
def broadcast_from_first_replica(model: torch.nn.Module) -> None:
    """Copy the weights of the first data-parallel rank to the others (--data-parallel-random-init). A collective."""
    group = parallel_state.get_data_parallel_group()
    for parameter in model.parameters():
        torch.distributed.broadcast(parameter, src=parallel_state.get_data_parallel_src_rank(), group=group)


def unwrap_model(model: torch.nn.Module) -> GPTModel:
    """The GPTModel inside DDP and Float16Module wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model  # type: ignore[return-value]


def count_parameters(model: torch.nn.Module) -> int:
    """Number of parameters of this stage over its tensor-parallel ranks; replicated parameters count once."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return sum(p.numel() * (ranks if getattr(p, "tensor_model_parallel", False) else 1) for p in model.parameters())
