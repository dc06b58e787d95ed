"""Build the model of one pipeline stage.

Tensor shapes: S sequence length on this rank, B micro-batch size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.bcd.blocks.ownership import ownership
from megatron.bcd.blocks.partition import partition_from_config
from megatron.bcd.config import RunConfig
from megatron.bcd.model import fp8, grouped_experts, transformers_model
from megatron.bcd.model.attention import ScaledDotProductAttention
from megatron.bcd.model.chunks import ChunkwiseFloat16Module, ChunkwiseModel
from megatron.bcd.model.host_layers import LOW_BITS, HostLayers, StreamedLayer
from megatron.bcd.model.implementation import SCALED_DOT_PRODUCT, TRANSFORMERS, Implementation
from megatron.bcd.model.linear_loss import LinearLossModel
from megatron.bcd.model.transformer_block import BcdTransformerBlock
from megatron.bcd.model.transformer_config import build_transformer_config
from megatron.bcd.runtime import device, replicas, rng


class PlainNorm(torch.nn.Module):
    """LayerNorm or RMSNorm in plain PyTorch with --apply-layernorm-1p and --sequence-parallel.

    Megatron Core's wrapper of PyTorch's norms supports neither. With --apply-layernorm-1p the weight is an offset from
    1. With --sequence-parallel each tensor-parallel rank has a part of the sequence, and Megatron Core sums the
    gradients of parameters marked `sequence_parallel` over these ranks. The signature is that of Megatron Core's norms.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.is_centered = config.layernorm_zero_centered_gamma
        self.is_rms = config.normalization == "RMSNorm"
        self.weight = torch.nn.Parameter((torch.zeros if self.is_centered else torch.ones)(hidden_size))
        self.bias = None if self.is_rms else torch.nn.Parameter(torch.zeros(hidden_size))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [S, B, H], or [S, B, heads, head size] for queries and keys."""
        dtype, weight, bias = x.dtype, self.weight, self.bias
        if self.is_centered:  # in fp32, because 16 bits cannot hold the sum: 1 + 0.001 is 1 in bf16
            x, weight, bias = x.float(), weight.float() + 1, None if bias is None else bias.float()
        if self.is_rms:
            return torch.nn.functional.rms_norm(x, weight.shape, weight, self.eps).to(dtype)
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, self.eps).to(dtype)


class ChunkedModel(MegatronModule):
    """The chunks of one stage, ordered by depth. `select_chunk` determines which one runs forward.

    One module for all chunks means one DDP wrapper, one set of gradient buffers and one optimizer per block, however
    many chunks there are.
    """

    def __init__(self, chunks: Sequence[GPTModel]) -> None:
        super().__init__(config=chunks[0].config)
        self.chunks = torch.nn.ModuleList(chunks)
        self.share_embeddings_and_output_weights = chunks[0].share_embeddings_and_output_weights
        self.model_type, self.vocab_size = chunks[0].model_type, chunks[0].vocab_size
        # Megatron Core reads these when it sums gradients of tied embeddings
        self.pre_process, self.post_process = chunks[0].pre_process, chunks[-1].post_process
        self._selected: list[Any] = [chunks[0]]  # in a list, because as an attribute it would be a submodule again

    def select_chunk(self, chunk: int | None) -> None:
        """Make `forward` and `set_input_tensor` use this chunk. The others keep no input, and no gradient of one."""
        if chunk is not None:
            self.set_input_tensor(None)
            self._selected = [self.chunks[chunk]]

    @property
    def decoder(self) -> torch.nn.Module:
        """The selected chunk's layers, where Megatron Core stores the microbatch's number."""
        return self._selected[0].decoder  # type: ignore[no-any-return]

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Set the input of the selected chunk."""
        self._selected[0].set_input_tensor(input_tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the selected chunk."""
        return self._selected[0](*args, **kwargs)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """Return this stage's tied weight: the embedding on the first stage, its copy on the last one."""
        return self.chunks[0 if self.pre_process else -1].shared_embedding_or_output_weight()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return GPTModel's state. Names are this module's, keys in a checkpoint those of the whole model."""
        assert not prefix and not sharded_offsets, "stages are saved as a whole"
        return {
            f"chunks.{number}.{name}": entry
            for number, chunk in enumerate(self.chunks)
            for name, entry in chunk.sharded_state_dict(metadata=metadata).items()
        }


def _layer_specs(
    config: RunConfig,
    implementation: Implementation,
    stage_config: TransformerConfig,
    vp_stage: int | None,
    host_layers: HostLayers,
) -> TransformerBlockSubmodules:
    """Return the specs of this chunk's layers: Megatron Core's, with our attention, norms and streaming."""
    specs: Any = get_gpt_decoder_block_spec(
        stage_config,
        use_transformer_engine=implementation.layers == "transformer_engine",
        normalization=stage_config.normalization,
        vp_stage=vp_stage,
    )
    is_special = stage_config.layernorm_zero_centered_gamma or stage_config.sequence_parallel
    has_plain_norms = is_special and implementation.norm.startswith("PyTorch")
    specs.layer_norm = PlainNorm if has_plain_norms else transformer_block.LayerNormImpl
    for spec in {id(each): each for each in specs.layer_specs}.values():  # one of dense layers, one of experts
        layer, attention = spec.submodules, spec.submodules.self_attention.submodules
        if config.bcd.bcd_layers_on == "host":
            spec.module, spec.params = StreamedLayer, {**spec.params, "host_layers": host_layers}
        if implementation.attention == SCALED_DOT_PRODUCT:
            attention.core_attention = ScaledDotProductAttention
        if has_plain_norms:
            layer.input_layernorm = layer.pre_mlp_layernorm = PlainNorm
            if stage_config.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = PlainNorm
    return specs


def build_model(config: RunConfig, padded_vocab_size: int, implementation: Implementation) -> torch.nn.Module:
    """Build this rank's pipeline stage on its device, in the run's precision, with all parameters trainable.

    It also sets Megatron Core's virtual pipeline size for the process. Parallel groups and random generators must be
    initialised.

    Returns:
        A GPTModel, or a ChunkedModel; in 16-bit precision inside a Float16Module.

    Raises:
        ValueError: as `build_transformer_config`.
    """
    stage_config = build_transformer_config(config, implementation)
    if not device.has_cuda():
        rng.draw_like_stock_warm_up(
            seq_length=config.model.seq_length,
            micro_batch_size=config.training.micro_batch_size,
            hidden_size=stage_config.hidden_size,
            dtype=stage_config.params_dtype,
            ffn_hidden_size=stage_config.ffn_hidden_size // stage_config.tensor_model_parallel_size,
        )
    num_chunks = config.num_chunks
    parallel_state.set_virtual_pipeline_model_parallel_world_size(num_chunks if num_chunks > 1 else None)
    host_layers = _host_layers(config, stage_config, padded_vocab_size)
    try:
        if implementation.layers == TRANSFORMERS:
            chunks: Any = transformers_model.build_chunks(config, stage_config, host_layers)
        else:
            chunks = [
                _build_chunk(config, stage_config, padded_vocab_size, implementation, chunk, host_layers)
                for chunk in range(num_chunks)
            ]
    except ValueError as error:  # Megatron Core adds the layer's class to the message
        raise ValueError(str(error).split(" when instantiating ")[0]) from error
    for chunk in chunks if config.is_breadth_first and config.pipeline_size == 1 else ():
        chunk.chunk_layers = partition_from_config(config).in_passes(config.bcd.bcd_layers_per_pass).virtual_stages
    model: torch.nn.Module = ChunkedModel(chunks) if num_chunks > 1 else chunks[0]
    is_grouped = config.num_experts and config.transformer["moe_grouped_gemm"]
    if is_grouped and grouped_experts.is_available(stage_config.params_dtype, *config.expert_sizes):
        grouped_experts.group_experts(model)  # where Transformer Engine has not done it
    for module in model.modules():
        if isinstance(module, RowParallelLinear) and module.is_expert and module.bias is not None:
            # Megatron Core adds the bias in place, which autograd forbids behind the reduction over tensor-parallel
            # ranks. Experts with biases are never sliced, so there is nothing to reduce.
            module.explicit_expert_comm = True
            # Tensor-parallel ranks have biases of different experts: they do not add them up, and each counts its own.
            module.bias.sequence_parallel = False
            tensor_parallel.set_tensor_model_parallel_attributes(module.bias, is_parallel=True, dim=0, stride=1)
    model.fp8_weights = fp8.use_products(model, config)  # type: ignore[assignment]
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if config.has_embedding_on_host and chunks[0].pre_process:
        host_layers.add_embedding(chunks[0].embedding.word_embeddings)
    host_layers.move_rest(model)
    model.host_layers = host_layers  # type: ignore[assignment]
    if config.precision != "fp32":
        model = ChunkwiseFloat16Module(stage_config, model)
    return model


def _build_chunk(
    config: RunConfig,
    stage_config: TransformerConfig,
    padded_vocab_size: int,
    implementation: Implementation,
    chunk: int,
    host_layers: HostLayers,
) -> GPTModel:
    vp_stage = chunk if config.num_chunks > 1 else None
    model = (LinearLossModel if config.has_linear_loss else ChunkwiseModel)(
        config=stage_config,
        transformer_layer_spec=_layer_specs(config, implementation, stage_config, vp_stage, host_layers),
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
    for layer in model.decoder.layers:
        if isinstance(layer.mlp, MoELayer):  # Transformer Engine's key: it does not fuse the norm with experts
            layer.submodules_config.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
        if "biases" in config.bcd.always_active and layer.self_attention.linear_qkv.bias is not None:
            layer.self_attention.linear_qkv.register_forward_hook(_add_bias_gradient)
    # GPTModel has no argument for the decoder's class. BcdTransformerBlock only overrides methods, so the class can be
    # changed afterwards.
    model.decoder.__class__ = BcdTransformerBlock
    return model


def _host_layers(config: RunConfig, stage_config: TransformerConfig, padded_vocab_size: int) -> HostLayers:
    """Return the frozen weights of this stage, except parameters that are always active."""
    partition = partition_from_config(config)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    by_chunk = config.steps_block_by_chunk
    keeps = config.bcd.bcd_main_params == "host" or by_chunk

    def is_streamed(name: str, parameter: torch.nn.Parameter) -> bool:
        name = f"decoder.layers.0.{name}"
        owned = ownership(name, partition=partition, stage=stage, num_axes=parameter.dim())
        return owned.is_matrix if by_chunk else not owned.is_always_active

    embedding_size = padded_vocab_size // config.tensor_size * config.hidden_size
    chunk_layers = max(map(len, partition.in_passes(config.bcd.bcd_layers_per_pass).chunks_on_stage(stage)))
    state = {"bf16": {LOW_BITS: (torch.int16, 1)}, "fp16": {LOW_BITS: (torch.float32, 1)}, "fp32": {}}[config.precision]
    others = {kind: (device.DTYPES[dtype], shared) for kind, (dtype, shared) in config.state_on_host.items()}
    return HostLayers(
        num_layers=len(partition.stage_layers(stage)),
        embedding_size=embedding_size if config.has_embedding_on_host and stage == 0 else 0,
        num_buffers=3 * chunk_layers + config.bcd.bcd_resident_layers,
        dtype=stage_config.params_dtype,
        state=(state if keeps else {}) | others,
        is_streamed=is_streamed,
        group=replicas.group(),
        part=(parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank()),
    )


def get_host_layers(model: torch.nn.Module) -> HostLayers:
    """Return the layers in host memory of a model of `build_model`. Without --bcd-layers-on host there are none."""
    return unwrap_model(model).host_layers  # type: ignore[return-value]


def get_fp8_weights(model: torch.nn.Module) -> fp8.Weights:
    """Return the weights of a model of `build_model` that multiply in FP8. Without FP8 there are none."""
    return unwrap_model(model).fp8_weights  # type: ignore[return-value]


def _add_bias_gradient(linear: Any, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Add a zero that has the bias's gradient, for an active bias of a frozen weight (--bcd-always-active biases).

    Megatron Core's linear layer returns no gradient for the bias of a frozen weight, and Transformer Engine computes it
    together with the weight's. Only queries, keys and values need this: other linear layers return their bias
    separately, for fused kernels.
    """
    if not linear.bias.requires_grad or linear.weight.requires_grad or not torch.is_grad_enabled():
        return output
    return output[0] + (linear.bias - linear.bias.detach()), output[1]


def unwrap_model(model: torch.nn.Module) -> GPTModel:
    """Return the GPTModel or ChunkedModel inside DDP and Float16Module wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model  # type: ignore[return-value]


def select_chunk(model: torch.nn.Module, chunk: int | None) -> None:
    """Make a stage's forward pass use one of its chunks, which are models or layers of one model (None: all of them).
    Does nothing if it has neither."""
    unwrap_model(model).select_chunk(chunk)  # type: ignore[operator]


def get_chunks(model: torch.nn.Module) -> list[GPTModel]:
    """Return the GPTModels of this stage."""
    unwrapped = unwrap_model(model)
    return [*getattr(unwrapped, "chunks", (unwrapped,))]


def count_parameters(model: torch.nn.Module) -> int:
    """Return the number of parameters of this stage over its tensor- and expert-parallel ranks. Count replicated ones
    once."""
    experts = parallel_state.get_expert_model_parallel_world_size()
    return sum(
        p.numel()
        * (replicas.tensor_group(p).size() if getattr(p, "tensor_model_parallel", False) else 1)
        * (experts if replicas.is_expert(p) else 1)
        for p in model.parameters()
    )
